"""Whether passes run on an accelerator. What depends on that asks here, so that a test can have the CPU treated as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_treated: ContextVar[bool] = ContextVar("the CPU is treated as an accelerator", default=False)


def is_accelerator(device: torch.device) -> bool:
    """True unless the device is the CPU."""
    return device.type != "cpu" or _treated.get()


@contextmanager
def cpu_as_accelerator() -> Iterator[None]:
    """Within this context, of this thread alone, sizes and kernels on the CPU are chosen as on an accelerator."""
    token = _treated.set(True)
    try:
        yield
    finally:
        _treated.reset(token)
