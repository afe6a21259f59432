"""A function of tensors, recorded once and replayed without Python.

A small model spends most of a pass in Python, launching some hundred operations; replayed, the same operations on the same numbers
take a half to a third of the time on a CPU. There the recording is a `torch.jit.trace`, which follows new shapes by itself; every
size beyond those met so far is compared with the function once, and recorded anew where the recording does not follow. On CUDA it is
a `torch.cuda.CUDAGraph` for each combination of shapes, of the backbone's passes; it has not been run on a GPU yet, so only "always"
turns it on there.

What may be captured: a function that reads nothing back to the host and branches on shapes alone. It may write into its ``held``
tensors, the same numbers to the same places each time it is called with the same arguments.
"""

from __future__ import annotations

import functools
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from headstart.inference.capture.folding import folded
from headstart.inference.capture.linear import TransposedLinear, max_transposed_rows, way

When = Literal["auto", "always", "never"]
"""auto: once a function has been called often enough for recording it to pay."""
PATIENCE = 24
"""Calls before a function is recorded; recording takes about as long as 30 calls."""


def capturable(when: When, device: torch.device) -> bool:
    """Whether functions on that device are to be captured: TorchScript ends with Python 3.13, other devices have no recording."""
    if device.type == "cuda":
        return when == "always"
    return when != "never" and device.type == "cpu" and sys.version_info < (3, 14)


class Captured:
    """``function(held, *inputs)`` -> a nest of tensors; ``held`` and ``inputs`` are nests (see `flatten`).

    ``module``: whose linear layers it runs through; on a CPU they are recorded the way round that is faster (see `linear`) for as
    many rows as the first of the ``inputs`` has numbers.
    """

    def __init__(self, function: Callable[..., Any], when: When, module: nn.Module | None = None) -> None:
        self.function, self.patience = function, 0 if when == "always" else PATIENCE
        self.module, self.few = module, -1
        """``few``: the number of rows up to which linear layers are turned round; -1: not timed yet."""
        self.off = when == "never"
        self.calls = self.recorded = 0
        self.recordings: dict[Any, _Recording] = {}
        self.followed: dict[Any, _Recording] = {}
        """By nests and sizes that were met before."""
        self.disturbed = 0
        """Calls that recorded or compared, whose time says nothing of the next one's."""

    def __call__(self, held: Any, *inputs: Any) -> Any:
        self.calls += 1
        if self.off or self.calls <= self.patience:
            return self.function(held, *inputs)
        leaves: list[Tensor] = []
        shape = (flatten(held, leaves), first := len(leaves), flatten(inputs, leaves))
        shapes = tuple([leaf.shape for leaf in leaves])
        exactly = (shape, shapes, leaves[first].device)
        recording = self.followed.get(exactly)
        if recording is None:
            key = (shape, self._alike(shapes, leaves[first]), leaves[first].device)
            recording = self.recordings.get(key)
            if recording is None or not recording.follows(shapes):
                return self._anew(key, recording, leaves, held, inputs)
            self.followed[exactly] = recording
        try:
            return recording(leaves)
        except RuntimeError:   # it branches on values after all, as a mixture of experts may: not to be recorded
            self.off = True
            return self.function(held, *inputs)

    def _anew(self, key: Any, recording: _Recording | None, leaves: list[Tensor], held: Any, inputs: tuple) -> Any:
        """The result for sizes that no recording is known to follow: compare the one there is, or make one."""
        self.disturbed += 1
        if recording is not None and (expected := recording.compare(self.function, held, inputs, leaves)) is not None:
            return expected
        try:
            self.recordings[key] = recording = self._record(key[0], leaves)
        except (RuntimeError, AttributeError):   # something in it can't be recorded, or not by this torch
            self.off = True
            return self.function(held, *inputs)
        self.recorded += 1
        recording.compared([leaf.shape for leaf in leaves])
        return recording(leaves)

    def _alike(self, shapes: tuple[torch.Size, ...], first: Tensor) -> Any:
        """What calls of one recording have in common: on a CPU sizes of one, which broadcasting and copying branch on, and
        how linear layers are taken; elsewhere all sizes."""
        if first.device.type != "cpu":
            return shapes
        if self.few < 0:
            self.few = 0 if self.module is None else max_transposed_rows(self.module)
        return way(first.numel(), self.few), tuple(size == 1 for size in _sizes(shapes))

    def _record(self, shape: Any, leaves: list[Tensor]) -> _Recording:
        if leaves[0].device.type != "cpu":
            return _Graph(self.function, shape, leaves)
        return _Trace(self.function, shape, leaves, self.few)


class _Recording(ABC):
    """What was recorded. It ``follows`` sizes that lie between such as were compared."""

    def __init__(self) -> None:
        self.least: list[int] = []
        self.most: list[int] = []
        self.out: Any = None

    def follows(self, shapes: Sequence[torch.Size]) -> bool:
        return all(low <= size <= high for low, size, high in zip(self.least, _sizes(shapes), self.most, strict=True))

    def compared(self, shapes: Sequence[torch.Size]) -> None:
        """It gives the function's result for these."""
        sizes = _sizes(shapes)
        self.least, self.most = [*map(min, self.least or sizes, sizes)], [*map(max, self.most or sizes, sizes)]

    @abstractmethod
    def __call__(self, leaves: list[Tensor]) -> Any:
        """The function's result for tensors of shapes it follows."""

    def compare(self, function: Callable[..., Any], held: Any, inputs: tuple, leaves: list[Tensor]) -> Any:
        """The function's own result if the recording gives it too for these new shapes; else None."""
        expected = function(held, *inputs)
        try:
            found = flatten_tensors(self(leaves))
        except RuntimeError:   # a shape that was written down as a number
            return None
        if not all(_alike(one, other) for one, other in zip(found, flatten_tensors(expected), strict=True)):
            return None
        self.compared([leaf.shape for leaf in leaves])
        return expected


class _Trace(_Recording):
    """TorchScript, on a CPU; linear layers of at most ``few`` rows are turned round, and sizes are worked out beforehand."""

    def __init__(self, function: Callable[..., Any], shape: Any, leaves: list[Tensor], few: int) -> None:
        super().__init__()

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            held, inputs = _arguments(shape, tensors)
            found: list[Tensor] = []
            self.out = flatten(function(held, *inputs), found)
            return tuple(found)

        with warnings.catch_warnings(), TransposedLinear(few):
            warnings.simplefilter("ignore")   # of branches on shapes, which `compare` looks after
            self.traced = folded(torch.jit.trace(flat, tuple(leaves), check_trace=False))
        self.build = builder(self.out)

    def __call__(self, leaves: list[Tensor]) -> Any:
        # TorchScript's own optimisation costs half a second when a recording is first run, and makes it no faster.
        with torch.jit.optimized_execution(False):
            return self.build(iter(self.traced(*leaves)))


class _Graph(_Recording):
    """A CUDA graph: held tensors by their address, inputs copied in, results copied out."""

    def __init__(self, function: Callable[..., Any], shape: Any, leaves: list[Tensor]) -> None:
        super().__init__()
        _, held, _ = shape
        self.addresses = [leaf.data_ptr() for leaf in leaves[:held]]
        self.own = leaves[:held] + [leaf.clone() for leaf in leaves[held:]]
        self.held = held
        self.function, self.shape = function, shape
        self._record()

    def _record(self) -> None:
        held, inputs = _arguments(self.shape, self.own)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):   # libraries choose their kernels on first use, which a graph can't hold
                self.function(held, *inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        self.found: list[Tensor] = []
        with torch.cuda.graph(self.graph):
            self.out = flatten(self.function(held, *inputs), self.found)

    def __call__(self, leaves: list[Tensor]) -> Any:
        if [leaf.data_ptr() for leaf in leaves[: self.held]] != self.addresses:   # another text's cache
            self.__init__(self.function, self.shape, leaves)   # type: ignore[misc]
        for own, leaf in zip(self.own[self.held :], leaves[self.held :], strict=True):
            own.copy_(leaf)
        self.graph.replay()
        return builder(self.out)(iter([found.clone() for found in self.found]))


def _arguments(shape: Any, leaves: Sequence[Tensor]) -> tuple[Any, Any]:
    """``held`` and ``inputs``, of whose nests ``shape`` is what `flatten` left."""
    held, first, inputs = shape
    return builder(held)(iter(leaves[:first])), builder(inputs)(iter(leaves[first:]))


def _sizes(shapes: Sequence[torch.Size]) -> list[int]:
    return [size for shape in shapes for size in shape]


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.dtype.is_floating_point:
        return bool((one == other).float().mean() > 0.9) if one.numel() else True   # near-ties of a scoring may fall either way
    size = other.nan_to_num(0, 0, 0).abs().max().clamp(min=1e-6) if other.numel() else 1.0
    close = torch.finfo(one.dtype).eps ** 0.5
    return bool(((one - other).nan_to_num(0).abs() <= close * size).all())   # equal infinities differ by nan


def flatten(nest: Any, leaves: list[Tensor]) -> Any:
    """Put the tensors of a nest (tuples, lists, dicts, dataclasses, constants) into ``leaves``; what is left, hashable."""
    if isinstance(nest, Tensor):
        leaves.append(nest)
        return Tensor
    kind = type(nest)
    if kind in (tuple, list):
        return (kind, tuple([flatten(one, leaves) for one in nest]))
    if kind is dict:
        return (kind, tuple(nest), tuple([flatten(one, leaves) for one in nest.values()]))
    if (names := _fields(cast(Hashable, kind))) is not None:
        return (kind, tuple([flatten(getattr(nest, name), leaves) for name in names]))
    return (None, nest)


@functools.cache
def _fields(kind: Hashable) -> tuple[str, ...] | None:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


def builder(shape: Any) -> Callable[[Iterator[Tensor]], Any]:
    """The inverse of `flatten`, for nests of that shape."""
    if shape is Tensor:
        return next
    kind = shape[0]
    if kind is None:
        return lambda leaves: shape[1]
    parts = [builder(one) for one in shape[-1]]
    if kind is dict:
        return lambda leaves: dict(zip(shape[1], [part(leaves) for part in parts], strict=True))
    if kind in (tuple, list):
        return lambda leaves: kind([part(leaves) for part in parts])
    return lambda leaves: kind(*[part(leaves) for part in parts])


def flatten_tensors(nest: Any) -> list[Tensor]:
    """The tensors of a nest, in order."""
    leaves: list[Tensor] = []
    flatten(nest, leaves)
    return leaves
