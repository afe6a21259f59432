"""Speculative beam search: the beams of transformers' beam search, several steps per forward pass.

A beam search step needs the log-probabilities after each beam. One forward pass verifies the last token of every beam of every row and
the drafts that follow it; then steps are made as long as all new beams are among the verified nodes. Drafts change how many steps a pass
makes, never their result. (Andronov et al., J. Cheminformatics 2025, draft for each beam; here the nodes are chosen over all beams of a
row, and verified nodes that are not used yet are kept for the next pass.)

Shape suffixes: B batch, T positions, N nodes, K beams, M most likely next tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.layers.ragged_cache import RaggedCache
from headstart.inference.beam.breadth import Breadth
from headstart.inference.beam.drafts import HOST_PART, Drafting, Drafts, Path, RowBeams
from headstart.inference.beam.search import Beam, Search
from headstart.inference.beam.trie import BeamTrie, TopK, read_tries
from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.engine.beam_rules import BeamRules
from headstart.inference.engine.processing import History
from headstart.inference.engine.prompts import Prompts
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request
from headstart.inference.engine.timing import Clock, Pass
from headstart.inference.engine.tree import TreeShape
from headstart.inference.speculation.speculation import Speculation
from headstart.support.errors import UserError


class Beams:
    """The state of beam search that is kept from call to call."""

    def __init__(self, reader: Reader, speculation: Speculation) -> None:
        self.reader, self.speculation = reader, speculation
        self.breadths: dict[int, tuple[Breadth, Breadth]] = {}
        """By number of beams: one `Breadth` for rows without known top-k tokens, one for rows with some (see `Drafting`)."""

    def drafting(self, beams: int, shape: TreeShape | None) -> Drafting:
        """The `Drafting` of one call."""
        return Drafting(self.speculation, self.breadths.setdefault(beams, (Breadth(beams), Breadth(beams))), shape)


@dataclass
class Row:
    """A prompt being continued."""

    number: int
    prompt: list[int]
    search: Search
    trie: BeamTrie
    last: list[int]
    """For each beam, the node of its second-to-last token, which is verified (-1: the last shared token)."""

    def known(self) -> list[dict[tuple[int, ...], TopK]]:
        """For each beam, the verified top k after its last token and after its descendants, keyed by the tokens after the last one."""
        beams = self.search.running
        nodes = [self.trie.find(node, beam.tokens[-1]) for node, beam in zip(self.last, beams, strict=True)]
        paths: dict[int, tuple[int, ...]] = {}
        known: list[dict[tuple[int, ...], TopK]] = [{} for _ in beams]
        for node, top in self.trie.below([node for node in nodes if node is not None]).items():
            paths[node] = () if node == top else (*paths[self.trie.parents[node]], self.trie.tokens[node])
            known[nodes.index(top)][paths[node]] = self.trie.top_k[node]
        return known


@dataclass
class RowSteps:
    """The steps that a forward pass made in a row."""

    count: int = 0
    origins: list[int] = field(default_factory=list)
    """For each new beam, the beam it continues."""
    last: list[int] = field(default_factory=list)
    """For each new beam, its last verified node."""


class BeamDecoder:
    """Runs the beam searches of one call. ``shape``: its ``nodes`` are those of a row, each beam's last token included; None: adaptive.

    ``batch``: rows decoded at once; the next rows start when all of these have finished.
    """

    def __init__(self, beams: Beams, request: Request, rules: BeamRules, shape: TreeShape | None, batch: int) -> None:
        self.reader, self.speculation = beams.reader, beams.speculation
        self.request, self.rules, self.batch = request, rules, batch
        self.device, self.prompts = request.ids_BT.device, Prompts(request, beams.reader)
        if self.reader.backbone.recurrent is not None:
            name = type(self.reader.backbone.model).__name__
            raise UserError(f"beam search keeps several sequences per row, which the recurrent layers of {name} can't; set num_beams=1")
        self.speculation.start(sampled=False)
        self.drafting = beams.drafting(rules.beams, shape)
        self.searches = [Search(request, rules, row) for row in range(len(request.ids_BT))]
        self.scores: list[list[Tensor]] = [[] for _ in range(len(self.searches) * rules.beams)]
        self.logits: list[list[Tensor]] = [[] for _ in range(len(self.searches) * rules.beams)]
        self.rows: list[Row] = []
        self.cache: RaggedCache

    def run(self, exact_times: bool = False) -> Iterator[Pass]:
        """Make forward passes until every row has finished."""
        for first in range(0, len(self.searches), self.batch):
            self._start(list(range(first, min(first + self.batch, len(self.searches)))))
            clock = Clock(self.device, exact_times)
            while self.rows:
                yield self._pass(clock)

    def _start(self, numbers: list[int]) -> None:
        """Prefill the prompts and make the first step of each."""
        features, self.cache, logits_B1V = self.prompts.prefill(numbers)
        beams = self.rules.beams
        prompts = [self.prompts.tokens(number) for number in numbers]
        rows = zip(numbers, prompts, strict=True)
        self.rows = [Row(number, prompt, self.searches[number], BeamTrie(len(prompt)), [-1] * beams) for number, prompt in rows]
        histories = [History(self.request.ids_BT[number], self.request.pads_B[number]) for number in numbers]
        for row, (first,) in zip(self.rows, self._top_k(logits_B1V, histories), strict=True):
            self._step(row, [first] * beams)
        self.drafting.start(features)
        self._leave()

    def _pass(self, clock: Clock) -> Pass:
        with Stopwatch() as watch:
            self.speculation.use_costs(self.cache.longest, self.reader.captured)
            rows, drafts = self.rows, self._draft()
            drafting = clock.lap()
            features, logits_BNV = read_tries(self.reader, self.cache, [row.trie for row in rows])
            top_k = self._top_k(logits_BNV, self._histories(logits_BNV.shape[1]))
            verifying = clock.lap()
            nodes = max(row.trie.new for row in rows)
            steps = self._advance(drafts, top_k, features)
            host = clock.lap()
        if watch.valid and self.speculation.sources:
            self.speculation.costs.add_pass(len(rows), logits_BNV.shape[1], verifying)
            self.speculation.costs.add(HOST_PART, len(rows), host)
        written = {row.number: made.count for row, made in zip(rows, steps, strict=True)}
        return Pass([written.get(number, 0) for number in range(len(self.searches))], nodes, drafting, verifying, host)

    def _draft(self) -> list[Drafts]:
        """Add the last token of each beam and the drafts to verify to the tries."""
        drafts = self.drafting.draft([RowBeams(row.search.running, row.prompt, self._remaining(row), row.known()) for row in self.rows])
        for row, drafted in zip(self.rows, drafts, strict=True):
            add = row.trie.add
            nodes: dict[Path, int] = {(i, ()): add(row.last[i], beam.tokens[-1]) for i, beam in enumerate(row.search.running)}
            row.last = list(nodes.values())
            for beam, path in drafted.chosen:
                nodes[beam, path] = add(nodes[beam, path[:-1]], path[-1])
        return drafts

    def _remaining(self, row: Row) -> int:
        """The number of tokens that may be drafted after a beam's last one; one more token can still follow them."""
        return max(self.prompts.remaining(row.number, len(row.search.running[0].tokens)) - 1, 0)

    def _top_k(self, logits_BNV: Tensor, histories: list[History]) -> list[list[TopK]]:
        """The most likely tokens after each node by processed log-probabilities, on the host."""
        B, N, V = logits_BNV.shape
        logprobs_BNV = logits_BNV.float().log_softmax(-1)
        scores_BNV = self.request.processing(logprobs_BNV.view(B * N, 1, V), histories, None).view(B, N, V)
        best = scores_BNV.topk(min(max(self.rules.candidates, self.drafting.observe_top_k), V))
        values, tokens = best.values.cpu().numpy(), best.indices.cpu().numpy()
        scores, logits = self.request.scores, self.request.logits

        def one(b: int, n: int) -> TopK:
            return TopK(values[b, n], tokens[b, n], scores_BNV[b, n] if scores else None, logits_BNV[b, n].float() if logits else None)

        return [[one(b, n) for n in range(N)] for b in range(B)]

    def _histories(self, nodes: int) -> list[History]:
        """The token history of each new node; each row is padded to ``nodes`` histories."""
        if not self.request.processing.processors:
            return []
        padded: list[History] = []
        for row in self.rows if not self.request.processing.blind else self.rows[:1]:
            ids_T, pads, trie = self.request.ids_BT[row.number], self.request.pads_B[row.number], row.trie
            new = range(trie.verified, len(trie.tokens))
            written = [trie.shared_tokens + [trie.tokens[above] for above in trie.path(node)] for node in new]
            histories = [History(torch.cat([ids_T, ids_T.new_tensor(tokens)]), pads) for tokens in written]
            padded += histories + histories[:1] * (nodes - len(histories))
        return padded

    def _steps(self, row: Row, drafts: Drafts, top_k: list[TopK]) -> RowSteps:
        """Make steps as long as the nodes they need have been verified."""
        steps, trie, search, nodes = RowSteps(0, list(range(self.rules.beams))), row.trie, row.search, list(row.last)
        top_k = top_k[: trie.new]
        if self.drafting.observing:
            top_tokens, logprobs = np.stack([one.tokens_M for one in top_k]), np.stack([one.logprobs_M for one in top_k])
            self.drafting.observe(trie.tokens[trie.verified :], top_tokens, logprobs)
        trie.top_k += top_k
        while True:
            self._step(row, [trie.top_k[node] for node in nodes])
            steps.count += 1
            continued = [beam.origins[-1] for beam in search.running]
            steps.origins, steps.last = [steps.origins[beam] for beam in continued], [nodes[beam] for beam in continued]
            paths = [(origin, tuple(beam.tokens[-steps.count :])) for origin, beam in zip(steps.origins, search.running, strict=True)]
            drafts.learn(steps.count - 1, paths)
            following = [trie.find(node, beam.tokens[-1]) for node, beam in zip(steps.last, search.running, strict=True)]
            nodes = [node for node in following if node is not None]
            if search.over or len(nodes) < len(following):
                return steps

    def _step(self, row: Row, top_k: list[TopK]) -> None:
        """Make one step of a row from the top k after each beam."""
        for beam, one in enumerate(top_k, row.number * self.rules.beams):
            if one.scores_V is not None:
                self.scores[beam].append(one.scores_V)
            if one.logits_V is not None:
                self.logits[beam].append(one.logits_V)
        row.search.step(np.stack([one.logprobs_M for one in top_k]), np.stack([one.tokens_M for one in top_k]))

    def _advance(self, drafts: list[Drafts], top_k: list[list[TopK]], features: Features) -> list[RowSteps]:
        """Make steps, keep the nodes of the new beams, and remove finished rows."""
        self.drafting.add(features, [row.trie.verified for row in self.rows])
        steps = [self._steps(row, drafts[b], top_k[b]) for b, row in enumerate(self.rows)]
        K, rows = self.rules.beams, range(len(self.rows))
        passed = [self.rows[b].trie.path(node)[-steps[b].count :] for b in rows for node in steps[b].last]
        origins = [b * K + origin for b in rows for origin in steps[b].origins]
        self.drafting.follow(origins, [b for b in rows for _ in range(K)], passed)
        paths = []
        for row, made in zip(self.rows, steps, strict=True):
            kept, row.last = row.trie.keep(made.last, [beam.tokens[-1] for beam in row.search.running])
            paths.append(kept)
        self.drafting.keep([path[len(path) - row.trie.verified :] for path, row in zip(paths, self.rows, strict=True)])
        self.cache.keep(paths, [len(path) for path in paths])
        self.cache.lengths_B = torch.tensor([row.trie.shared for row in self.rows], device=self.device)
        self._leave()
        return steps

    def _leave(self) -> None:
        going = [b for b, row in enumerate(self.rows) if not row.search.over]
        if len(going) == len(self.rows):
            return
        self.rows = [self.rows[b] for b in going]
        self.drafting.select(going)
        if going:
            self.cache.select(going)

    # The output.

    def sequences(self) -> Tensor:
        """``[B * returned, T]``: the input ids, the best sequences of each row, and padding."""
        tokens = [beam.tokens for beam in self._best()]
        longest = max(map(len, tokens))
        written = [one + [self.rules.fill] * (longest - len(one)) for one in tokens]
        ids_BT = self.request.ids_BT.repeat_interleave(self.rules.returned, 0)
        return torch.cat([ids_BT, ids_BT.new_tensor(written).view(len(tokens), longest)], 1)

    def sequences_scores(self) -> Tensor:
        """The sum of log-probabilities of each sequence, with the length penalty."""
        return torch.tensor([float(beam.score) for beam in self._best()], dtype=torch.float32, device=self.device)

    def beam_indices(self) -> Tensor:
        """For each token of each sequence, the index in the whole batch of the beam it continued; -1 after the end."""
        indices = []
        for row, search in enumerate(self.searches):
            for beam in search.best[: self.rules.returned]:
                indices.append([origin + row * self.rules.beams for origin in beam.origins])
        longest = max(map(len, indices))
        padded = [row + [-1] * (longest - len(row)) for row in indices]
        return torch.tensor(padded, dtype=torch.int32, device=self.device).view(len(indices), longest)

    def _best(self) -> list[Beam]:
        return [beam for search in self.searches for beam in search.best[: self.rules.returned]]
