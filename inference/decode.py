"""The loop: draft a tree, let the backbone read it in one pass, keep what it would have written itself.

Rows leave when they have ended, and waiting texts take their place; no row changes what another gets.

Shape suffixes: B batch, T positions, N tree nodes, P positions ahead or along a path, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features, join_features
from headstart.inference.engine.cache import RaggedCache
from headstart.inference.engine.noise import NoiseBuffer, gumbel
from headstart.inference.engine.processing import History
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request, prompts_at_the_left
from headstart.inference.engine.sequence import Text
from headstart.inference.engine.tree import CandidateTree, Pool, TreeShape, root_only
from headstart.inference.engine.verify import pick, walk
from headstart.inference.sources.expansion import DraftScoring
from headstart.inference.speculation.draft import Draft
from headstart.inference.speculation.speculation import WIDTH, Speculation


@dataclass(frozen=True)
class Pass:
    """What one backbone pass brought: tokens written by each text (0: it had ended, or waits), and seconds by part."""

    written: list[int]
    nodes: int
    draft: float
    verify: float
    host: float


class Clock:
    """Seconds between marks. On an accelerator ``exact`` waits for it at each mark, which costs speed."""

    def __init__(self, device: torch.device, exact: bool) -> None:
        self.wait = torch.accelerator.synchronize if exact and device.type != "cpu" else None
        self.last = time.perf_counter()

    def lap(self) -> float:
        if self.wait is not None:
            self.wait()
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        return passed


class Decoder:
    """One call's texts on their way: those being decoded are the rows, each with its root; the cache; the drafter's state.

    ``shape`` None: each pass is as large as pays. ``speculation`` None: plain decoding. ``batch``: how many rows at once.
    """

    def __init__(
        self, reader: Reader, speculation: Speculation | None, request: Request, shape: TreeShape | None, seeds_B: Tensor | None, batch: int
    ) -> None:
        self.reader, self.speculation, self.request, self.shape, self.seeds_B = reader, speculation, request, shape, seeds_B
        self.texts = [Text(request, row) for row in range(len(request.ids_BT))]
        self.tokens_BT, lengths_B = prompts_at_the_left(request)
        self.lengths = lengths_B.tolist()
        if speculation is not None:
            speculation.attend(seeds_B is not None)
        self.batch = batch
        self.device = request.ids_BT.device
        self.waiting = list(range(len(self.texts)))
        self.rows: list[int] = []
        """The texts being decoded."""
        self.roots: list[int] = []
        """The last token of each, which the backbone has not read yet."""
        self.cache: RaggedCache
        drafters = speculation.drafters if speculation is not None else []
        self.ahead = NoiseBuffer(partial(reader.noise, None), reader.backbone.vocab)
        self.states: list[Any] = [None for _ in drafters]
        self.news: list[list[Features]] = [[] for _ in drafters]
        """What each drafter has not taken in yet."""
        self.scores: list[list[Tensor]] = [[] for _ in self.texts]
        self.logits: list[list[Tensor]] = [[] for _ in self.texts]

    def run(self, exact_times: bool = False) -> Iterator[Pass]:
        """One backbone pass after another until every text has ended."""
        self._admit()
        clock = Clock(self.device, exact_times)
        while self.rows:
            if self.speculation is not None:
                self.speculation.begin(self.reader.read, self.cache.longest)
            draft, tree, kept, noise_BPV = self._draft()
            drafted = clock.lap()
            features, logits_BNV = self.reader.tree(self.cache, tree)
            scores_BNV = self.request.processing(logits_BNV, self._histories(), tree)
            picks = pick(scores_BNV, self._noise_of(noise_BPV, tree)).tolist()
            verified = clock.lap()
            paths = walk(tree, picks)
            if self.speculation is not None:
                self.speculation.see(draft, tree, logits_BNV)
            written = self._write(paths, picks, scores_BNV, logits_BNV)
            self._advance(paths, picks, features)
            if self.speculation is not None:
                self.speculation.learn(draft, kept, paths, picks)
            host = clock.lap()
            self._time(draft, kept, paths, drafted + verified + host)
            self._admit()
            clock.lap()
            yield Pass([written.get(text, 0) for text in range(len(self.texts))], tree.size, drafted, verified, host)

    # Drafting.

    def _draft(self) -> tuple[Draft, CandidateTree, list[list[int]], Tensor | None]:
        """What was drafted, the tree to read, the places of its nodes in the pools, and the noise of the positions ahead."""
        sources = self.speculation.sources(len(self.rows), self.shape) if self.speculation is not None else []
        if self.speculation is None or not sources:
            return Draft([], []), root_only(self.roots), [[0] for _ in self.rows], self._noise(1, 1)
        room = [self._room(text) for text in self.rows]
        draft = Draft([Pool(root) for root in self.roots], room, queued=bool(self.waiting), calibrated=self.shape is None)
        self.speculation.propose(draft, sources, self.rows)
        growing = [source for source in sources if source < len(self.states)]
        noise_BPV = self._noise(1, 1 + max([0, *(self.speculation.drafters[source].depth for source in growing)]))
        for source in growing:
            self._grow(source, draft, noise_BPV)
        tree, kept = self.speculation.choose(draft, self.shape)
        if noise_BPV is not None and noise_BPV.shape[1] < tree.height + 1:
            noise_BPV = torch.cat([noise_BPV, self._noise(noise_BPV.shape[1] + 1, tree.height + 1)], 1)
        return draft, tree, kept, noise_BPV

    def _grow(self, source: int, draft: Draft, noise_BPV: Tensor | None) -> None:
        """Let a drafter draft, once it knows all that is written."""
        assert self.speculation is not None
        start = time.perf_counter()
        self._take_in(source)
        self.states[source] = self.speculation.drafters[source].prepare_draft(self.states[source], self.cache, self._ahead(source))
        temperature_1 = None if noise_BPV is None else torch.full((1,), self.request.processing.temperature, device=self.device)
        scoring = DraftScoring(temperature_1, noise_BPV, self.request.processing.filters if noise_BPV is not None else None)
        self.states[source] = self.speculation.grow(draft, source, self.states[source], scoring, self.shape)
        draft.seconds[source] = time.perf_counter() - start

    def _take_in(self, source: int) -> None:
        assert self.speculation is not None
        if self.news[source]:
            room = self.cache.longest + self._ahead(source)
            self.states[source] = self.speculation.growths[source].extend_state(join_features(self.news[source]), self.states[source], room)
            self.news[source] = []

    def _ahead(self, source: int) -> int:
        """More nodes than a drafter reads for a pass."""
        assert self.speculation is not None
        width = self.shape.width if self.shape is not None else WIDTH
        return (self.speculation.drafters[source].depth + 1) * (width + 1)

    def _room(self, text: int) -> int:
        """How many tokens may still be written after the root, by the limit and by the positions that the model has."""
        most = self.reader.backbone.max_positions or 1 << 31
        limit = min(self.request.limit - self.request.pads_B[text], most)
        return limit - self.lengths[text] - len(self.texts[text].written)

    def _noise(self, first: int, last: int) -> Any:
        """Of the positions ``first`` to ``last`` behind each row's root, ``[B, P, V]``; None at temperature 0."""
        if self.seeds_B is None:
            return None
        read = [self.lengths[text] + len(self.texts[text].written) - 1 for text in self.rows]
        return self.ahead.of(self.rows, self.seeds_B, [length + first for length in read], last + 1 - first)

    def _noise_of(self, noise_BPV: Tensor | None, tree: CandidateTree) -> Tensor | None:
        """The noise each node's pick is made with: that of the position after it."""
        if noise_BPV is None:
            return None
        if tree.size == 1:
            return noise_BPV[:, :1]
        depths_BN = torch.tensor([row + [0] * (tree.size - len(row)) for row in tree.depths], device=self.device)
        return noise_BPV[torch.arange(len(self.rows), device=self.device)[:, None], depths_BN]

    def _time(self, draft: Draft, kept: list[list[int]], paths: list[list[int]], seconds: float) -> None:
        """What the pass took; all but the drafting is counted as that of its size."""
        if self.speculation is None or not self.speculation.tells(self.reader.read):
            return
        self.speculation.costs.add_pass(len(paths), max(map(len, kept)), seconds - sum(draft.seconds.values()))
        if self.shape is None:
            self.speculation.judge(draft, kept, paths, seconds)

    # Keeping.

    def _write(self, paths: list[list[int]], picks: list[list[int]], scores_BNV: Tensor, logits_BNV: Tensor) -> dict[int, int]:
        """Write each row's picks along its path until its text ends; how many, by text."""
        written = {}
        for b, (row, path) in enumerate(zip(self.rows, paths, strict=True)):
            tokens = [picks[b][node] for node in path]
            written[row] = count = self.texts[row].write(tokens)
            self._collect(row, path[:count], scores_BNV[b], logits_BNV[b])
            if self.speculation is not None:
                self.speculation.extend(row, tokens[:count])
        return written

    def _advance(self, paths: list[list[int]], picks: list[list[int]], features: Features) -> None:
        """Keep the accepted paths; rows that have ended leave."""
        counts = [len(path) for path in paths]
        self.cache.keep(paths, counts)
        self.roots = [picked[path[-1]] for picked, path in zip(picks, paths, strict=True)]
        if self.states:
            kept = self._along(paths, counts, features)
            for news in self.news:
                news.append(kept)
        going = [b for b, row in enumerate(self.rows) if not self.texts[row].ended]
        if len(going) < len(self.rows):
            self._select(going)

    def _along(self, paths: list[list[int]], counts: list[int], features: Features) -> Features:
        """The features of the accepted nodes, rows right-padded."""
        longest = max(counts)
        if features.tokens_BT.shape[1] == 1:   # a plain step
            return features
        path_BP = torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=self.device)
        counts_B1 = torch.tensor(counts, device=self.device)[:, None]
        return features.gather(path_BP, torch.arange(longest, device=self.device) < counts_B1)

    def _select(self, going: list[int]) -> None:
        rows_B = torch.tensor(going, device=self.device)
        self.rows, self.roots = [self.rows[b] for b in going], [self.roots[b] for b in going]
        if not going:
            self.states, self.news = [None for _ in self.states], [[] for _ in self.states]
            return
        self.cache.select(going)
        for source, state in enumerate(self.states):
            assert self.speculation is not None
            self.states[source] = None if state is None else self.speculation.drafters[source].select(state, rows_B)
            self.news[source] = [news.rows(rows_B) for news in self.news[source]]

    # Admitting.

    def _admit(self) -> None:
        """Let waiting texts take free rows: read their prompts, pick their first tokens."""
        while self.waiting and len(self.rows) < self.batch:
            count = self.batch - len(self.rows)
            new, self.waiting = self.waiting[:count], self.waiting[count:]
            self._start(new)

    def _start(self, new: list[int]) -> None:
        lengths_B = torch.tensor([self.lengths[text] for text in new], device=self.device)
        tokens_BT = self.tokens_BT[new][:, : int(lengths_B.max())]
        features, cache = self.reader.prompts(tokens_BT, lengths_B)
        last_BD = features.hidden_BTD[torch.arange(len(new), device=self.device), lengths_B - 1]
        logits_B1V = self.reader.backbone.readout(last_BD)[:, None]
        scores_B1V = self.request.processing(logits_B1V, self._histories(new), None)
        noise = None if self.seeds_B is None else gumbel(self.seeds_B[new], lengths_B[:, None], self.reader.backbone.vocab)
        roots = pick(scores_B1V, noise)[:, 0].tolist()
        for b, (text, root) in enumerate(zip(new, roots, strict=True)):
            self.texts[text].write([root])
            self._collect(text, [0], scores_B1V[b], logits_B1V[b])
            if self.speculation is not None:
                self.speculation.open(text, [*self.tokens_BT[text, : self.lengths[text]].tolist(), root])
        self._join(new, roots, features, cache)
        going = [b for b, row in enumerate(self.rows) if not self.texts[row].ended]
        if len(going) < len(self.rows):
            self._select(going)

    def _join(self, new: list[int], roots: list[int], features: Features, cache: RaggedCache) -> None:
        """Put new rows behind those there are."""
        if not self.rows:
            self.rows, self.roots, self.cache = new, roots, cache
            self.states, self.news = [None for _ in self.states], [[features] for _ in self.states]
            return
        self.cache.join(cache)
        for source in range(len(self.states)):
            assert self.speculation is not None
            self._take_in(source)
            joining = self.speculation.growths[source].extend_state(features, None, 0)
            self.states[source] = self.speculation.drafters[source].join(self.states[source], joining)
        self.rows, self.roots = self.rows + new, self.roots + roots

    def _histories(self, rows: list[int] | None = None) -> list[History]:
        processing = self.request.processing
        if not processing.processors:
            return []
        texts = [self.texts[row] for row in (self.rows if rows is None else rows)]
        return [text.history for text in (texts[:1] if processing.blind else texts)]

    def _collect(self, text: int, path: list[int], scores_NV: Tensor, logits_NV: Tensor) -> None:
        for wanted, kept, source in ((self.request.scores, self.scores, scores_NV), (self.request.logits, self.logits, logits_NV)):
            if wanted:
                kept[text].extend(source[path].float())
