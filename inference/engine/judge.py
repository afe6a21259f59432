"""Judges a written text by the uncaptured model: is every token the one that the decoding rule picks, up to rounding?

The text is teacher-forced: one pass without captures, drafts or a cache reads all of it, and the rule (`pick`, with the row's noise and
logits processors) is applied at every position. Where it picks another token, the judge finds by how much the logit of the written one
would have to be larger. A token that falls short by no more than the tolerance of `Rounding` is a near-tie, any other is a fault. Logits
that decoding kept are compared with those of this pass in the same way.

*Rounding.* A forward pass over many positions rounds otherwise than one over a single position, and layers amplify what differs; by how
much depends on the model, the dtype, the device and the text. So it is measured (`Rounding`): the last positions of a text are read again
without captures, in pieces of several widths, and compared with one pass over the whole text. Pieces are read twice:

- by the model with transformers' cache, as transformers' own ``generate`` does;
- as chains of a tree, with the cache, masks and attention of decoding. What differs there may be a fault instead, so it counts at most
  as much as moving the output of every layer by a unit in the last place does (`nudged`).

Where a token's logits depend on which tokens stand beside it in a pass, that is no rounding either: then both count at most as much.

Shape suffixes: T positions, N positions judged at once or of a piece, R positions compared, V vocabulary.
"""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Images
from headstart.heads.backbone.hooks import nudged
from headstart.inference.capture.capture import Capturer
from headstart.inference.engine.noise import gumbel
from headstart.inference.engine.processing import History, Processing
from headstart.inference.engine.reader import reader_of
from headstart.inference.engine.tree import CandidateTree, chain, pick

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
            self.measured = max(self.measured, *(difference for difference in both if math.isfinite(difference)))
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


MOST_LOGITS = 2**23
"""Logits held at once: the whole text's would not fit for large vocabularies."""
MOST_MEASURED = 4
"""Texts that rounding is measured on; one more only if a text is beyond what was measured."""
NOISE = 48.0
"""More than the noise of two tokens differs."""
HALVINGS = 30
"""Steps in which the shortfall of a token is found: to one part in 2^30 of the range of the logits."""


@dataclass(frozen=True)
class Text:
    """What was decoded for one prompt."""

    ids_T: Tensor
    """The prompt, padding included, and the tokens written."""
    written: int
    seed_1: Tensor | None
    """The row's seed; None: temperature 0."""
    processing: Processing
    pads: int = 0
    row: int = 0
    """The number of its row in the call."""
    images: Images | None = None

    @property
    def prompt(self) -> int:
        """The length of the prompt without padding."""
        return len(self.ids_T) - self.pads - self.written


@dataclass
class Judgement:
    """What was found about one text."""

    tokens: int
    shortfalls: dict[int, float] = field(default_factory=dict)
    """By number of each token that is not the pick: by how much its logit falls short."""
    differences: list[float] = field(default_factory=list)
    """The largest difference of the logits that decoding kept, at each of their positions."""

    @property
    def worst(self) -> tuple[float, int]:
        """The largest shortfall or difference, and the number of its token; infinity: no rounding explains it."""
        found = [*((size, number) for number, size in self.shortfalls.items()), *((size, i) for i, size in enumerate(self.differences))]
        return max(found, default=(0.0, 0))

    def faults(self, tolerance: float) -> list[int]:
        """The numbers of the tokens that fall short by more than the tolerance."""
        return [number for number, shortfall in self.shortfalls.items() if not shortfall <= tolerance]


class Judge:
    """Judges texts decoded on one backbone."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.rounding = backbone, Rounding(backbone)

    @torch.no_grad()
    def judge(self, text: Text, kept_NV: Tensor | None = None, seconds: float = math.inf) -> Judgement:
        """Judge a text; ``kept_NV``: the logits that its first tokens were chosen by.

        If something exceeds the rounding measured so far, rounding is measured on this text too, in about ``seconds``.
        """
        ids_T = text.ids_T[text.pads :].to(self.backbone.device)
        found = self._read(text, ids_T, kept_NV)
        size, number = found.worst
        if size > self.rounding.tolerance and self.rounding.texts < MOST_MEASURED:
            self.rounding.measure(ids_T[: text.prompt + number], text.prompt, seconds, text.images)
        return found

    def _read(self, text: Text, ids_T: Tensor, kept_NV: Tensor | None) -> Judgement:
        hidden_TD = self.backbone.read(ids_T[None, :-1], images=text.images).hidden_BTD[0]
        if text.prompt <= (turn := self.backbone.rope_limit or 0) < len(hidden_TD):  # decoded with other rotary frequencies up to there
            hidden_TD = torch.cat([self.backbone.read(ids_T[None, :turn]).hidden_BTD[0], hidden_TD[turn:]])
        found, step = Judgement(text.written), max(1, MOST_LOGITS // self.backbone.vocab)
        for first in range(0, text.written, step):
            end = min(first + step, text.written)
            at = text.prompt - 1 + first
            logits_NV = self.backbone.readout(hidden_TD[at : at + end - first])
            self.rounding.see(logits_NV)
            found.shortfalls |= _Piece(text, ids_T, first, logits_NV).shortfalls()
            if kept_NV is not None and first < len(kept_NV):
                kept = kept_NV[first:end].to(logits_NV.device).float()
                found.differences += differences(kept, logits_NV[: len(kept)].float()).tolist()
        return found


class _Piece:
    """Some tokens of a text, from number ``first`` on, and the logits before each."""

    def __init__(self, text: Text, ids_T: Tensor, first: int, logits_NV: Tensor) -> None:
        self.text, self.ids_T, self.logits_NV = text, ids_T, logits_NV
        self.at = text.prompt + first
        self.first, self.written_N = first, ids_T[self.at : self.at + len(logits_NV)]

    def shortfalls(self) -> dict[int, float]:
        """The shortfall of each token that is not the pick, by its number."""
        others = (self._picks(0, self.logits_NV) != self.written_N).nonzero()[:, 0].tolist()
        return {self.first + place: self._shortfall(place) for place in others}

    def _picks(self, place: int, logits_NV: Tensor) -> Tensor:
        """The picks ``[N]`` at the positions from ``place`` on."""
        count, at = len(logits_NV), self.at + place
        read = chain(self.ids_T[at - 1 : at - 1 + count].tolist())
        history = History(self.text.ids_T[: self.text.pads + at].to(logits_NV.device), [], self.text.row)
        scores_1NV, noise_1NV = self.text.processing(logits_NV[None], [history], read), None
        if self.text.seed_1 is not None:
            places_1N = torch.arange(at, at + count, device=logits_NV.device)[None]
            noise_1NV = gumbel(self.text.seed_1.to(logits_NV.device), places_1N, logits_NV.shape[-1])
        return pick(scores_1NV, noise_1NV)[0]

    def _shortfall(self, place: int) -> float:
        """By how much the logit of the written token would have to be larger for it to be the pick; infinity: however large."""
        token, logits_1V = self.written_N[place], self.logits_NV[place : place + 1].float()

        def is_pick(raised: float) -> bool:
            changed_1V = logits_1V.clone()
            changed_1V[0, token] += raised
            return bool(self._picks(place, changed_1V)[0] == token)

        low, high = 0.0, float(logits_1V.nan_to_num(0, 0, 0).abs().max()) * 2 + NOISE * self.text.processing.temperature
        if not is_pick(high):
            return math.inf
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if is_pick(middle) else (middle, high)
        return high
