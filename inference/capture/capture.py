"""Captures functions of tensors with a backend chosen by name and replays them without Python's overhead.

    capturer = Capturer("auto", device)
    forward = capturer.capture(forward, "verification", module=model)
    forward(cache, tokens)

A capturable function does not read values back to the host and branches only on sizes. It may write into its ``held`` tensors, but must
write the same numbers to the same places whenever it is called with the same arguments. If a function turns out not to be capturable, it
runs uncaptured from then on; the reason is logged once and kept (`Capturer.report`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import nn

from headstart.heads.kv.rows import FixedMemory
from headstart.inference.capture.backend import Backend, Call, Capture, Function, is_out_of_memory
from headstart.inference.capture.stopwatch import void_running
from headstart.support.devices import is_accelerator
from headstart.support.errors import UserError, waiting

BackendName = Literal["auto", "trace", "cuda-graph", "compile", "off"]
"""auto: on a CPU what is compiled, else traces after `PATIENCE` calls of the first function; nothing elsewhere. The others capture at the
first call; ``compile`` compiles what lacks."""
Collect = Callable[[Path, Any], object]
"""Takes the programs of passes that are not compiled, by their files."""


def _trace() -> type[Backend]:
    from headstart.inference.capture.trace import Trace

    return Trace


def _cuda_graph() -> type[Backend]:
    from headstart.inference.capture.cuda_graph import CudaGraph

    return CudaGraph


BACKENDS: dict[str, Callable[[], type[Backend]]] = {"trace": _trace, "cuda-graph": _cuda_graph}
"""Imported when they are chosen."""
PATIENCE = 24
"""Calls of a function before ``auto`` captures it; capturing takes about as long as 30 calls."""
SHORT_PATIENCE = 3
"""The same once another function has been captured: decoding goes on for long, and sources are compared by their captured times."""
MOST_SHAPES = 4096
"""Exact shapes of a function that are remembered."""
_NOT_PROVED = {"cuda": " until CUDA graphs have run on a GPU since they were mended"}
logger = logging.getLogger(__name__)


class Compiling(Protocol):
    """Passes by compiled layers."""

    reason: str | None

    @property
    def active(self) -> bool:
        """True while it is used."""

    def give_up(self, reason: str) -> None:
        """Run the function itself from now on."""


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
        self.compiled: list[Compiling] = []
        """What takes the place of captures where it has been compiled."""
        self.unchecked = self.backend is not None and self.backend.checked
        """True until captured passes were compared with uncaptured ones (`Backend.checked`)."""
        self.accelerator = self.fixed or is_accelerator(device)
        """Sizes are chosen as on an accelerator, where nodes cost little and calls much."""

    def capture(
        self,
        function: Function,
        name: str,
        module: nn.Module | None = None,
        unless: str | None = None,
        *,
        calls_per_step: int = 1,
        same_bits: bool = False,
    ) -> Captured:
        """Wrap ``function(held, *inputs)``. ``name``: its name in reports. ``unless``: a reason not to capture it; None: capture it.

        ``calls_per_step``: calls in one decoding step, so that ``auto`` waits for as many steps as with other functions. ``same_bits``: a
        capture whose results differ from the function's in any bit is not used, if the backend compares them.
        """
        kind = None if unless is not None else self.backend
        backend = kind(module, self.memory, same_bits) if kind is not None else None
        captured = Captured(function, name, backend, self.patience * calls_per_step, unless if self.backend is not None else None)
        captured.loads_kernels, captured.functions = is_accelerator(self.device), self.functions
        self.functions.append(captured)
        return captured

    def give_up(self, reason: str) -> None:
        """Run every function uncaptured from now on, with one line in the log; the captures' memory is freed."""
        for compiled in self.compiled:
            compiled.give_up(reason)
        if self.backend is None:
            return
        logger.warning("forward passes are no longer captured, which is slower: %s", reason)
        self.backend, self.reason = None, reason
        for one in self.functions:
            one.drop()

    @property
    def fixed(self) -> bool:
        """True if every combination of sizes is captured apart, and the stores of texts that begin now lie in ``memory``."""
        return self.backend is not None and self.backend.fixed

    @property
    def spot_checks(self) -> bool:
        """True if some texts are to be read again without captures (`Backend.spot_checks`)."""
        return any(one.active for one in self.compiled) or (self.backend is not None and self.backend.spot_checks)

    def report(self) -> CaptureReport:
        """The backends that capture the functions called so far, and the reasons for those not captured."""
        called = [one for one in self.functions if one.calls]
        backends = dict.fromkeys(one.backend.name for one in called if one.backend is not None)
        reasons = [self.reason] if self.reason else []
        if any(one.active for one in self.compiled):
            backends = dict.fromkeys(["compile", *backends])
        reasons += [f"compiled code: {one.reason}" for one in self.compiled if one.reason]
        reasons += [f"{one.name}: {one.fallback}" for one in called if one.fallback]
        return CaptureReport("+".join(backends) or "off", "; ".join(dict.fromkeys(reasons)) or None)


class Captured:
    """``function(held, *inputs)`` -> a pytree of tensors; ``held`` and ``inputs`` are pytrees too."""

    def __init__(self, function: Function, name: str, backend: Backend | None, patience: int, fallback: str | None) -> None:
        self.function, self.name, self.backend, self._patience = function, name, backend, patience
        self.functions: list[Captured] = []
        """All functions of the capturer."""
        self.fallback = fallback
        """The reason why this function is not captured although a backend was chosen."""
        self.loads_kernels = False
        """True on an accelerator: the first call at new shapes loads kernels, so its time says nothing of later ones."""
        self.calls = 0
        self.captures_made = 0
        self._run: set[Hashable] = set()
        """Structures and shapes of the uncaptured calls so far, on an accelerator."""
        self._captures: dict[Hashable, Capture] = {}
        self._known: dict[Hashable, Capture] = {}
        """Captures by structure and exact shapes of earlier calls."""

    @property
    def any_captured(self) -> bool:
        """True once a function of the capturer has been captured."""
        return any(one.captures_made for one in self.functions)

    @property
    def patience(self) -> int:
        """Calls that run uncaptured."""
        return self._patience * SHORT_PATIENCE // PATIENCE if self.any_captured else self._patience

    def __call__(self, held: Any, *inputs: Any) -> Any:
        self.calls += 1
        if self.backend is None or self.calls <= self.patience:
            if self.loads_kernels:
                self._void_first(Call.of(held, inputs))
            if self.backend is not None and self.any_captured:  # slower than from the next calls on
                void_running()
            return self.function(held, *inputs)
        call = Call.of(held, inputs)
        exact = (call.structure, call.shapes, self.backend.layout(call))
        try:
            capture = self._known.get(exact)
            if capture is None:
                return self._at_new_shapes(exact, call, self.backend)
            capture.used = self.calls
            return capture(call)
        except Exception as error:  # may be the function's own error: running it again raises that
            if is_out_of_memory(error):
                raise
            self._fall_back(error)
            return self.function(held, *inputs)

    def _void_first(self, call: Call) -> None:
        """Mark running stopwatches as not valid if the function is called at new shapes."""
        exact = (call.structure, call.shapes)
        if exact not in self._run:
            void_running()
            self._run.add(exact)

    def _at_new_shapes(self, exact: Hashable, call: Call, backend: Backend) -> Any:
        """The result at new shapes: replay within the compared range, else compare, else capture again."""
        key = (call.structure, backend.variant(call))
        capture = self._captures.get(key)
        if capture is not None and capture.follows(call):
            if len(self._known) >= MOST_SHAPES:
                self._known = {}
            self._known[exact] = capture
            capture.used = self.calls
            return capture(call)
        void_running()
        if capture is not None and (expected := capture.compare(self.function, call)) is not None:
            return expected
        with waiting(f"capturing {self.name}"):
            capture = backend.capture(self.function, call)
        self._keep(key, capture)
        self.captures_made += 1
        capture.extend_range(call.shapes)
        return capture(call)

    def _keep(self, key: Hashable, capture: Capture) -> None:
        """Keep a capture in place of an earlier one of its key or, if there are too many, of the one not used for longest."""
        dropped = self._captures.pop(key, None)
        assert self.backend is not None
        if dropped is None and len(self._captures) >= self.backend.most_captures:
            dropped = self._captures.pop(min(self._captures, key=lambda other: self._captures[other].used))
        self._captures[key], capture.used = capture, self.calls
        self._known = {exact: known for exact, known in self._known.items() if known is not dropped}

    def _fall_back(self, error: Exception) -> None:
        """Run the function uncaptured from now on."""
        assert self.backend is not None
        self.fallback = f"not capturable by {self.backend.name}: {_first_line(error)}"
        warn_once(f"{self.name} is {self.fallback}; it runs uncaptured, which is slower")
        self.drop()

    def drop(self) -> None:
        """Forget all captures and make no more."""
        self.backend = None
        self._captures, self._known = {}, {}


def choose(name: str, device: torch.device) -> tuple[type[Backend] | None, str | None]:
    """The backend of that name, or None and the reason if there is one. Raises UserError if it does not exist or cannot be used here."""
    if name not in get_args(BackendName):
        raise UserError(f"no capture backend {name!r}; choose {', '.join(get_args(BackendName))}")
    if name == "off":
        return None, None
    if name == "compile":
        if device.type != "cpu":
            raise UserError(f"capture 'compile' is for the CPU; the model is on {device.type}: choose 'auto', 'cuda-graph' or 'off'")
        trace = BACKENDS["trace"]()
        return (trace if trace.unavailable(device) is None else None), None
    if name != "auto":
        backend = BACKENDS[name]()
        if reason := backend.unavailable(device):
            raise UserError(f"capture {name!r} cannot be used: {reason}; choose 'auto' or 'off'")
        return backend, None
    if device.type != "cpu":
        return None, f"auto captures nothing on {device.type}{_NOT_PROVED.get(device.type, '')}; choose a backend by name"
    trace = BACKENDS["trace"]()
    if reason := trace.unavailable(device):
        reason = f"{reason}; 'compile' is the other backend for the CPU"
        warn_once(f"forward passes are not captured, which makes small models slower: {reason}")
        return None, reason
    return trace, None


@functools.cache
def warn_once(message: str) -> None:
    """Log a line, once in this process."""
    logger.warning(message)


def _first_line(error: Exception) -> str:
    """The error's type and the most informative line of its message: TorchScript's last ``RuntimeError:`` line, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((line for line in reversed(lines) if line.startswith("RuntimeError: ")), lines[0] if lines else "")
    return f"{type(error).__name__}: {text.removeprefix('RuntimeError: ')[:160]}"
