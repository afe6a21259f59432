"""Speculative beam search: transformers' own beams, several steps a pass.

A step needs the log-probabilities after each beam. A pass reads the last tokens of all beams of all rows, and drafts behind them; then
steps are made as long as every new beam is among what was read. Drafts change how many steps a pass makes, never what a step gives.
(The idea: Andronov et al., J. Cheminformatics 2025, who draft for each beam. Here what is read is chosen over all beams of a row, and
what was read ahead for some of the beams stays for the next pass.)

Shape suffixes: B batch, T positions, N nodes, K beams, M likeliest next tokens, R beams of all rows, P positions on a path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headstart.inference.beam.breadth import Breadth
from headstart.inference.beam.drafts import Drafting, Drafts, Path, Wanted
from headstart.inference.beam.features import NodeFeatures
from headstart.inference.beam.rules import BeamRules
from headstart.inference.beam.search import Beam, Search
from headstart.inference.beam.trie import BeamTrie, TopK, TrieReader
from headstart.inference.capture.capture import Capturer
from headstart.inference.decode import Clock, Pass
from headstart.inference.engine.cache import RaggedCache
from headstart.inference.engine.processing import History
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request, prompts_at_the_left
from headstart.inference.engine.tree import TreeShape
from headstart.inference.speculation.speculation import Speculation
from headstart.support.errors import UserError


class Beams:
    """What a backbone's beam searches have in common: recordings, and what was learned."""

    def __init__(self, reader: Reader, speculation: Speculation | None, capturer: Capturer) -> None:
        self.tries, self.speculation = TrieReader(reader, capturer), speculation
        self.breadths: dict[int, tuple[Breadth, Breadth]] = {}

    def drafting(self, beams: int, shape: TreeShape | None) -> Drafting | None:
        """What drafts in one call, if anything does."""
        if self.speculation is None:
            return None
        return Drafting(self.speculation, self.breadths.setdefault(beams, (Breadth(beams), Breadth(beams))), shape)


@dataclass
class Row:
    """A text being written."""

    text: int
    prompt: list[int]
    search: Search
    trie: BeamTrie
    last: list[int]
    """Of each beam, the node of its last token but one, the last that all of them have read."""

    def known(self) -> list[dict[tuple[int, ...], TopK]]:
        """For each beam, what was said at its last token and behind it, by the tokens behind it."""
        beams = self.search.running
        nodes = [self.trie.find(node, beam.tokens[-1]) for node, beam in zip(self.last, beams, strict=True)]
        paths: dict[int, tuple[int, ...]] = {}
        found: list[dict[tuple[int, ...], TopK]] = [{} for _ in beams]
        for node, top in self.trie.below([node for node in nodes if node is not None]).items():
            paths[node] = () if node == top else (*paths[self.trie.parents[node]], self.trie.tokens[node])
            found[nodes.index(top)][paths[node]] = self.trie.said[node]
        return found


@dataclass
class Run:
    """What a pass brought a row: how many steps, and of each new beam which one it continues and the last node read."""

    steps: int = 0
    origins: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)


class BeamDecoder:
    """One call's beam searches. ``shape``: its ``nodes`` are a row's, those of its beams' last tokens among them; None: as many as pay.

    ``batch``: how many rows at once; the next ones begin when all of those are over.
    """

    def __init__(self, beams: Beams, request: Request, rules: BeamRules, shape: TreeShape | None, batch: int) -> None:
        self.tries, self.speculation = beams.tries, beams.speculation
        self.request, self.rules, self.batch = request, rules, batch
        self.drafting = beams.drafting(rules.beams, shape)
        self.backbone, self.device = beams.tries.reader.backbone, request.ids_BT.device
        if self.backbone.recurrent is not None:
            name = type(self.backbone.model).__name__
            raise UserError(f"beam search keeps several texts a row, which the recurrent layers of {name} can't; set num_beams=1")
        self.tokens_BT, self.lengths_B = prompts_at_the_left(request)
        self.searches = [Search(request, rules, row) for row in range(len(request.ids_BT))]
        self.scores: list[list[Tensor]] = [[] for _ in range(len(self.searches) * rules.beams)]
        self.logits: list[list[Tensor]] = [[] for _ in range(len(self.searches) * rules.beams)]
        self.rows: list[Row] = []
        self.cache: RaggedCache
        self.features: NodeFeatures | None = None
        """For drafters."""

    def run(self, exact_times: bool = False) -> Iterator[Pass]:
        """One backbone pass after another until every row is over."""
        for first in range(0, len(self.searches), self.batch):
            self._start(list(range(first, min(first + self.batch, len(self.searches)))))
            clock = Clock(self.device, exact_times)
            while self.rows:
                yield self._pass(clock)

    def _start(self, texts: list[int]) -> None:
        """Read prompts and make the first step of each."""
        lengths_B = self.lengths_B[texts]
        tokens_BT = self.tokens_BT[texts][:, : int(lengths_B.max())]
        features, self.cache = self.tries.reader.prompts(tokens_BT, lengths_B)
        last_BD = features.hidden_BTD[torch.arange(len(texts), device=self.device), lengths_B - 1]
        prompts = [row[:length] for row, length in zip(tokens_BT.tolist(), lengths_B.tolist(), strict=True)]
        beams = self.rules.beams
        new = zip(texts, prompts, strict=True)
        self.rows = [Row(text, prompt, self.searches[text], BeamTrie(len(prompt)), [-1] * beams) for text, prompt in new]
        histories = [History(self.request.ids_BT[text], self.request.pads_B[text]) for text in texts]
        said = self._said(self.backbone.readout(last_BD)[:, None], histories)
        for row, (first,) in zip(self.rows, said, strict=True):
            self._step(row, [first] * beams)
        if self.drafting is not None:
            self.drafting.start(features)
            self.drafting.follow([b for b in range(len(texts)) for _ in range(beams)])
            self.features = NodeFeatures(features) if self.drafting.growths else None
        self._leave()

    def _pass(self, clock: Clock) -> Pass:
        if self.speculation is not None:
            self.speculation.begin(self.tries.read, self.cache.longest)
        rows, drafts = self.rows, self._draft()
        drafted = clock.lap()
        features, logits_BNV = self.tries.tries(self.cache, [row.trie for row in rows])
        said = self._said(logits_BNV, self._histories(logits_BNV.shape[1]))
        verified = clock.lap()
        nodes = max(row.trie.new for row in rows)
        if self.features is not None:
            self.features.add(features, [row.trie.read for row in rows])
        runs = [self._walk(row, drafts[b], said[b]) for b, row in enumerate(rows)]
        self._advance(runs)
        host = clock.lap()
        if self.speculation is not None:
            self._time(len(rows), logits_BNV.shape[1], (verified, host))
        written = {row.text: run.steps for row, run in zip(rows, runs, strict=True)}
        return Pass([written.get(text, 0) for text in range(len(self.searches))], nodes, drafted, verified, host)

    def _draft(self) -> list[Drafts]:
        """Hang the beams' last tokens into the tries, and the drafts that are to be read."""
        drafts = [Drafts([], []) for _ in self.rows]
        if self.drafting is not None:
            drafts = self.drafting.draft([Wanted(row.search.running, row.prompt, self._room(row), row.known()) for row in self.rows])
        for row, drafted in zip(self.rows, drafts, strict=True):
            add = row.trie.add
            nodes: dict[Path, int] = {(i, ()): add(row.last[i], beam.tokens[-1]) for i, beam in enumerate(row.search.running)}
            row.last = list(nodes.values())
            for beam, path in drafted.chosen:
                nodes[beam, path] = add(nodes[beam, path[:-1]], path[-1])
        return drafts

    def _room(self, row: Row) -> int:
        """How deep a draft may lie behind a beam's last token, so that it still has a next token, and a position that the model has."""
        limit = min(self.request.limit - self.request.pads_B[row.text], self.backbone.max_positions or 1 << 31)
        return max(limit - len(row.prompt) - len(row.search.running[0].tokens) - 1, 0)

    def _said(self, logits_BNV: Tensor, histories: list[History]) -> list[list[TopK]]:
        """What follows each node: the likeliest of its processed log-probabilities on the host, and whatever else the call wants."""
        B, N, V = logits_BNV.shape
        logprobs_BNV = logits_BNV.float().log_softmax(-1)
        scores_BNV = self.request.processing(logprobs_BNV.view(B * N, 1, V), histories, None).view(B, N, V)
        watched = self.drafting.watches if self.drafting is not None else 0
        best = scores_BNV.topk(min(max(self.rules.candidates, watched), V))
        values, tokens = best.values.cpu().numpy(), best.indices.cpu().numpy()
        scores, logits = self.request.scores, self.request.logits

        def one(b: int, n: int) -> TopK:
            return TopK(values[b, n], tokens[b, n], scores_BNV[b, n] if scores else None, logits_BNV[b, n].float() if logits else None)

        return [[one(b, n) for n in range(N)] for b in range(B)]

    def _histories(self, nodes: int) -> list[History]:
        """For each node that is read, the text that ends in it; rows are filled up to so many."""
        if not self.request.processing.processors:
            return []
        found: list[History] = []
        for row in self.rows if not self.request.processing.blind else self.rows[:1]:
            ids_T, pads, trie = self.request.ids_BT[row.text], self.request.pads_B[row.text], row.trie
            new = range(trie.read, len(trie.tokens))
            texts = [trie.told + [trie.tokens[above] for above in trie.path(node)] for node in new]
            histories = [History(torch.cat([ids_T, ids_T.new_tensor(text)]), pads) for text in texts]
            found += histories + histories[:1] * (nodes - len(histories))
        return found

    def _walk(self, row: Row, drafts: Drafts, said: list[TopK]) -> Run:
        """Make steps as long as what they need was read."""
        run, trie, search, nodes = Run(0, list(range(self.rules.beams))), row.trie, row.search, list(row.last)
        said = said[: trie.new]
        if self.drafting is not None:
            likeliest, logprobs = np.stack([one.tokens_M for one in said]), np.stack([one.logprobs_M for one in said])
            self.drafting.see(trie.tokens[trie.read :], likeliest, logprobs)
        trie.said += said
        while True:
            self._step(row, [trie.said[node] for node in nodes])
            run.steps += 1
            continued = [beam.places[-1] for beam in search.running]
            run.origins, run.last = [run.origins[beam] for beam in continued], [nodes[beam] for beam in continued]
            paths = [(origin, tuple(beam.tokens[-run.steps :])) for origin, beam in zip(run.origins, search.running, strict=True)]
            drafts.learn(run.steps - 1, paths)
            found = [trie.find(node, beam.tokens[-1]) for node, beam in zip(run.last, search.running, strict=True)]
            nodes = [node for node in found if node is not None]
            if search.over or len(nodes) < len(found):
                return run

    def _step(self, row: Row, said: list[TopK]) -> None:
        """One step of a row, given what was said at each beam's last token."""
        for beam, one in enumerate(said, row.text * self.rules.beams):
            if one.scores_V is not None:
                self.scores[beam].append(one.scores_V)
            if one.logits_V is not None:
                self.logits[beam].append(one.logits_V)
        row.search.step(np.stack([one.logprobs_M for one in said]), np.stack([one.tokens_M for one in said]))

    def _advance(self, runs: list[Run]) -> None:
        """Keep what belongs to the new beams; rows that are over leave."""
        if self.drafting is not None and self.features is not None:
            K, rows = self.rules.beams, range(len(self.rows))
            gone_by = [self.rows[b].trie.path(node)[-runs[b].steps :] for b in rows for node in runs[b].last]
            origins = [b * K + origin for b in rows for origin in runs[b].origins]
            self.drafting.follow(origins, self.features.of([b for b in rows for _ in range(K)], gone_by))
        shared = [row.trie.shared for row in self.rows]
        paths = []
        for row, run in zip(self.rows, runs, strict=True):
            kept, row.last = row.trie.keep(run.last, [beam.tokens[-1] for beam in row.search.running])
            paths.append(kept)
        if self.features is not None:
            self.features.keep([path[len(path) - row.trie.read :] for path, row in zip(paths, self.rows, strict=True)])
        self.cache.lengths_B = torch.tensor(shared, device=self.device)
        self.cache.keep(paths, [len(path) for path in paths])
        self._leave()

    def _leave(self) -> None:
        going = [b for b, row in enumerate(self.rows) if not row.search.over]
        if len(going) == len(self.rows):
            return
        self.rows = [self.rows[b] for b in going]
        if going:
            self.cache.select(going)
            if self.drafting is not None and self.features is not None:
                self.drafting.follow([b * self.rules.beams + beam for b in going for beam in range(self.rules.beams)])
                self.features.select(going)

    def _time(self, rows: int, nodes: int, laps: tuple[float, float]) -> None:
        assert self.speculation is not None
        if self.speculation.tells(self.tries.read):
            self.speculation.costs.add_pass(rows, nodes, laps[0])
            self.speculation.costs.add("beams' host", rows, laps[1])

    # What came out.

    def sequences(self) -> Tensor:
        """``[B * returned, T]``: the prompts as given, the best texts of each, and what stands behind their ends."""
        texts = [beam.tokens for beam in self._best()]
        longest = max(map(len, texts))
        written = [text + [self.rules.fill] * (longest - len(text)) for text in texts]
        ids_BT = self.request.ids_BT.repeat_interleave(self.rules.returned, 0)
        return torch.cat([ids_BT, ids_BT.new_tensor(written).view(len(texts), longest)], 1)

    def sequences_scores(self) -> Tensor:
        """Of each sequence: the sum of its log-probabilities, with the length penalty."""
        return torch.tensor([float(beam.score) for beam in self._best()], device=self.device)

    def beam_indices(self) -> Tensor:
        """For each token of each sequence which beam of the whole batch it continued; -1 behind the end."""
        found = []
        for row, search in enumerate(self.searches):
            for beam in search.best[: self.rules.returned]:
                found.append([place + row * self.rules.beams for place in beam.places])
        longest = max(map(len, found))
        padded = [row + [-1] * (longest - len(row)) for row in found]
        return torch.tensor(padded, dtype=torch.int32, device=self.device).view(len(found), longest)

    def _best(self) -> list[Beam]:
        return [beam for search in self.searches for beam in search.best[: self.rules.returned]]
