"""Whether passes run on an accelerator. What depends on that asks here, so that a test can have the CPU treated as one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
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


def not_compilable(device: torch.device) -> str | None:
    """The reason why torch.compile cannot be used for the device; None if it can."""
    if not torch._dynamo.is_dynamo_supported():
        return f"torch {torch.__version__} does not compile on Python {sys.version_info.major}.{sys.version_info.minor}"
    if device.type == "cpu":
        return None if shutil.which(cxx()) else f"torch.compile needs a C++ compiler ({cxx()} is missing); install one or set CXX"
    return None if importlib.util.find_spec("triton") else "torch.compile needs Triton on this device; install triton"


def cxx() -> str:
    """The name of the C++ compiler."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
