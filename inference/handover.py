"""What transformers' ``generate`` keeps from the callable given as ``custom_generate``, read from the call in progress.

transformers 5.23 drops the streamer, and the tokenizer before it makes the criteria of stop strings, which need it. Both are found in the
frames of the call, since the model is the user's: nothing of it, or of its class, is patched.

One call at a time decodes on a model.

Calls on one model share its hooks, its captured forward passes and the drafters' statistics, so calls of several threads take turns;
calls on different models run at the same time.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from headstart.support.errors import UserError


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


GENERATE: CodeType = inspect.unwrap(GenerationMixin.generate).__code__
EXTRACT: CodeType = GenerationMixin._extract_generation_mode_kwargs.__code__
"""Where ``generate`` takes out of its arguments what is not the generation config's, and reads the callable's signature."""


class Entry(functools.partial):
    """A method as a callable for ``custom_generate``; transformers reads its signature in the middle of ``generate``."""

    @property
    def __signature__(self) -> inspect.Signature:
        frame = _frame(lambda frame: frame.f_code is EXTRACT)
        if frame is not None:  # give back what was taken out; what is not ours, transformers then refuses
            given = frame.f_locals
            taken = {name: given["generation_mode_kwargs"].get(name) for name in ("tokenizer", "assistant_tokenizer")}
            given["kwargs"].update({name: value for name, value in taken.items() if value is not None})
        return inspect.signature(self.func)


class entry:  # noqa: N801  (used as a decorator)
    """Make a method an `Entry` of the object it is called on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, owner: object | None, kind: type | None = None) -> Any:
        return self.function if owner is None else functools.update_wrapper(Entry(MethodType(self.function, owner)), self.function)


def handed_streamer(model: PreTrainedModel) -> BaseStreamer | None:
    """Return the streamer of the call of ``generate`` in progress on this model; None if it has none, or no call is in progress.

    Raises UserError for other arguments that are not passed on and that heads cannot honour.
    """

    def calls(frame: FrameType) -> bool:
        return frame.f_code is GENERATE and frame.f_locals["self"] is model and frame.f_locals["custom_generate"] is not None

    frame = _frame(calls)
    if frame is None:
        return None
    given = frame.f_locals
    if given["assistant_model"] is not None:
        raise UserError("assistant_model and heads both draft; leave assistant_model out")
    if given["synced_gpus"]:
        raise UserError("synced_gpus=True is not supported: rows take different numbers of passes in each process; leave it out")
    streamer: BaseStreamer | None = given["streamer"]
    return streamer


def _frame(wanted: Callable[[FrameType], bool]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not wanted(frame):
        frame = frame.f_back
    return frame
