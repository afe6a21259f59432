"""While captures are in use, one text in some hundred is judged by the uncaptured model, so that a fault of theirs does not go on.

A token that is off by more than rounding turns captures off, with one line that names the text; what was written cannot be taken back.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.capture.backend import is_out_of_memory
from headstart.inference.capture.capture import Capturer
from headstart.inference.decode import Decoder
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
        self.capturer, self.judge = capturer, Judge(backbone)

    def after(self, decoder: Decoder) -> None:
        """Judge one of the texts of a call if it is its turn."""
        if not self.capturer.spot_checks or _paused.get():
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
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


def _text(decoder: Decoder, row: int) -> Text:
    text, request = decoder.texts.of[row], decoder.request
    seed_1 = None if decoder.seeds_B is None else decoder.seeds_B[row : row + 1]
    return Text(text.ids_T, len(text.written), seed_1, request.processing, request.pads_B[row], row)
