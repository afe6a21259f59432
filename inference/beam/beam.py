"""Speculative beam search: the beams of transformers' beam search, several steps per forward pass.

A beam search step needs the log-probabilities after each beam. One forward pass verifies the last token of every beam of every row and
the drafts that follow it; then steps are made as long as all new beams are among the verified nodes. Drafts change how many steps a pass
makes, never their result. (Andronov et al., J. Cheminformatics 2025, draft for each beam; here the nodes are chosen over all beams of a
row, and verified nodes that are not used yet are kept for the next pass.)

Shape suffixes: B batch, T positions, N nodes, K beams, M most likely next tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.kv.ragged_cache import RaggedCache
from headstart.inference.adaptive.latency import PASS, Costs
from headstart.inference.beam.drafts import HOST_PART, Drafting, Drafts, Path, RowBeams
from headstart.inference.beam.search import Breadth, Search, Steps
from headstart.inference.beam.trie import BeamTrie, TopK, read_tries
from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.engine.processing import History
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import BeamRules, Request
from headstart.inference.engine.texts import Prompts
from headstart.inference.engine.tree import TreeShape
from headstart.inference.policy import Policy
from headstart.inference.steps import PARTS, Step
from headstart.support.errors import UserError


class Beams:
    """The state of beam search that is kept from call to call."""

    def __init__(self, reader: Reader, policy: Policy) -> None:
        self.reader, self.policy = reader, policy
        self.breadths: dict[int, tuple[Breadth, Breadth]] = {}
        """By number of beams: one `Breadth` for rows without known top-k tokens, one for rows with some (see `Drafting`)."""

    def drafting(self, beams: int, shape: TreeShape | None) -> Drafting:
        """The `Drafting` of one call."""
        return Drafting(self.policy, self.breadths.setdefault(beams, (Breadth(beams), Breadth(beams))), shape)

    def decoder(self, request: Request, shape: TreeShape | None, batch: int) -> BeamDecoder:
        """The decoder of one call, which is a beam search."""
        assert request.beams is not None
        return BeamDecoder(self, request, request.beams, shape, batch)


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
        self.reader, self.policy = beams.reader, beams.policy
        self.request, self.rules, self.batch = request, rules, batch
        self.device, self.prompts = request.ids_BT.device, Prompts(request, beams.reader)
        if self.reader.backbone.recurrent is not None:
            name = type(self.reader.backbone.model).__name__
            raise UserError(f"beam search keeps several sequences per row, which the recurrent layers of {name} can't; set num_beams=1")
        self.policy.start(sampled=False)
        self.drafting = beams.drafting(rules.beams, shape)
        self.steps = Steps(request, rules)
        self.waiting = list(range(len(self.steps.searches)))
        self.rows: list[Row] = []
        self.cache: RaggedCache

    def sequences(self) -> Tensor:
        """Prompts and what the best beams wrote, ``[B * num_return_sequences, T]``."""
        return self.steps.sequences()

    def kept(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """The scores and the logits that the call asks for, by beam and token."""
        return self.steps.scores, self.steps.logits

    def admit(self) -> bool:
        """Start the next rows when all have finished; False if there are no more."""
        while self.waiting and not self.rows:
            numbers, self.waiting = self.waiting[: self.batch], self.waiting[self.batch :]
            self._start(numbers)
        return bool(self.rows)

    def _start(self, numbers: list[int]) -> None:
        """Prefill the prompts and make the first step of each."""
        features, self.cache, logits_B1V = self.prompts.prefill(numbers)
        beams = self.rules.beams
        prompts = [self.prompts.tokens(number) for number in numbers]
        rows = zip(numbers, prompts, strict=True)
        searches = self.steps.searches
        self.rows = [Row(number, prompt, searches[number], BeamTrie(len(prompt)), [-1] * beams) for number, prompt in rows]
        if self.request.in_order:
            first = self._in_order(logits_B1V[:, 0].repeat_interleave(beams, 0))
        else:
            histories = [History(self.request.ids_BT[number], [], number) for number in numbers]
            first = [nodes * beams for nodes in self._top_k(logits_B1V, histories)]
        self._step(self.rows, first)
        self.drafting.start(features)
        self._leave()

    def step(self, exact_times: bool = False) -> Step:
        """Make a forward pass."""
        with Stopwatch(self.device if exact_times else None) as watch:
            costs = self.policy.costs.at(self.cache.longest, self.reader.read.made)
            rows, drafts = self.rows, self._draft(costs)
            drafting = watch.lap()
            features, logits_BNV = read_tries(self.reader, self.cache, [row.trie for row in rows])
            top_k = self._after(logits_BNV)
            verifying = watch.lap()
            nodes = max(row.trie.new for row in rows)
            steps = self._advance(drafts, top_k, features)
            host = watch.lap()
        if watch.valid and self.policy.sources:
            costs.add(PASS, len(rows), logits_BNV.shape[1], verifying)
            costs.add(HOST_PART, len(rows), 1, host)
        written = {row.number: made.count for row, made in zip(rows, steps, strict=True)}
        return Step(written, nodes, dict(zip(PARTS, (drafting, verifying, host), strict=True)), {})

    def _draft(self, costs: Costs) -> list[Drafts]:
        """Add the last token of each beam and the drafts to verify to the tries."""
        of_rows = [RowBeams(row.search.running, row.prompt, self._remaining(row), row.known()) for row in self.rows]
        drafts = self.drafting.draft(of_rows, costs)
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

    def _after(self, logits_BNV: Tensor) -> list[list[TopK]]:
        """The most likely tokens after each new node or, with calls in order, after each beam."""
        if not self.request.in_order:
            return self._top_k(logits_BNV, self._histories(logits_BNV.shape[1]))
        new = [[node - row.trie.verified for node in row.last] for row in self.rows]
        return self._in_order(torch.cat([logits_NV[nodes] for logits_NV, nodes in zip(logits_BNV, new, strict=True)]))

    def _in_order(self, logits_XV: Tensor) -> list[list[TopK]]:
        """The most likely tokens after each beam of each row ``[X]``, by calls as transformers makes them."""
        beams = ((row.search.prompt_T, beam.tokens) for row in self.rows for beam in row.search.running)
        ids = [torch.cat([prompt_T, prompt_T.new_tensor(tokens)]) for prompt_T, tokens in beams]
        scores_XV = self.request.processing.in_order(torch.stack(ids), logits_XV.float().log_softmax(-1))
        K = self.rules.beams
        return self._best(scores_XV.reshape(-1, K, scores_XV.shape[-1]), logits_XV.reshape(-1, K, logits_XV.shape[-1]))

    def _top_k(self, logits_BNV: Tensor, histories: list[History]) -> list[list[TopK]]:
        """The most likely tokens after each node by processed log-probabilities, on the host."""
        B, N, V = logits_BNV.shape
        logprobs_BNV = logits_BNV.float().log_softmax(-1)
        scores_BNV = self.request.processing(logprobs_BNV.reshape(B * N, 1, V), histories, None).reshape(B, N, V)
        return self._best(scores_BNV, logits_BNV)

    def _best(self, scores_BNV: Tensor, logits_BNV: Tensor) -> list[list[TopK]]:
        B, N, V = scores_BNV.shape
        best = scores_BNV.topk(min(max(self.rules.candidates, self.drafting.observe_top_k), V))
        values, tokens = best.values.cpu().numpy(), best.indices.cpu().numpy()
        logits = self.request.logits

        def one(b: int, n: int) -> TopK:
            return TopK(values[b, n], tokens[b, n], scores_BNV[b, n], logits_BNV[b, n].float() if logits else None)

        return [[one(b, n) for n in range(N)] for b in range(B)]

    def _histories(self, nodes: int) -> list[History]:
        """The token history of each new node; each row is padded to ``nodes`` histories."""
        if not self.request.processing.processors:
            return []
        padded: list[History] = []
        for row in self.rows if not self.request.processing.blind else self.rows[:1]:
            ids_T, trie = self.request.ids_BT[row.number], row.trie
            new = range(trie.verified, len(trie.tokens))
            written = [trie.shared_tokens + [trie.tokens[above] for above in trie.path(node)] for node in new]
            histories = [History(ids_T, tokens, row.number) for tokens in written]
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
            self._step([row], [[trie.top_k[node] for node in nodes]])
            steps.count += 1
            continued = [beam.origins[-1] for beam in search.running]
            steps.origins, steps.last = [steps.origins[beam] for beam in continued], [nodes[beam] for beam in continued]
            paths = [(origin, tuple(beam.tokens[-steps.count :])) for origin, beam in zip(steps.origins, search.running, strict=True)]
            drafts.learn(steps.count - 1, paths)
            following = [trie.find(node, beam.tokens[-1]) for node, beam in zip(steps.last, search.running, strict=True)]
            nodes = [node for node in following if node is not None]
            if search.over or len(nodes) < len(following):
                return steps

    def _steps_in_order(self, top_k: list[list[TopK]]) -> list[RowSteps]:
        """Make one step of every row from the top k after each beam."""
        for row, of_beams in zip(self.rows, top_k, strict=True):
            after = dict(zip(row.last, of_beams, strict=True))
            row.trie.top_k += [after[node] for node in range(row.trie.verified, len(row.trie.tokens))]
        self._step(self.rows, top_k)
        continued = [[beam.origins[-1] for beam in row.search.running] for row in self.rows]
        return [RowSteps(1, origins, [row.last[beam] for beam in origins]) for row, origins in zip(self.rows, continued, strict=True)]

    def _step(self, rows: list[Row], top_k: list[list[TopK]]) -> None:
        """Make one step of these rows from the top k after each beam."""
        self.steps.make([row.number for row in rows], top_k)

    def _advance(self, drafts: list[Drafts], top_k: list[list[TopK]], features: Features) -> list[RowSteps]:
        """Make steps, keep the nodes of the new beams, and remove finished rows."""
        self.drafting.add(features, [row.trie.verified for row in self.rows])
        if self.request.in_order:
            steps = self._steps_in_order(top_k)
        else:
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
        self.cache.keep(paths)
        self.cache.lengths_B = torch.tensor([row.trie.shared for row in self.rows], device=self.device)
        self._leave()
        return steps

    def _leave(self) -> None:
        going = [b for b, row in enumerate(self.rows) if self.steps.goes_on(row.number)]
        if len(going) == len(self.rows):
            return
        self.rows = [self.rows[b] for b in going]
        self.drafting.select(going)
        if going:
            self.cache.select(going)
