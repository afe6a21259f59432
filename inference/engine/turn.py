"""One call at a time decodes on a model.

Calls on one model share its hooks, its captured forward passes and the drafters' statistics, so calls of several threads take turns;
calls on different models run at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

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
