"""Gradient checkpointing: keep a function's inputs alone, and compute its activations again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch.utils.checkpoint import checkpoint

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_within: ContextVar[Callable[[], AbstractContextManager[Any]]] = ContextVar("what is computed again", default=nullcontext)


@contextmanager
def recompute_within(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Compute again, in ``context()``, what is run in here: autograd leaves the modes of the forward off in the backward."""
    token = _within.set(context)
    try:
        yield
    finally:
        _within.reset(token)


def contexts(mode: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Contexts:
    """Return the contexts of the forward and of its repetition, as `checkpoint` asks for them; ``mode()`` is one more of the repetition."""
    return nullcontext(), _both(_within.get(), mode)


@contextmanager
def _both(outer: Callable[[], AbstractContextManager[Any]], inner: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with outer(), inner():
        yield


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call the function, which draws no random numbers; the backward calls it again."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
