"""The size of rounding: by how much the logits of passes of other widths differ by themselves, on this machine and on these texts.

A forward pass over many positions rounds otherwise than one over a single position, and layers amplify what differs; by how much depends
on the model, the dtype, the device and the text. So it is measured: the last positions of a text are read again without captures, in
pieces of several widths, and compared with one pass over the whole text. Pieces are read twice:

- by the model with transformers' cache, as transformers' own ``generate`` does;
- as chains of a tree, with the cache, masks and attention of decoding. What differs there may be a fault instead, so it counts at most
  as much as moving the output of every layer by a unit in the last place does (`nudged`).

Where a token's logits depend on which tokens stand beside it in a pass, that is no rounding either: then both count at most as much.

Shape suffixes: T positions, N positions of a piece, R positions compared, V vocabulary.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor
from transformers import DynamicCache

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.hooks import nudged
from headstart.heads.backbone.images import Images
from headstart.inference.capture.capture import Capturer
from headstart.inference.engine.chains import reader_of
from headstart.inference.engine.tree import CandidateTree, chain

WIDTHS = (64, 8, 1)
"""Positions of a piece: trees, batches and plain steps multiply 1 to some hundred rows, a whole text more."""


REGION = 64
"""Positions at the end of a text that are read again."""


SIBLINGS = 24
"""Tokens that are read beside each other, at one position."""


MARGIN = 3.0
"""Times the largest difference measured: a measurement sees some positions, a benchmark thousands."""


class Rounding:
    """The largest difference of a logit that was measured on one backbone so far."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.reader = backbone, reader_of(backbone, (), Capturer("off", backbone.device))
        self.measured = 0.0
        self.texts = 0
        """Texts that it was measured on."""
        self.beside = 0.0
        """By how much the logits after a token change with the tokens beside it in a pass of one width, where no rounding explains it."""
        self.largest_logit = 0.0
        """The largest absolute value of the logits seen."""

    @property
    def size(self) -> float:
        """By how much a logit differs from pass to pass; at least a unit in the last place of the largest one."""
        return max(self.measured, torch.finfo(self.backbone.dtype).eps * self.largest_logit)

    @property
    def tolerance(self) -> float:
        """Differences up to this pass as rounding."""
        return MARGIN * self.size

    @torch.no_grad()
    def measure(self, ids_T: Tensor, prompt: int, seconds: float = math.inf, images: Images | None = None) -> None:
        """Read the end of a text again, without its first ``prompt`` tokens, which have the ``images``.

        Begins with wide pieces, of which there are few, and with no further width after ``seconds``.
        """
        if prompt <= (turn := self.backbone.rope_limit or 0):  # pieces after a change of rotary frequencies differ by more than rounding
            ids_T = ids_T[:turn]
        deadline, start = time.perf_counter() + seconds, min(max(prompt, len(ids_T) - REGION), len(ids_T) - 1)
        expected_RV = self._whole(ids_T, start, images)
        with nudged(self.backbone.layers):
            nudging = difference(self._whole(ids_T, start, images), expected_RV)
        siblings = 0 < start < len(ids_T) - 1 and self.backbone.no_trees is None
        beside = self._beside(ids_T, start, images) if siblings else 0.0
        self.beside = max(self.beside, beside) if beside > MARGIN * nudging else self.beside
        for width in WIDTHS if start else ():
            if width < WIDTHS[0] and time.perf_counter() > deadline:
                break
            ways = (self._by_model, self._by_trees)
            by_model, by_trees = (difference(read(ids_T, start, width, images), expected_RV) for read in ways)
            both = (min(by_model, nudging) if self.beside else by_model, min(by_trees, nudging))
            self.measured = max(self.measured, *(one for one in both if math.isfinite(one)))
        self.see(expected_RV)
        self.texts += 1

    def see(self, logits_RV: Tensor) -> None:
        """Note the largest of some logits."""
        self.largest_logit = max(self.largest_logit, float(logits_RV.nan_to_num(0, 0, 0).abs().max()))

    def _whole(self, ids_T: Tensor, start: int, images: Images | None) -> Tensor:
        """The logits ``[R, V]`` after each position from ``start`` on, by one pass over the text."""
        return self.backbone.readout(self.backbone.read(ids_T[None], images=images).hidden_BTD[0, start:]).float()

    def _by_model(self, ids_T: Tensor, start: int, width: int, images: Images | None) -> Tensor:
        """The same, read in pieces with transformers' cache."""
        backbone, place_1T = self.backbone, torch.arange(len(ids_T), device=ids_T.device)[None]
        # Without the model's configuration, sliding-window layers keep all of their keys.
        plain = backbone.recurrent is None and backbone.no_trees is None
        cache = DynamicCache() if plain else DynamicCache(config=backbone.config)
        backbone.read(ids_T[None, :start], cache, place_1T[:, :start], images=images)
        place_1T = place_1T if images is None else place_1T + images.offset
        parts = [(at, min(at + width, len(ids_T))) for at in range(start, len(ids_T), width)]
        hidden = [backbone.read(ids_T[None, at:end], cache, place_1T[:, at:end]).hidden_BTD[0] for at, end in parts]
        return backbone.readout(torch.cat(hidden)).float()

    def _by_trees(self, ids_T: Tensor, start: int, width: int, images: Images | None) -> Tensor:
        """The same, read as chains of a tree by the passes of decoding."""
        _, cache = self.reader.prompts(ids_T[None, :start], torch.tensor([start], device=ids_T.device), [images])
        found = []
        for piece_N in ids_T[start:].split(width):
            _, logits_BNV, added = self.reader.tree(cache, chain(piece_N.tolist()))
            found.append(logits_BNV[0].float())
            cache.keep([[*range(len(piece_N))]], added)
        return torch.cat(found)

    def _beside(self, ids_T: Tensor, start: int, images: Images | None) -> float:
        """The largest change of the logits after some of the following tokens, each read among all of them and among copies of itself."""
        _, cache = self.reader.prompts(ids_T[None, :start], torch.tensor([start], device=ids_T.device), [images])
        root, *tokens = ids_T[start : start + SIBLINGS].tolist()

        def siblings(tokens: list[int]) -> Tensor:
            return self.reader.tree(cache, CandidateTree([[root, *tokens]], [[0] * (1 + len(tokens))]))[1][0, 1:].float()

        among_NV = siblings(tokens)
        return max(difference(siblings([tokens[at]] * len(tokens))[at, None], among_NV[at, None]) for at in range(0, len(tokens), 4))


def difference(logits_RV: Tensor, others_RV: Tensor) -> float:
    """The largest difference of a logit; equal infinities are equal, and what is not a number differs by infinity."""
    return float(differences(logits_RV, others_RV).max())


def differences(logits_RV: Tensor, others_RV: Tensor) -> Tensor:
    """The same at each position, ``[R]``."""
    return torch.where(logits_RV == others_RV, 0, logits_RV - others_RV).abs().amax(-1).nan_to_num(math.inf, math.inf)
