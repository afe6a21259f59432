"""Layers of experts on a CPU: products whose bits do not depend on how many of a pass's tokens an expert gets.

An expert may get one token of a tree, and the same token with others in another pass. A single row is added up in another order than
several (`headstart.inference.capture.onednn`), and so are few rows by MKL in fp32: fewer than 4 on an AMD EPYC, fewer than 16 on an Intel
Xeon. So every token is given several times, and the first result of each is kept: an expert's weights are read once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

TIMES, TIMES_FP32 = 2, (4, 8, 16)
"""How often a token is given to its experts; in fp32 the first that is enough here."""
_active: ContextVar[bool] = ContextVar("repeated tokens", default=False)


@contextmanager
def repeated_tokens() -> Iterator[None]:
    """Within this context, of this thread alone, experts get every token several times."""
    for name in ("eager", *ALL_EXPERTS_FUNCTIONS):
        own = ALL_EXPERTS_FUNCTIONS.get(name)
        if getattr(own, "func", None) is not _repeated:
            ALL_EXPERTS_FUNCTIONS.register(name, partial(_repeated, own))
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


@cache
def times_in_fp32() -> int:
    """The number of rows from which on MKL adds up the products of each in one order."""
    x, weight = torch.randn(64 + 256, 1536, generator=torch.Generator().manual_seed(0)).split([64, 256])
    many = x @ weight.T
    return next((times for times in TIMES_FP32 if torch.equal(x[:times] @ weight.T, many[:times])), TIMES_FP32[-1])


def _repeated(own: Callable[..., Tensor] | None, experts: Any, hidden: Tensor, *rest: Any, **named: Any) -> Tensor:
    """The experts' function, outside the context unchanged. ``own`` None: their class's forward, which transformers wraps."""
    run = type(experts).forward.__wrapped__ if own is None else own
    if not _active.get() or hidden.device.type != "cpu":
        result: Tensor = run(experts, hidden, *rest, **named)
        return result
    times = times_in_fp32() if hidden.dtype == torch.float32 else TIMES
    repeat = partial(torch.repeat_interleave, repeats=times, dim=0)
    found: Tensor = run(experts, repeat(hidden), *map(repeat, rest), **{name: repeat(one) for name, one in named.items()})
    return found[::times]
