"""The decoding loop: draft a tree, verify it in one forward pass, keep the tokens that autoregressive decoding would have written.

A row is removed when its sequence has ended and a waiting sequence takes its place; rows do not affect each other's tokens.

Shape suffixes: B batch, N tree nodes, P positions after the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.layers.ragged_cache import RaggedCache
from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.engine.noise import NoiseBuffer, gumbel
from headstart.inference.engine.prompts import Prompts
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request
from headstart.inference.engine.texts import Texts
from headstart.inference.engine.timing import Clock, Pass
from headstart.inference.engine.tree import CandidateTree, Pool, TreeShape, VerifiedTree, root_only
from headstart.inference.engine.verify import accept, pick
from headstart.inference.sources.draft import Draft, DraftScoring
from headstart.inference.sources.source import Accepted
from headstart.inference.speculation.speculation import Speculation


class Decoder:
    """Decodes the sequences of one call. Sequences being decoded are rows; each has a root: its last token, not yet read by the backbone.

    ``speculation`` without sources: autoregressive decoding. ``shape`` None: adaptive trees. ``batch``: rows decoded at once.
    """

    def __init__(
        self, reader: Reader, speculation: Speculation, request: Request, shape: TreeShape | None, seeds_B: Tensor | None, batch: int
    ) -> None:
        self.reader, self.speculation, self.request, self.shape, self.seeds_B = reader, speculation, request, shape, seeds_B
        self.prompts, self.batch, self.device = Prompts(request, reader), batch, request.ids_BT.device
        self.texts = Texts(request)
        self.noise = None if seeds_B is None else NoiseBuffer(partial(reader.noise, None), reader.backbone.vocab, seeds_B)
        self.waiting = list(range(len(request.ids_BT)))
        self.rows: list[int] = []
        """The number of each row's sequence."""
        self.roots: list[int] = []
        self.cache: RaggedCache
        self.tree: CandidateTree
        """The candidates of the last step."""
        speculation.start(seeds_B is not None)

    def run(self, exact_times: bool = False) -> Iterator[Pass]:
        """Make decoding steps until every sequence has ended."""
        self._admit()
        clock = Clock(self.device, exact_times)
        while self.rows:
            step = self._step(clock)
            self._admit()
            clock.lap()
            yield step

    def _step(self, clock: Clock) -> Pass:
        with Stopwatch() as watch:
            self.speculation.use_costs(self.cache.longest, self.reader.captured)
            draft, tree, noise_BPV = self._draft()
            self.tree, drafting = tree, clock.lap()
            features, logits_BNV = self.reader.tree(self.cache, tree)
            scores_BNV = self._scores(logits_BNV, self.rows, tree)
            picks = pick(scores_BNV, self._noise_by_node(noise_BPV, tree)).tolist()
            verifying = clock.lap()
            paths = accept(tree, picks)
            self.speculation.observe(draft, tree, logits_BNV)
            accepted = self._write(paths, picks, scores_BNV, logits_BNV, features)
            self._advance(paths, accepted)
            self.speculation.learn(draft, tree, paths, picks)
            host = clock.lap()
        if watch.valid:
            self.speculation.time(draft, tree, paths, drafting + verifying + host)
        written, *drafts = (self._by_sequence(accepted.sequences, rows) for rows in (accepted.tokens, paths, tree.tokens))
        kept, drafted = ([max(nodes - 1, 0) for nodes in counts] for counts in drafts)   # nodes without the root
        trees = self._trees(accepted.sequences, tree, paths) if self.request.dictionary else {}
        return Pass(written, tree.size, drafting, verifying, host, kept, drafted, trees)

    @staticmethod
    def _trees(numbers: list[int], tree: CandidateTree, paths: list[list[int]]) -> dict[int, VerifiedTree]:
        return {number: VerifiedTree(*row) for number, *row in zip(numbers, tree.tokens, tree.parents, paths, strict=True)}

    def _by_sequence(self, numbers: list[int], rows: Sequence[Sequence[int]]) -> list[int]:
        """The lengths of the rows of these sequences, by sequence; 0 for the others."""
        counts = dict(zip(numbers, map(len, rows), strict=True))
        return [counts.get(number, 0) for number in range(len(self.texts.written))]

    # Drafting.

    def _draft(self) -> tuple[Draft, CandidateTree, Tensor | None]:
        """The draft, the tree to verify, and the noise for the picks at each of its levels."""
        sources = self.speculation.active(self.shape, len(self.rows))
        if not sources:
            return Draft([], []), root_only(self.roots), self._noise(0, 1)
        noise_BPV = self._noise(0, 1 + max(source.noise_depths(self.shape) for source in sources))
        processing, in_full = self.request.processing, self.shape is not None and self.shape.chain
        draft = Draft(
            pools=[Pool(root) for root in self.roots],
            remaining=[self.prompts.remaining(number, len(self.texts.written[number]), in_full) for number in self.rows],
            sequences=self.rows,
            cache=self.cache,
            shape=self.shape,
            scoring=DraftScoring.sampled(noise_BPV, processing),
            costs=self.speculation.costs,
            rate=self.speculation.rate(len(self.rows)),
            queued=bool(self.waiting),
        )
        for source in sources:
            source.draft(draft)
        tree = self.speculation.choose(draft)
        if noise_BPV is not None and noise_BPV.shape[1] <= tree.height:
            noise_BPV = torch.cat([noise_BPV, self._noise(noise_BPV.shape[1], tree.height + 1)], 1)
        return draft, tree, noise_BPV

    def _noise(self, first: int, end: int) -> Any:
        """The noise ``[B, P, V]`` for the picks at levels ``first`` to ``end - 1``; None at temperature 0."""
        if self.noise is None:
            return None
        positions = [self.prompts.lengths[number] + len(self.texts.written[number]) + first for number in self.rows]
        return self.noise.of(self.rows, positions, end - first)

    def _noise_by_node(self, noise_BPV: Tensor | None, tree: CandidateTree) -> Tensor | None:
        if noise_BPV is None:
            return None
        if tree.size == 1:
            return noise_BPV[:, :1]
        levels_BN = torch.tensor([row + [0] * (tree.size - len(row)) for row in tree.levels], device=self.device)
        return noise_BPV[torch.arange(len(self.rows), device=self.device)[:, None], levels_BN]

    # Keeping.

    def _write(
        self, paths: list[list[int]], picks: list[list[int]], scores_BNV: Tensor, logits_BNV: Tensor, features: Features
    ) -> Accepted:
        """Write each row's picks along its path until its sequence ends."""
        runs = [[picked[node] for node in path] for picked, path in zip(picks, paths, strict=True)]
        written = self._add(self.rows, runs, paths, scores_BNV, logits_BNV)
        self.roots = self.texts.ids_BT[:, -1].tolist() if self.request.in_order else [run[-1] for run in runs]
        return Accepted(self.rows, written, paths, features)

    def _advance(self, paths: list[list[int]], accepted: Accepted) -> None:
        """Keep the accepted paths and remove rows whose sequences have ended."""
        self.cache.keep(paths, list(map(len, paths)))
        for source in self.speculation.sources:
            source.extend(accepted)
        self._leave()

    def _leave(self) -> None:
        going = [b for b, number in enumerate(self.rows) if self.texts.goes_on(number)]
        if len(going) == len(self.rows):
            return
        self.rows, self.roots = [self.rows[b] for b in going], [self.roots[b] for b in going]
        for source in self.speculation.sources:
            source.select(going)
        if going:
            self.cache.select(going)

    # Admitting.

    def _admit(self) -> None:
        """Start waiting sequences in free rows."""
        while self.waiting and len(self.rows) < self.batch:
            count = self.batch - len(self.rows)
            numbers, self.waiting = self.waiting[:count], self.waiting[count:]
            self._start(numbers)

    def _start(self, numbers: list[int]) -> None:
        """Prefill the prompts of these sequences, pick their first tokens, and append them to the rows."""
        features, cache, logits_B1V = self.prompts.prefill(numbers)
        scores_B1V = self._scores(logits_B1V, numbers, None)
        noise_B1V = None
        if self.seeds_B is not None:
            noise_B1V = gumbel(self.seeds_B[numbers], self.prompts.lengths_B[numbers][:, None], self.reader.backbone.vocab)
        roots = pick(scores_B1V, noise_B1V)[:, 0].tolist()
        self._add(numbers, [[root] for root in roots], [[0]] * len(numbers), scores_B1V, logits_B1V)
        if self.rows:
            self.cache.join(cache)
        else:
            self.cache = cache
        tokens = [[*self.prompts.tokens(number), root] for number, root in zip(numbers, roots, strict=True)]
        for source in self.speculation.sources:
            source.join(numbers, tokens, features)
        self.rows, self.roots = self.rows + numbers, self.roots + roots
        self._leave()

    def _scores(self, logits_BNV: Tensor, numbers: list[int], tree: CandidateTree | None) -> Tensor:
        """Processed scores of the nodes of these sequences."""
        processing = self.request.processing
        if processing.unknown:
            return processing.in_order(self.texts.ids_BT, logits_BNV[:, 0])[:, None]
        needed = [] if not processing.processors else numbers[:1] if processing.blind else numbers
        return processing(logits_BNV, [self.texts.history(number) for number in needed], tree)

    def _add(
        self, numbers: list[int], runs: list[list[int]], paths: list[list[int]], scores_BNV: Tensor, logits_BNV: Tensor
    ) -> list[list[int]]:
        """Write runs of tokens, with their scores and logits if the call asks for them; returns what was kept."""
        scores, logits = (
            [values_NV[path] for values_NV, path in zip(values_BNV, paths, strict=True)] if asked else []
            for values_BNV, asked in ((scores_BNV, self.request.scores), (logits_BNV, self.request.logits))
        )
        return self.texts.write(numbers, runs, scores, logits)
