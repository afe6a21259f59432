"""Speculative beam search: the beams of transformers' beam search, several steps per forward pass.

A beam search step needs the log-probabilities after each beam. One forward pass verifies the last token of every beam of every row and
the drafts that follow it; then steps are made as long as all new beams are among the verified nodes. Drafts change how many steps a pass
makes, never their result. (Andronov et al., J. Cheminformatics 2025, draft for each beam; here the nodes are chosen over all beams of a
row, and verified nodes that are not used yet are kept for the next pass.)

Shape suffixes: B batch, T positions, N nodes, K beams, V vocabulary, Y what is known after a token (see search.py).
"""

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.layers.ragged_cache import RaggedCache
from headstart.inference.beam.drafts import HOST_PART, Breadth, Drafting, Row
from headstart.inference.beam.search import Search, Sequences, read_tries
from headstart.inference.capture.captured import Stopwatch
from headstart.inference.engine.processing import History
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request
from headstart.inference.engine.texts import Prompts
from headstart.inference.engine.tree import TreeShape
from headstart.inference.latency import PASS, Costs
from headstart.inference.policy import Policy
from headstart.inference.steps import PARTS, Step
from headstart.support.errors import UserError


class BeamDecoder:
    """Runs the beam searches of one call. ``shape``: its ``nodes`` are those of a row, each beam's last token included; None: adaptive.

    ``batch``: rows decoded at once; the next rows start when all of these have finished.
    """

    def __init__(self, reader: Reader, policy: Policy, request: Request, shape: TreeShape | None, batch: int) -> None:
        assert request.beams is not None
        self.reader, self.policy, self.request, self.beams, self.batch = reader, policy, request, request.beams.beams, batch
        self.prompts = Prompts(request, reader)
        if self.reader.backbone.recurrent is not None:
            name = type(self.reader.backbone.model).__name__
            raise UserError(f"beam search keeps several sequences per row, which the recurrent layers of {name} can't; set num_beams=1")
        self.policy.start(sampled=False)
        self.drafting = Drafting(policy, self.beams, policy.beams.setdefault(self.beams, Breadth(self.beams)), shape)
        self.waiting = list(range(len(request.ids_BT)))
        groups = [self.waiting] if request.in_order else [[number] for number in self.waiting]
        self.searches = [Search(request, request.beams, rows) for rows in groups]
        self.rows: list[Row] = []
        self.cache: RaggedCache

    def best(self) -> Sequences:
        """The sequences that the call returns, ``[B * num_return_sequences, T]``."""
        longest = max(search.length for search in self.searches)
        ids, scores, origins = map(torch.cat, zip(*(search.returned(longest) for search in self.searches), strict=True))
        written = int((origins >= 0).sum(1).max())
        return Sequences(ids[:, : self.request.ids_BT.shape[1] + written], scores, origins[:, :written])

    def sequences(self) -> Tensor:
        """Prompts and what the best beams wrote, ``[B * num_return_sequences, T]``."""
        return self.best()[0]

    def kept(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """The scores and the logits that the call asks for, by beam and token."""
        after = [of_beam for search in self.searches for of_beam in zip(*(part.flatten(0, 1) for part in search.after), strict=True)]
        scores, logits = ([[after_YV[y] for after_YV in of_beam] for of_beam in after] for y in (0, -1))
        return scores, logits

    def admit(self) -> bool:
        """Start the next rows when all have finished; False if there are no more."""
        while self.waiting and not self.rows:
            numbers, self.waiting = self.waiting[: self.batch], self.waiting[self.batch :]
            self._start(numbers)
        return bool(self.rows)

    def _start(self, numbers: list[int]) -> None:
        """Prefill the prompts and make the first step of each."""
        features, self.cache, logits_B1V = self.prompts.prefill(numbers)
        searches = {number: search for search in self.searches for number in search.rows}
        self.rows = [Row(number, self.request.pads_B[number], searches[number]) for number in numbers]
        if self.request.in_order:
            after_BKYV = self._after(logits_B1V.expand(-1, self.beams, -1), [])
        else:
            histories = [History(self.request.ids_BT[number], [], number) for number in numbers]
            after_BKYV = self._after(logits_B1V, histories).expand(-1, self.beams, -1, -1)
        for rows, search in self._together():
            search.step(after_BKYV[[self.rows.index(row) for row in rows]])
        self.drafting.start(features)
        self._leave()

    def step(self, exact_times: bool = False) -> Step:
        """Make a forward pass."""
        with Stopwatch(self.cache.lengths_B.device if exact_times else None) as watch:
            rows, costs = self.rows, self.policy.costs.at(self.cache.longest, self.reader.read.made)
            self._draft(costs)
            drafting = watch.lap()
            features, logits_BNV = read_tries(self.reader, self.cache, [row.trie for row in rows])
            nodes = max(row.trie.new for row in rows)
            if self.request.in_order:
                after_BNYV = self._after(logits_BNV[:, : self.beams], [])
            else:
                after_BNYV = self._after(logits_BNV, self._histories(logits_BNV.shape[1]))
            verifying = watch.lap()
            self._advance(features, after_BNYV)
            host = watch.lap()
        if watch.valid and self.policy.sources:
            costs.add(PASS, len(rows), logits_BNV.shape[1], verifying)
            costs.add(HOST_PART, len(rows), 1, host)
        return Step({row.number: row.steps for row in rows}, nodes, dict(zip(PARTS, (drafting, verifying, host), strict=True)), {})

    def _draft(self, costs: Costs) -> None:
        """Add the last token of each beam and the drafts to verify to the tries."""
        for row in self.rows:
            add = row.trie.append if self.request.in_order else row.trie.add  # in order, equal beams are apart
            row.nodes = [add(node, token) for node, token in zip(row.last, row.newest, strict=True)]
            row.origins, row.steps = list(range(self.beams)), 0
            written = row.search.length - row.search.prompt  # one more token can follow those that are drafted
            row.remaining = max(self.prompts.remaining(row.number, written) - 1, 0)
        self.drafting.draft(self.rows, costs)

    def _after(self, logits_BNV: Tensor, histories: list[History]) -> Tensor:
        """What is known after each node, or in order after each beam ``[B, N, Y, V]``."""
        scores_XV = logits_BNV.flatten(0, 1).float().log_softmax(-1)
        if self.request.in_order:
            ids_XT = self.searches[0].running.ids_BKT.flatten(0, 1)
            scores_XV = self.request.processing.in_order(ids_XT, scores_XV)
        else:
            scores_XV = self.request.processing(scores_XV[:, None], histories, None)[:, 0]
        scores_BNV = scores_XV.view(logits_BNV.shape)
        return torch.stack([scores_BNV, logits_BNV.float()], 2) if self.request.logits else scores_BNV[:, :, None]

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

    def _advance(self, features: Features, after_BNYV: Tensor) -> None:
        """Make steps as long as the nodes they need have been verified, keep the nodes of the new beams, and remove finished rows."""
        rows = self.rows
        for b, row in enumerate(rows):
            self.drafting.observe(row.trie.tokens[row.trie.verified :], after_BNYV[b])
            row.trie.verify(after_BNYV[b], features.rows(torch.tensor([b], device=after_BNYV.device)) if self.drafting.drafters else None)
        for together, search in self._together():
            following = True
            while following and search.going:
                after = [row.trie.after[node] for row in together for node in row.nodes]
                search.step(torch.stack(after).unflatten(0, (len(together), self.beams)))
                following = all([row.follow(self.drafting.breadth) for row in together])
        self.drafting.follow(rows)
        paths = [row.keep() for row in rows]
        self.cache.keep(paths, lengths=[row.trie.shared for row in rows])
        self._leave()

    def _together(self) -> list[tuple[list[Row], Search]]:
        """The rows of each search."""
        return [(self.rows, self.searches[0])] if self.request.in_order else [([row], row.search) for row in self.rows]

    def _leave(self) -> None:
        going = [b for b, row in enumerate(self.rows) if row.search.going]
        if len(going) < len(self.rows):
            self.rows = [self.rows[b] for b in going]
            self.drafting.select(going)
            if going:
                self.cache.select(going)
