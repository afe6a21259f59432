"""Where passes run and in which arithmetic: accelerators, compilers, autocast, and the dtypes by their short names in recipes and flags."""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

import torch

from headstart import __version__

Value = TypeVar("Value")
AS_ACCELERATOR: ContextVar[bool] = ContextVar("the CPU is treated as an accelerator", default=False)
"""Where it is True, as in tests, sizes and kernels on the CPU are chosen as on an accelerator."""


@contextmanager
def holding(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Within this context, of this thread alone, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def find_accelerator() -> torch.device | None:
    """The accelerator of this machine; None without one, which torch built for CUDA, as PyPI has it, does not say by itself."""
    return torch.accelerator.current_accelerator(check_available=True)


def is_accelerator(device: torch.device) -> bool:
    """True unless the device is the CPU."""
    return device.type != "cpu" or AS_ACCELERATOR.get()


def not_compilable(device: torch.device) -> str | None:
    """The reason why torch.compile cannot be used for the device; None if it can."""
    if not torch._dynamo.is_dynamo_supported():
        return f"torch {torch.__version__} does not compile on Python {sys.version_info.major}.{sys.version_info.minor}"
    if device.type == "cpu":
        return None if shutil.which(cxx()) else f"torch.compile needs a C++ compiler ({cxx()} is missing); install one or set CXX"
    return None if importlib.util.find_spec("triton") else "torch.compile needs Triton on this device; install triton"


def versions(*libraries: str) -> dict[str, str]:
    """The versions of Headstart, of these libraries and of Python."""
    of_libraries = {name: importlib.import_module(name).__version__ for name in libraries}
    return {"headstart": __version__, **of_libraries, "python": platform.python_version()}


def cxx() -> str:
    """The name of the C++ compiler."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def processor(*fields: str) -> str:
    """What Linux says of the processor in the first of these fields, such as its model name; elsewhere what Python knows, often nothing."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(fields)), platform.processor())


@contextmanager
def without_autocast() -> Iterator[None]:
    """Within this context, of this thread, no autocast of the caller changes dtypes, on the CPU or an accelerator."""
    accelerator = find_accelerator() or torch.device("cpu")
    with ExitStack() as stack:
        for device in {"cpu", accelerator.type}:
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


def spread(first: int, last: int, count: int) -> list[int]:
    """Return ``count`` numbers from ``first`` to ``last``, both among them unless ``count`` is 1, rounded down."""
    return [first + i * (last - first) // max(count - 1, 1) for i in range(count)]


NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short name -> torch's name."""


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of a short name; None for any other value (``auto``, ``no``, ``int8``)."""
    return getattr(torch, NAMES[name]) if name in NAMES else None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, or torch's if it has none."""
    name = str(dtype).removeprefix("torch.")
    return next((short for short, full in NAMES.items() if full == name), name)


def bf16_instructions() -> bool:
    """True if the CPU multiplies bf16 numbers itself (x86 with AVX-512 BF16 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def machine(device: torch.device) -> str:
    """Return the name of a GPU, or that of the processor with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name, instructions = processor("model name") or platform.machine(), torch.backends.cpu.get_cpu_capability()
    return f"{device.type} {name} {instructions} {torch.get_num_threads()} threads"
