"""What a model keeps from call to call: what was captured, and what was learned of drafts and of times.

While captures are in use, one text in some hundred is judged by the uncaptured model (`SpotCheck`), so that a fault of theirs does not go
on. A token that is off by more than rounding turns captures off, with one line that names the text; what was written cannot be taken back.

Calls on one model share its hooks, its captured forward passes and the drafters' statistics, so calls of several threads take turns
(`turn`); calls on different models run at the same time.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.hooks import hooks
from headstart.heads.base import Drafter
from headstart.inference.capture.capture import HOOKED, BackendName, Capturer, sample_of
from headstart.inference.capture.plugin import Collect, is_out_of_memory
from headstart.inference.decode import Decoder
from headstart.inference.engine.acceptance import Acceptance
from headstart.inference.engine.drafter_source import DrafterSource
from headstart.inference.engine.proposer import Proposer, ProposerSource
from headstart.inference.engine.reader import reader_of
from headstart.inference.engine.source import Source
from headstart.inference.policy import Policy
from headstart.support.devices import holding
from headstart.support.errors import UserError

if TYPE_CHECKING:
    from headstart.inference.engine.judge import Judge, Text

EVERY = 200
"""Of so many texts one is read again, which takes about as long as its prompt did."""
SECONDS = 5.0
"""Time for measuring rounding, if a token of a text is not the pick."""
_paused: ContextVar[bool] = ContextVar("spot checks paused", default=False)
_numbers = itertools.count(1)
"""Texts are numbered in the order in which they end in this process."""
_numbering = threading.Lock()


class SpotCheck:
    """The checks of one engine. ``capturer``: whose captures are given up."""

    def __init__(self, backbone: Backbone, capturer: Capturer) -> None:
        self.backbone, self.capturer = backbone, capturer

    @cached_property
    def judge(self) -> Judge:
        """Made when the first text is judged."""
        from headstart.inference.engine.judge import Judge

        return Judge(self.backbone)

    def after(self, decoder: Decoder) -> None:
        """Judge one of the texts of a call if it is its turn."""
        if not self.capturer.spot_checks or _paused.get() or self.backbone.dependence is not None:  # it reads a text in one pass
            return
        with _numbering:
            numbers = [next(_numbers) for _ in decoder.texts.of]
        for row, number in enumerate(numbers):
            if number % EVERY == 0 and decoder.request.processing.repeatable:
                try:
                    self._check(_text(decoder, row), number)
                except Exception as error:
                    if not is_out_of_memory(error):  # a whole text takes more than its passes; the text is fine without a check
                        raise

    def _check(self, text: Text, number: int) -> None:
        found = self.judge.judge(text, seconds=SECONDS)
        if not (faults := found.faults(self.judge.rounding.tolerance)):
            return
        prompt = text.ids_T[text.pads : len(text.ids_T) - text.written].tolist()
        digest = hashlib.sha256(" ".join(map(str, prompt)).encode()).hexdigest()[:12]
        self.capturer.give_up(
            f"text {number} of this process (a prompt of {len(prompt)} tokens, SHA-256 {digest}) has {len(faults)} of {text.written} tokens"
            f" that the model without captures does not pick, token {faults[0]} the first; its logit is"
            f" {found.shortfalls[faults[0]]:.2g} too small, and passes of other widths differ by {self.judge.rounding.size:.2g}."
            f" Write this text and those since text {max(1, number - EVERY)} again"
        )


@contextmanager
def paused() -> Iterator[None]:
    """Check no text in this context: for benchmarks, which judge every text."""
    with holding(_paused, True):
        yield


def _text(decoder: Decoder, row: int) -> Text:
    from headstart.inference.engine.judge import Text

    text, request = decoder.texts.of[row], decoder.request
    seed_1 = None if decoder.seeds_B is None else decoder.seeds_B[row : row + 1]
    images = decoder.prompts.images.get(row)
    return Text(text.ids_T, len(text.written), seed_1, request.processing, request.pads_B[row], row, images)


class Turn:
    """A lock and the thread that holds it."""

    def __init__(self) -> None:
        self.lock, self.thread = threading.Lock(), 0


_turns: WeakKeyDictionary[nn.Module, Turn] = WeakKeyDictionary()  # not an attribute of the model, which could then not be copied
_adding = threading.Lock()


def share(other: nn.Module, model: nn.Module) -> None:
    """Let calls on ``other``, which has the parts of ``model``, take turns with those on ``model``."""
    with _adding:
        _turns[other] = _turns.setdefault(model, Turn())


@contextmanager
def turn(model: nn.Module) -> Iterator[None]:
    """Wait until no other thread decodes on ``model``, and keep others waiting during the block.

    Raises UserError if this thread is decoding on it already, since it would wait for itself.
    """
    with _adding:
        its = _turns.setdefault(model, Turn())
    if its.thread == threading.get_ident():
        raise UserError(
            "generate was called inside a call of generate on the same model (by a streamer, a logits processor or a stopping criterion); "
            "call it when that one has ended"
        )
    with its.lock:
        its.thread = threading.get_ident()
        try:
            yield
        finally:
            its.thread = 0


logger = logging.getLogger(__name__)


class Loaded(Protocol):
    """What an engine is made for, a `SpeculativeModel`."""

    backbone: Backbone
    drafter: Drafter | None
    drafters: list[Drafter]
    proposers: list[Proposer]
    capture: BackendName
    measured: dict[bool, dict[str, Any]]


class Engine:
    """The reader and the draft sources, kept from call to call. ``collect``: see `Capturer`."""

    def __init__(self, heads: Loaded, speculate: bool, collect: Collect | None = None) -> None:
        drafters, proposers = (heads.drafters, heads.proposers) if speculate else ([], [])
        self.modules = (heads.backbone.model, *drafters)
        hooked = bool(hooks(self.modules))
        self.capturer = Capturer("off" if hooked else heads.capture, heads.backbone.device, collect)
        if hooked:
            self.capturer.reason = HOOKED
            logger.warning(f"passes are not captured, which makes small models slower: {HOOKED}")
        copies = heads.backbone.device.type == "cpu"  # elsewhere captures read the weights themselves
        self._sample = sample_of(self.modules) if copies else None
        sources: list[Source] = [ProposerSource(proposer) for proposer in proposers]  # first: a drafter may rest where they are sure
        sources += [DrafterSource(f"{i} {type(drafter).__name__}", drafter, self.capturer) for i, drafter in enumerate(drafters)]
        self.policy = Policy(sources, self.capturer.fixed, chains=heads.backbone.no_trees is not None)
        for source in sources if heads.drafter is not None else []:
            if isinstance(source, DrafterSource) and source.drafter is heads.drafter:
                source.by_mode |= {sampled: Acceptance.from_json(stored) for sampled, stored in heads.measured.items()}
        self.spot_check = SpotCheck(heads.backbone, self.capturer)
        self.reader = reader_of(heads.backbone, tuple(sorted({tap for drafter in drafters for tap in drafter.taps})), self.capturer)

    @property
    def outdated(self) -> bool:
        """True if weights, of which captures and compiled layers hold copies, have other values now."""
        return self._sample is not None and not torch.equal(self._sample, sample_of(self.modules))
