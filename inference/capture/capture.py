"""Captures functions of tensors with a backend chosen by name and replays them without Python's overhead.

    capturer = Capturer("auto", device)
    forward = capturer.capture(forward, "verification", backbone)
    forward(cache, tokens)

A capturable function does not read values back to the host and branches only on sizes. It may write into its ``held`` tensors, but must
write the same numbers to the same places whenever it is called with the same arguments. If a function turns out not to be capturable, it
runs uncaptured from then on; the reason is logged once and kept (`Capturer.report`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.hooks import hooks, is_passing
from headstart.heads.layers.rows import FixedMemory
from headstart.inference.capture.captured import PATIENCE, Captured, warn_once
from headstart.inference.capture.plugin import LACKING, Backend, Collect, Compiled, Function, plugin, required
from headstart.support.devices import is_accelerator
from headstart.support.errors import UserError

BackendName = Literal["auto", "trace", "cuda-graph", "compile", "off"]
"""auto: on a CPU what is compiled, else traces after `PATIENCE` calls of the first function; nothing elsewhere. The others capture at the
first call; ``compile`` compiles what lacks."""


BACKENDS: dict[str, Callable[[], type[Backend]]] = {
    "trace": lambda: required().trace,
    "cuda-graph": lambda: import_module(f"{__package__}.cuda_graph").CudaGraph,
}
"""Imported when they are chosen."""
_NOT_PROVED = {"cuda": " until CUDA graphs have run on a GPU since they were mended"}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptureReport:
    """The backends in use ("off": none), and the reasons why functions were not captured."""

    backend: str
    fallback: str | None


class Capturer:
    """Captures functions with one backend and keeps the reason for each function that is not captured.

    ``collect``: is given what lacks, to be compiled later. Raises UserError if the backend does not exist or cannot be used here; ``auto``
    falls back to none.
    """

    def __init__(self, name: BackendName, device: torch.device, collect: Collect | None = None) -> None:
        self.name, self.collect = name, collect
        self.backend, self.reason = choose(name, device)
        self.device = device
        self.patience = PATIENCE if name == "auto" else 0
        self.functions: list[Captured] = []
        self.memory = FixedMemory()
        self.accelerator = self.fixed or is_accelerator(device)
        """Sizes are chosen as on an accelerator, where nodes cost little and calls much."""

    def capture(
        self,
        function: Function,
        name: str,
        of: Backbone | nn.Module | None = None,
        unless: str | None = None,
        *,
        calls_per_step: int = 1,
        compilable: Function | None = None,
    ) -> Captured:
        """Wrap ``function(held, *inputs)``, which runs ``of``. ``name``: its name in reports. ``unless``: a reason not to capture it.

        ``calls_per_step``: calls in one decoding step, so that ``auto`` waits for as many steps as with other functions. ``compilable``:
        what compiled code may take the place of the function, and computes as much. A capture of an exact backbone whose results differ
        from the function's in any bit is not used, if the backend compares them.
        """
        kind, same_bits = None if unless is not None else self.backend, isinstance(of, Backbone) and of.exact
        backend = kind(of.model if isinstance(of, Backbone) else of, self.memory, same_bits) if kind is not None else None
        compiled = None
        if compilable is not None and unless is None and self.name in ("auto", "compile") and (brought := plugin(self.device.type)):
            compiled = brought.compiled(compilable, of, self.name, self.collect)
        fallback = unless if self.backend is not None else None
        captured = Captured(function, name, backend, self.patience * calls_per_step, fallback, compiled)
        captured.loads_kernels, captured.functions = is_accelerator(self.device), self.functions
        self.functions.append(captured)
        return captured

    def give_up(self, reason: str) -> None:
        """Run every function uncaptured from now on, with one line in the log; the captures' memory is freed."""
        for compiled in self._compiled:
            compiled.give_up(reason)
        if self.backend is None:
            return
        logger.warning("forward passes are no longer captured, which is slower: %s", reason)
        self.backend, self.reason = None, reason
        for function in self.functions:
            function.drop()

    @property
    def _compiled(self) -> list[Compiled]:
        return [function.compiled for function in self.functions if function.compiled is not None]

    @property
    def fixed(self) -> bool:
        """True if every combination of sizes is captured apart, and the stores of texts that begin now lie in ``memory``."""
        return self.backend is not None and self.backend.fixed

    @property
    def spot_checks(self) -> bool:
        """True if some texts are to be read again without captures (`Backend.spot_checks`)."""
        return any(code.active for code in self._compiled) or (self.backend is not None and self.backend.spot_checks)

    def report(self) -> CaptureReport:
        """The backends that capture the functions called so far, and the reasons for those not captured."""
        called = [function for function in self.functions if function.calls]
        backends = dict.fromkeys(function.backend.name for function in called if function.backend is not None)
        reasons = [self.reason] if self.reason else []
        if any(code.active for code in self._compiled):
            backends = dict.fromkeys(["compile", *backends])
        reasons += [f"compiled code: {code.reason}" for code in self._compiled if code.reason]
        reasons += [f"{function.name}: {function.fallback}" for function in called if function.fallback]
        return CaptureReport("+".join(backends) or "off", "; ".join(dict.fromkeys(reasons)) or None)


def choose(name: str, device: torch.device) -> tuple[type[Backend] | None, str | None]:
    """The backend of that name, or None and the reason if there is one. Raises UserError if it does not exist or cannot be used here."""
    if name not in get_args(BackendName):
        raise UserError(f"no capture backend {name!r}; choose {', '.join(get_args(BackendName))}")
    if name == "off":
        return None, None
    if name in ("trace", "compile") and device.type != "cpu":
        raise UserError(f"capture {name!r} is for the CPU; the model is on {device.type}: choose 'auto', 'cuda-graph' or 'off'")
    if name == "compile":
        trace = BACKENDS["trace"]()
        return (trace if trace.unavailable(device) is None else None), None
    if name != "auto":
        backend = BACKENDS[name]()
        if reason := backend.unavailable(device):
            raise UserError(f"capture {name!r} cannot be used: {reason}; choose 'auto' or 'off'")
        return backend, None
    if device.type != "cpu":
        return None, f"auto captures nothing on {device.type}{_NOT_PROVED.get(device.type, '')}; choose a backend by name"
    if plugin() is None:
        warn_once(LACKING)
        return None, LACKING
    trace = BACKENDS["trace"]()
    if reason := trace.unavailable(device):
        reason = f"{reason}; 'compile' is the other backend for the CPU"
        warn_once(f"forward passes are not captured, which makes small models slower: {reason}")
        return None, reason
    return trace, None


# What captures depend on: if it changes, they are made again. They hold weights as they were, some in packed copies. In-place changes are
# counted by torch; those through ``.data`` are not, so a sample of every weight is compared too. Hooks are run at the capture alone, and
# whether an adapter is active is decided there.

SAMPLED = 32
"""Values of a weight that are compared."""
HOOKED = "forward hooks of your own are on the model, which a capture would not call"


def dependencies(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Return what captures of these modules depend on, but for changes through ``.data``."""
    parts = [part for module in modules for part in module.modules()]
    held = [tensor for part in parts for tensor in (*part._parameters.values(), *(() if is_passing(part) else part._buffers.values()))]
    return (*((tensor.data_ptr(), version(tensor)) for tensor in held if tensor is not None), *hooks(modules))


def version(weight: Tensor) -> int:
    """How often the tensor was changed in place; changes through ``.data`` do not count."""
    return 0 if weight.is_inference() else weight._version


def sample_of(modules: Sequence[nn.Module]) -> Tensor:
    """Return some values of every weight in fp32, one after the other."""
    weights = {id(weight): weight for module in modules for weight in module.parameters() if type(weight) is nn.Parameter}
    return torch.cat([weight.detach().flatten()[:: weight.numel() // SAMPLED + 1].float() for weight in weights.values() if weight.numel()])
