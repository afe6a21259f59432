"""The loop: draft a tree, let the backbone read it in one pass, keep what it would have written itself.

Shape suffixes: B batch, T positions, N tree nodes, P path, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone import Backbone
from headstart.heads.base import Drafter, Features
from headstart.inference.cache import RaggedCache
from headstart.inference.noise import gumbel
from headstart.inference.processing import History
from headstart.inference.request import Request, prompts_at_the_left
from headstart.inference.text import Text
from headstart.inference.tree import CandidateTree, Ranking, TreeShape, grow, root_only
from headstart.inference.verify import Accepted, pick, walk


@dataclass(frozen=True)
class Pass:
    """What one backbone pass brought: tokens written by each row (0: it had ended), and seconds by part."""

    written_B: list[int]
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
    """One call's rows on their way: the cache, the drafter's state, the root of each row, what is written."""

    def __init__(self, backbone: Backbone, drafter: Drafter | None, request: Request, shape: TreeShape, seeds_B: Tensor | None) -> None:
        self.backbone, self.drafter, self.request, self.shape, self.seeds_B = backbone, drafter, request, shape, seeds_B
        self.texts = [Text(request, row) for row in range(len(request.ids_BT))]
        self.cache = RaggedCache(backbone.num_layers, len(self.texts), request.ids_BT.device)
        # Nodes past the limit, or past the positions the model has, are read at the last one that is there, and never kept.
        pads_B1 = torch.tensor(request.pads_B, device=request.ids_BT.device)[:, None]
        self.last_B1 = (request.limit - pads_B1).clamp(max=backbone.max_positions or 1 << 31) - 1
        self.nearest_last = int(self.last_B1.min())
        self.taps = drafter.taps if drafter is not None else ()
        self.scores: list[list[Tensor]] = [[] for _ in self.texts]
        self.logits: list[list[Tensor]] = [[] for _ in self.texts]
        self.state: Any = None
        self.news: Features
        """What the drafter has not taken in yet."""
        self.roots_B: Tensor

    def start(self) -> None:
        """Read the prompts and pick the first token of each row."""
        tokens_BT, lengths_B = prompts_at_the_left(self.request)
        B, T = tokens_BT.shape
        place_BT = torch.arange(T, device=tokens_BT.device).expand(B, T)
        positions_BT = self.cache.expect(T)
        read = self.backbone.read(tokens_BT, self.cache, positions_BT, taps=self.taps)
        self.cache.extend(lengths_B, int(lengths_B.max()))
        self.news = read.gather(place_BT, place_BT < lengths_B[:, None]) if B > 1 else read
        last_BD = read.hidden_BTD[torch.arange(B, device=tokens_BT.device), lengths_B - 1]
        logits_B1V = self.backbone.readout(last_BD)[:, None]
        scores_B1V = self.request.processing(logits_B1V, self._histories(), None)
        self.roots_B = pick(scores_B1V, self._noise(lengths_B[:, None]))[:, 0]
        self._collect(scores_B1V, logits_B1V, torch.zeros_like(self.roots_B)[:, None], self._write(self.roots_B[:, None], [1] * B))

    def run(self, exact_times: bool = False) -> Iterator[Pass]:
        """One backbone pass after another until every row has ended."""
        clock = Clock(self.roots_B.device, exact_times)
        while not all(text.ended for text in self.texts):
            tree, noise_BPV = self._draft()
            draft = clock.lap()
            features, logits_BNV = self._read(tree)
            verify = clock.lap()
            scores_BNV = self.request.processing(logits_BNV, self._histories(), tree)
            accepted = walk(self._within(tree), pick(scores_BNV, _at(noise_BPV, tree.depths_BN)))
            written = self._write(accepted.picks_BP, accepted.count_B.tolist())
            self._collect(scores_BNV, logits_BNV, accepted.path_BP, written)
            self._advance(tree, features, accepted)
            yield Pass(written, tree.tokens_BN.shape[1], draft, verify, clock.lap())

    def _draft(self) -> tuple[CandidateTree, Tensor | None]:
        height = 0 if self.drafter is None else min(self.shape.depth or self.drafter.depth, self.drafter.depth)
        ahead_P = torch.arange(1, height + 2, device=self.roots_B.device)
        noise_BPV = self._noise(self.cache.lengths_B[:, None] + ahead_P)
        if self.drafter is None:
            return root_only(self.roots_B), noise_BPV
        self.state = self.drafter.begin(self.news, self.state)
        ranking = Ranking(self.request.processing.temperature, noise_BPV)
        return grow(self.drafter, self.state, self.roots_B, self.shape, ranking), noise_BPV

    def _read(self, tree: CandidateTree) -> tuple[Features, Tensor]:
        self.cache.expect(tree.tokens_BN.shape[1])
        depths_BN = torch.minimum(tree.depths_BN, self._room()) if self._near_end(tree) else tree.depths_BN
        positions_BN = self.cache.lengths_B[:, None] + depths_BN
        see = self.cache.see(tree, positions_BN, self.backbone.windows)
        features = self.backbone.read(tree.tokens_BN, self.cache, positions_BN, see, self.taps)
        return features, self.backbone.readout(features.hidden_BTD)

    def _near_end(self, tree: CandidateTree) -> bool:
        return self.cache.longest + tree.height > self.nearest_last

    def _room(self) -> Tensor:
        """How many positions each row has behind its root's ``[B, 1]``."""
        return (self.last_B1 - self.cache.lengths_B[:, None]).clamp(min=0)

    def _within(self, tree: CandidateTree) -> CandidateTree:
        """The tree with the nodes that were read at another position than theirs made unacceptable."""
        if not self._near_end(tree):
            return tree
        return replace(tree, tokens_BN=tree.tokens_BN.masked_fill(tree.depths_BN > self._room(), -1))

    def _advance(self, tree: CandidateTree, features: Features, accepted: Accepted) -> None:
        """Keep the accepted path of the rows that go on; a row that has ended stands still."""
        going_B = torch.tensor([not text.ended for text in self.texts], device=self.roots_B.device)
        count_B = accepted.count_B * going_B
        longest = int((self.cache.lengths_B + count_B).max())
        path_BP = accepted.path_BP[:, : int(count_B.max())]
        self.cache.keep(path_BP, count_B, longest)
        next_B = accepted.picks_BP.gather(1, (count_B - 1).clamp(min=0)[:, None])[:, 0]
        self.roots_B = torch.where(going_B, next_B, self.roots_B)
        if self.drafter is not None:
            place_P = torch.arange(path_BP.shape[1], device=going_B.device)
            self.news = features.gather(path_BP, place_P < count_B[:, None])

    def _noise(self, positions_BP: Tensor) -> Tensor | None:
        return None if self.seeds_B is None else gumbel(self.seeds_B, positions_BP, self.backbone.vocab)

    def _histories(self) -> list[History]:
        processing = self.request.processing
        return [] if not processing.processors else [text.history for text in (self.texts[:1] if processing.blind else self.texts)]

    def _write(self, picks_BP: Tensor, counts: list[int]) -> list[int]:
        return [
            0 if text.ended else text.write(picks[:count]) for text, picks, count in zip(self.texts, picks_BP.tolist(), counts, strict=True)
        ]

    def _collect(self, scores_BNV: Tensor, logits_BNV: Tensor, path_BP: Tensor, written: list[int]) -> None:
        for wanted, kept, source in ((self.request.scores, self.scores, scores_BNV), (self.request.logits, self.logits, logits_BNV)):
            if wanted:
                for b, count in enumerate(written):
                    kept[b].extend(source[b, path_BP[b, :count]].float())


def _at(noise_BPV: Tensor | None, depths_BN: Tensor) -> Tensor | None:
    """The noise each node's pick is made with: that of the position after it."""
    if noise_BPV is None:
        return None
    return noise_BPV.gather(1, depths_BN[..., None].expand(-1, -1, noise_BPV.shape[-1]))
