"""The interface of a capture backend: one way to capture ``function(held, *inputs)`` and to replay it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.kv.rows import FixedMemory
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
