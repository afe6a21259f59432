"""The operations of kernels.cpp, compiled for this machine at their first use and kept in the user's cache folder."""

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from headstart.support.devices import cxx, processor
from headstart.support.files import atomic, cache_folder, discard

SOURCES = [Path(__file__).with_name(name) for name in ("kernels.cpp", "codes.h")]
OPTIONS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-DAT_PARALLEL_OPENMP=1")
DTYPES = (torch.float32, torch.bfloat16)
OUTPUTS = 32
"""Outputs of a block of a packed weight."""


def unavailable() -> str | None:
    """The reason why nothing can be compiled for this machine; None if it can."""
    if sys.platform != "linux":
        return f"compiled layers are for Linux; this is {sys.platform}"
    if shutil.which(cxx()) is None:
        return f"there is no C++ compiler ({cxx()} is missing); install one or set CXX"
    return None


@functools.cache
def code() -> str:
    """A hash of the kernels and of the machine: torch, compiler and all of the processor's instructions."""
    instructions = platform.machine(), processor("flags", "Features")
    parts = torch.__version__, torch.version.git_version, shutil.which(cxx()), instructions, OPTIONS, [path.read_text() for path in SOURCES]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def folder() -> Path:
    """Where compiled code is kept."""
    return cache_folder() / "compiled"


def library() -> Path:
    """The compiled operations, there or not."""
    return folder() / f"kernels-{code()}.so"


def build() -> None:
    """Compile the operations, if that has not been done. Raises OSError or CalledProcessError."""
    with suppress(Damaged):
        require_whole(library())
        return
    root = Path(torch.__file__).parent
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    with atomic(library()) as path:
        command = [cxx(), str(SOURCES[0]), *OPTIONS, *includes, "-o", str(path), f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        seal(path)


@functools.cache
def load() -> None:
    """Load the operations, which must be compiled. Raises Damaged if the file is, which is then removed."""
    file = str(require_whole(library()))
    ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)  # compiled layers find its functions by name
    torch.ops.load_library(file)


OPERATIONS = torch.library.Library("headstart_cpu", "DEF")
OPERATIONS.define("product(Tensor x, Tensor weight, Tensor? bias, int outputs) -> Tensor")
OPERATIONS.define("pack(Tensor weight, Tensor(a!) packed, int first) -> ()")
OPERATIONS.define("encoded(Tensor weight) -> (Tensor, int)")
OPERATIONS.define("attention(Tensor query, Tensor keys, Tensor values, Tensor mask, float scale) -> Tensor")


_A = "AtenTensorHandle"
SHIMS = {
    torch.ops.headstart_cpu.product.default: f"aoti_torch_cpu_product({_A}, {_A}, {_A}*, int64_t, {_A}*)",
    torch.ops.headstart_cpu.attention.default: f"aoti_torch_cpu_attention({_A}, {_A}, {_A}, {_A}, double, {_A}*)",
}
"""The functions of kernels.cpp that compiled layers call for operations; the last argument is the result."""


@torch.library.register_fake("headstart_cpu::product")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


@torch.library.register_fake("headstart_cpu::attention")
def _(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    B, H, N, _ = query.shape
    return query.new_empty(B, N, H, values.shape[-1])


# Compiled files end with their hashes: one that was cut short would end the process that loads it.

HASH = 32
"""Bytes of a hash."""


class Damaged(Exception):
    """A compiled file is not as it was written; it has been removed."""


def seal(file: Path) -> None:
    """Append its hash to a file."""
    code = file.read_bytes()
    file.write_bytes(code + hashlib.sha256(code).digest())


def require_whole(file: Path) -> Path:
    """Return a file that is as it was when it was sealed. Raises Damaged, and removes it, if it is not."""
    with suppress(OSError):
        code = file.read_bytes()
        if hashlib.sha256(code[:-HASH]).digest() == code[-HASH:]:
            return file
    discard(file)
    raise Damaged(f"{file} is damaged and was removed; headstart compile makes it again")
