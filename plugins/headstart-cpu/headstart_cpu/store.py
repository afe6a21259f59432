"""Programs and compiled layers in the user's cache folder, and why some cannot be compiled. A file that is damaged is made again."""

import functools
import hashlib
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import TypeAdapter
from torch import Tensor

import headstart
from headstart.inference.capture.captured import first_line
from headstart.support.errors import UserError
from headstart.support.files import atomic, write_text
from headstart_cpu import kernels
from headstart_cpu.kernels import SHIMS, require_whole, seal
from headstart_cpu.program import SPACE, NotCompiled, Program, Region

PROGRAM = TypeAdapter(Program)
Layer = Callable[[list[Tensor]], list[Tensor]]
"""A loaded region: a function of its inputs and weights."""


@functools.cache
def code() -> str:
    """A hash of all that compiled layers depend on beside the model: the machine, versions and this code."""
    digest, root = hashlib.sha256(f"{kernels.code()} | {transformers.__version__}".encode()), Path(headstart.__file__).parent
    folders = (Path(__file__).parent, *(root / name for name in ("heads", "inference/engine")))
    for file in (file for folder in folders for file in sorted(folder.rglob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:20]


def program_file(what: Any) -> Path:
    """The file of the program of a model's pass, there or not; ``what``: all that the trace depends on."""
    return kernels.folder() / f"pass-{_named(what)}.json"


def layer_file(region: Region) -> Path:
    """The file of a compiled layer, there or not."""
    return kernels.folder() / f"layer-{_named(region)}.so"


def _named(what: Any) -> str:
    """A name by this code and machine, and by what is kept."""
    return hashlib.sha256(f"{code()} | {what}".encode()).hexdigest()[:20]


def read_program(file: Path) -> Program | None:
    """The program in the file; None if there is none, or if it is damaged."""
    try:
        return PROGRAM.validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def write_program(file: Path, program: Program) -> None:
    """Keep a program. Raises OSError or UserError where that is not possible."""
    write_text(file, PROGRAM.dump_json(program, indent=2).decode())


def failure(file: Path) -> str | None:
    """Why what would be kept in this file cannot be compiled; None if that is not known."""
    try:
        return _note(file).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def note_failure(file: Path, error: Exception) -> str:
    """Keep why something cannot be compiled, so that later processes need not try; returns it in one line."""
    text = in_a_line(error)
    with suppress(OSError, UserError):
        write_text(_note(file), f"{text}\n")
    return text


def in_a_line(error: Exception) -> str:
    """The first line of what an error says, with its kind."""
    return str(error) if isinstance(error, NotCompiled) else first_line(error)


def _note(file: Path) -> Path:
    return file.with_suffix(".failed")


def _files(program: Program) -> list[Path]:
    """Of the code that a program needs."""
    return [kernels.library(), *map(layer_file, program.regions)]


def ready(program: Program) -> bool:
    """True if all of it is compiled."""
    return all(map(Path.is_file, _files(program)))


def load_layers(program: Program) -> list[Layer]:
    """The compiled layers of a program. Raises Damaged if a file is, which is then removed."""
    kernels.load()
    files = [str(require_whole(layer_file(region))) for region in program.regions]
    return [torch._C._aoti.AOTIModelContainerRunnerCpu(file, 1).run for file in files]


def lacking(programs: Iterable[Program]) -> list[Region]:
    """The regions of programs that are not compiled and can be, each once."""
    regions = dict.fromkeys(region for program in programs for region in program.regions)
    return [region for region in regions if not (file := layer_file(region)).is_file() and failure(file) is None]


def compile_missing(program: Program) -> None:
    """Compile what the program lacks; what cannot be compiled is noted (`failure`). Raises OSError, such as that of a full disk."""
    compile_kernels()
    for region in lacking([program]) if failure(kernels.library()) is None else ():
        compile_part(region)


def compile_kernels() -> None:
    """Compile the operations of ours, or note why that is not possible. Raises OSError."""
    try:
        kernels.build()
    except subprocess.CalledProcessError as error:
        faults = [line for line in error.stderr.splitlines() if "error" in line]
        note_failure(kernels.library(), NotCompiled(f"{kernels.SOURCES[0].name} does not compile: {(faults or [str(error)])[0]}"))


def compile_part(region: Region) -> None:
    """Compile a region, or note why that is not possible. Raises OSError."""
    file = layer_file(region)
    try:
        compile_region(region, file)
    except OSError:
        raise
    except Exception as error:  # inductor raises its own kinds
        note_failure(file, error)


def lacks(program: Program) -> bool:
    """True if something of it is not compiled, and can be."""
    return not ready(program) and why_not(program) is None


def why_not(program: Program) -> str | None:
    """Why something of the program cannot be compiled; None if that is not known."""
    return next(filter(None, map(failure, _files(program))), None)


# One region, compiled by AOTInductor with its weights as inputs, loaded by torch's runner.

OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # in 16 bits fused operations round as single ones do
    "cpp.threads": 1,  # products and attention have threads; what lies between is little, and so has one order of summation
    "aot_inductor.custom_ops_to_c_shims": {of: [f"AOTITorchError {function}"] for of, function in SHIMS.items()},
}


def compile_region(region: Region, file: Path) -> None:
    """Compile a region. Raises what torch raises for a region that it cannot compile."""
    from torch._inductor.compile_fx import compile_fx_aot  # which takes seconds
    from torch.fx.experimental.proxy_tensor import make_fx

    from headstart_cpu.traced import Fakes

    space = dict(SPACE)
    exec(region.text, space)  # written by regions.py
    fakes, quiet = Fakes(region.inputs), warnings.catch_warnings(action="ignore", category=FutureWarning)  # torch's, of its own code
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad(), quiet:
        with fakes.mode:
            graph = make_fx(lambda *tensors: space["forward"](None, *tensors), tracing_mode="symbolic")(*fakes.tensors)
        if fakes.sizes() != [sizes for _, sizes in region.inputs]:
            raise RuntimeError("a size of a layer that changes was taken for a constant")
        built = Path(str(compile_fx_aot(graph, list(fakes.tensors), config_patches={**OPTIONS, "aot_inductor.output_path": scratch})))
        for made in filter(Path.exists, (built.with_suffix(".json"), built)):  # the former, if any, says how operations are called
            with atomic(file.with_suffix(made.suffix)) as path:
                shutil.copyfile(made, path)
                if made == built:
                    seal(path)
