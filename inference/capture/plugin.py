"""The interface of a capture backend, one way to capture ``function(held, *inputs)`` and to replay it, and that of a package that makes
decoding faster on one kind of device, found by its entry point:

    [project.entry-points."headstart.capture"]
    cpu = "headstart_cpu.plugin:CPU"

Without it everything decodes, with heads as without. `region` marks parts of a function that such a package may compile by themselves.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.layers.rows import FixedMemory
from headstart.support.devices import holding
from headstart.support.errors import UserError
from headstart.support.pytree import builder, flatten, list_tensors

Function = Callable[..., Any]


@dataclass(slots=True)
class Call:
    """The arguments of one call, as pytrees and as a flat list of tensors."""

    held: Any
    """Tensors that the function may write into, such as the KV cache."""
    inputs: tuple[Any, ...]
    leaves: list[Tensor]
    held_leaves: int
    """The number of leaves of ``held``, which come first in ``leaves``."""
    structure: tuple[Hashable, Hashable]
    """Both pytrees without their tensors; calls of different structures are captured separately."""
    shapes: tuple[torch.Size, ...]
    """The shape of every leaf."""

    @classmethod
    def of(cls, held: Any, inputs: tuple[Any, ...]) -> Call:
        """Flatten the arguments of a call."""
        leaves: list[Tensor] = []
        held_structure = flatten(held, leaves)
        held_leaves = len(leaves)
        structure = (held_structure, flatten(inputs, leaves))
        return cls(held, inputs, leaves, held_leaves, structure, tuple([leaf.shape for leaf in leaves]))

    def arguments(self, leaves: Sequence[Tensor]) -> tuple[Any, Any]:
        """``held`` and ``inputs`` rebuilt with these tensors."""
        held_structure, inputs_structure = self.structure
        return builder(held_structure)(iter(leaves[: self.held_leaves])), builder(inputs_structure)(iter(leaves[self.held_leaves :]))


class Flat:
    """A function as one of a call's tensors alone, which returns a tuple of tensors; `build` makes its result of them."""

    def __init__(self, function: Function, call: Call) -> None:
        self.function, self.call = function, call
        self._structure: Hashable = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        held, inputs = self.call.arguments(tensors)
        results: list[Tensor] = []
        self._structure = flatten(self.function(held, *inputs), results)
        return tuple(results)

    @property
    def build(self) -> Callable[[Iterator[Tensor]], Any]:
        """Makes the function's result of an iterator of its tensors; known once it has been called."""
        return builder(self._structure)


class Backend(ABC):
    """Captures one function.

    ``module``: the module that the function runs. ``memory``: of a backend with ``fixed``, where stores lie; shared by its functions.
    ``same_bits``: see `Capturer.capture`.
    """

    name: ClassVar[str]
    fixed: ClassVar[bool] = False
    """A capture is for one combination of sizes and for stores in fixed memory: sizes are padded, so that few occur."""
    spot_checks: ClassVar[bool] = True
    """Some of the texts are read again by the uncaptured model (inference/runtime.py)."""
    most_captures: ClassVar[int] = 64
    """Captures of a function that are kept, a few MB each. Widths, depths and combinations of filters have captures of their own."""

    def __init__(self, module: nn.Module | None, memory: FixedMemory, same_bits: bool = False) -> None:
        self.module, self.memory, self.same_bits = module, memory, same_bits

    @classmethod
    @abstractmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """The reason why this backend cannot be used on the device with this torch and Python; None if it can."""

    @abstractmethod
    def variant(self, call: Call) -> Hashable:
        """A key for the call: calls of the same structure and variant share a capture."""

    @abstractmethod
    def capture(self, function: Function, call: Call) -> Capture:
        """Capture the function as called here; any error means that it cannot be captured."""

    def layout(self, call: Call) -> Hashable:
        """Where the held tensors lie, if a capture is only right for that place."""
        return None


class Capture(ABC):
    """One captured function. It is replayed only at sizes within the range over which it was compared with the function.

    ``same_bits``: see `Capturer.capture`.
    """

    def __init__(self, same_bits: bool = False) -> None:
        self.same_bits, self.used = same_bits, 0
        """The number of the function's last call that replayed it."""
        self.least: list[int] = []
        self.most: list[int] = []

    @abstractmethod
    def __call__(self, call: Call) -> Any:
        """Replay the capture; returns the function's result for this call."""

    def follows(self, call: Call) -> bool:
        """True if every size lies within the compared range."""
        return all(low <= size <= high for low, size, high in zip(self.least, _sizes(call.shapes), self.most, strict=True))

    def extend_range(self, shapes: Sequence[torch.Size]) -> None:
        """Extend the compared range to these shapes."""
        sizes = _sizes(shapes)
        self.least, self.most = [*map(min, self.least or sizes, sizes)], [*map(max, self.most or sizes, sizes)]

    def compare(self, function: Function, call: Call) -> Any:
        """The function's own result if a replay at these new shapes equals it, up to rounding or in every bit; else None."""
        expected = function(call.held, *call.inputs)
        try:
            replayed = list_tensors(self(call))
        except RuntimeError as error:  # a size that the capture holds as a constant
            if is_out_of_memory(error):
                raise
            return None
        results = list_tensors(expected)
        if not (all(map(torch.equal, replayed, results)) if self.same_bits else all_nearly_equal(replayed, results)):
            return None
        self.extend_range(call.shapes)
        return expected


def sizes_of_one(shapes: Iterable[torch.Size]) -> tuple[bool, ...]:
    """A mask of the sizes that are 1: broadcasting and copying branch on them, so such calls are captured separately."""
    return tuple([size == 1 for size in _sizes(shapes)])


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, which does not make a function uncapturable; on a CPU torch raises a RuntimeError for it."""
    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        words in text for words in ("out of memory", "not enough memory", "can't allocate memory")
    )


def _sizes(shapes: Iterable[torch.Size]) -> list[int]:
    return [size for shape in shapes for size in shape]


def all_nearly_equal(results: Sequence[Tensor], others: Sequence[Tensor], compared: slice = slice(None)) -> bool:
    """True if two results of a function differ by no more than rounding may bring about, in the ``compared`` of their tensors.

    What fp32 tensors hold was computed of others: the coarsest floating-point type of the results gives their rounding.
    """
    if len(results) != len(others):
        return False
    coarsest = max((torch.finfo(result.dtype).eps for result in results if result.is_floating_point()), default=0.0)
    pairs = zip(results[compared], others[compared], strict=True)
    return all(nearly_equal(result, other, max(coarsest, torch.finfo(torch.float32).eps)) for result, other in pairs)


def nearly_equal(tensor: Tensor, other: Tensor, epsilon: float) -> bool:
    """True if two tensors differ by no more than the rounding of a type with this epsilon may bring about."""
    if tensor.shape != other.shape:
        return False
    if not tensor.dtype.is_floating_point:  # near-ties of a topk may fall either way
        return bool((tensor == other).float().mean() > 0.9) if tensor.numel() else True
    scale = other.nan_to_num(0, 0, 0).abs().max().clamp(min=1e-6) if other.numel() else 1.0
    return bool(((tensor - other).nan_to_num(0).abs() <= epsilon**0.5 * scale).all())  # equal infinities differ by nan


# A package for one kind of device.

Collect = Callable[[Path, Any], object]
"""Takes the programs of passes that are not compiled, by their files."""
GROUP = "headstart.capture"
logger = logging.getLogger(__name__)
LACKING = "the package headstart-cpu, with which a CPU decodes faster, is not installed; in a clone: pip install ./plugins/headstart-cpu"


class Compiled(Protocol):
    """A function by compiled code."""

    reason: str | None
    """Why it is not compiled, and will not be."""

    @property
    def active(self) -> bool:
        """True while compiled code is used."""

    def __call__(self, held: Any, *inputs: Any) -> tuple[Any] | None:
        """The function's result, alone in a tuple; None if the function itself is to be run."""

    def give_up(self, reason: str) -> None:
        """Run the function itself from now on."""


class Plugin(Protocol):
    """What the package brings."""

    trace: type[Backend]
    """The backend ``trace``."""

    def compiled(self, function: Function, of: Backbone | nn.Module | None, capture: str, collect: Collect | None) -> Compiled | None:
        """``function(held, *inputs)``, compiled; None where it is not. ``of``: the backbone that verifies, or the drafter that drafts.

        ``capture``: auto, or compile, by which what lacks is compiled at once. ``collect``: is given what lacks, to be compiled later.
        """

    def compile_model(self, heads: Any, say: Callable[[str], object], batch: int = 1) -> dict[str, Any]:
        """Compile what decoding with a `SpeculativeModel` runs, once for a machine.

        ``batch``: the most rows that are decoded together. ``say``: is given lines about the progress. Returns ``parts``, how many were
        compiled, ``seconds`` and the ``folder``. Raises UserError where the layers cannot be compiled.
        """

    def compile_lacking(self, heads: Any, batch: int = 1) -> None:
        """The same where compiled code is used by default, with lines on standard error, also about what cannot be compiled."""


@functools.cache
def plugin(device: str = "cpu") -> Plugin | None:
    """The package for this type of device; None if none is installed, or none that fits, with a line in the log."""
    for point in entry_points(group=GROUP, name=device):
        try:
            found: Plugin = point.load()
            return found
        except (ImportError, AttributeError) as error:
            logger.warning("the package %s is not used, which makes decoding slower: %s", point.dist and point.dist.name, error)
    return None


def required() -> Plugin:
    """The package for CPUs. Raises UserError if it is not installed."""
    found = plugin()
    if found is None:
        raise UserError(LACKING)
    return found


def compile_lacking(heads: Any, batch: int = 1) -> None:
    """See `Plugin.compile_lacking`; nothing without a package for the device."""
    found = plugin(heads.backbone.device.type)
    if found is not None:
        found.compile_lacking(heads, batch)


Mark = Callable[[], Callable[[], None]]
_mark: ContextVar[Mark | None] = ContextVar("marking regions", default=None)


@contextmanager
def region() -> Iterator[None]:
    """What is traced in this block is one region."""
    mark = _mark.get()
    leave: Any = None if mark is None else mark()
    yield
    if leave is not None:
        leave()


def marking(mark: Mark) -> AbstractContextManager[None]:
    """Within this context `region` calls ``mark`` at its start, and what that returns at its end."""
    return holding(_mark, mark)
