"""One compiled region, kept in a folder of its own: compiled by AOTInductor with its weights as inputs, loaded by torch's runner."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.support.files import atomic, discard
from headstart_cpu.kernels import SHIMS
from headstart_cpu.program import SPACE, Region
from headstart_cpu.whole import seal

FILE = "layer.so"
OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # in 16 bits fused operations round as single ones do
    "cpp.threads": 1,  # products and attention have threads; what lies between is little, and so has one order of summation
    "aot_inductor.custom_ops_to_c_shims": {of: [f"AOTITorchError {function}"] for of, function in SHIMS.items()},
}


def compile_region(region: Region, folder: Path) -> None:
    """Compile a region into a new folder. Raises what torch raises for a region that it cannot compile."""
    from torch._inductor.compile_fx import compile_fx_aot  # which takes seconds
    from torch.fx.experimental.proxy_tensor import make_fx

    from headstart_cpu.fakes import Fakes

    space = dict(SPACE)
    exec(region.text, space)  # written by regions.py
    fakes = Fakes(region.inputs)
    with fakes.mode, torch.no_grad(), _quiet():
        graph = make_fx(lambda *tensors: space["forward"](None, *tensors), tracing_mode="symbolic")(*fakes.tensors)
    if fakes.sizes() != [sizes for _, sizes in region.inputs]:
        raise RuntimeError("a size of a layer that changes was taken for a constant")
    discard(folder)  # what is left of a damaged one
    with atomic(folder, folder=True) as path, tempfile.TemporaryDirectory() as scratch, torch.no_grad(), _quiet():
        built = Path(str(compile_fx_aot(graph, list(fakes.tensors), config_patches={**OPTIONS, "aot_inductor.output_path": scratch})))
        for file in filter(Path.exists, (built, built.with_suffix(".json"))):  # the latter, if any, says how operations of ours are called
            shutil.copyfile(file, path / f"layer{file.suffix}")
        seal(path / FILE)


def _quiet() -> AbstractContextManager[Any]:
    """Without warnings of torch about its own code."""
    return warnings.catch_warnings(action="ignore", category=FutureWarning)


class Layer:
    """A loaded region: a function of its inputs and weights."""

    def __init__(self, folder: Path) -> None:
        self._run = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / FILE), 1).run

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        found: list[Tensor] = self._run(tensors)
        return found
