"""What transformers' ``generate`` keeps from the callable given as ``custom_generate``, read from the call in progress.

transformers 5.23 drops the streamer, and the tokenizer before it makes the criteria of stop strings, which need it. Both are found in the
frames of the call, since the model is the user's: nothing of it, or of its class, is patched.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType, MethodType
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from headstart.support.errors import UserError

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
