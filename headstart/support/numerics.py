"""Arithmetic as it is without what the calling program has set: autocast and the default dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def without_autocast() -> Iterator[None]:
    """Within this context, of this thread, no autocast of the caller changes dtypes, on the CPU or an accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for device in {"cpu", accelerator.type if accelerator is not None else "cpu"}:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Within this context there is no autocast of the caller, and the default dtype is fp32."""
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with without_autocast():
            yield
    finally:
        torch.set_default_dtype(dtype)
