"""Weights in the order of the kernels, side by side in memory of huge pages, shared by all programs of a model.

They are a second copy of the model's linear layers; where these were dequantized from blocks of 4 bits (GGUF's Q4_0, Q4_1 and Q4_K), codes
of them, in three eighths of the memory. Read in pages of 4 KB a pass takes half as long again (LOG.md).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import psutil
import torch
from torch import Tensor

from headstart.inference.capture.capture import version
from headstart.support.text import gigabytes
from headstart_cpu.program import Packed, whole_blocks

MEMORY_SHARE = 1 / 3
"""The copy takes at most this share of the memory that is free."""
HUGE = 2 << 20
ALIGNED = 64
MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)


_SHARED: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()
"""Packed weights in use, by what they were made of: all programs of a model share them."""


class NoMemory(Exception):
    """There is no room for packed weights; the message says how much they take."""


class Weights:
    """The packed weights of a model, made as they are needed."""

    def __init__(self) -> None:
        self._of: dict[Any, Tensor] = {}

    def add(self, packed: Iterable[Packed], held: Mapping[str, Tensor]) -> None:
        """Make what is not in memory yet, in memory of huge pages; ``held``: weights by their names. Raises NoMemory."""
        new = self._new(packed, held)
        weights = {one: [held[str(name)].t() if one.transposed else held[str(name)] for name in one.names] for one in new if not one.bias}
        coded = {one: _codes(layers) for one, layers in weights.items()}
        sizes = [_size(coded[one] or layers) for one, layers in weights.items()]
        needed, free = sum(count * dtype.itemsize for count, dtype in sizes), psutil.virtual_memory().available
        if needed > MEMORY_SHARE * free:
            raise NoMemory(f"the packed weights take {gigabytes(needed)}, more than a third of the {gigabytes(free)} of free memory")
        for (one, layers), place in zip(weights.items(), side_by_side(sizes), strict=True):
            self._of[_key(one, held)] = torch.cat(coded[one], out=place) if coded[one] else _pack(layers, place)
        self._of |= {_key(one, held): _biases(one, held) for one in new if one.bias}
        _SHARED.update({_key(one, held): self._of[_key(one, held)] for one in new})

    def of(self, packed: Mapping[str, Packed], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of packed weights, which were added, by their names."""
        return {name: self._of[_key(one, held)] for name, one in packed.items()}

    def _new(self, packed: Iterable[Packed], held: Mapping[str, Tensor]) -> list[Packed]:
        for one in packed:
            if (shared := _SHARED.get(key := _key(one, held))) is not None:
                self._of[key] = shared
        return [one for one in dict.fromkeys(packed) if _key(one, held) not in self._of]


def _key(packed: Packed, held: Mapping[str, Tensor]) -> Any:
    """Programs name weights differently; addresses do not change while they are in use, and changes in place are counted."""
    made_of = tuple(None if name is None else (held[name].data_ptr(), version(held[name])) for name in packed.names)
    return packed.outputs, packed.transposed, packed.bias, made_of


def _codes(layers: Sequence[Tensor]) -> list[Tensor]:
    """The codes of weights dequantized from blocks of 4 bits, of which products make the same numbers; empty if one is no such weight."""
    found: list[Tensor] = []
    for layer in layers:
        if layer.dtype != torch.bfloat16 or not len(codes := torch.ops.headstart_cpu.encoded(layer)):
            return []
        found.append(codes)
    return found


def _size(parts: Sequence[Tensor]) -> tuple[int, torch.dtype]:
    """Elements and dtype of the weights of layers, packed, or of their codes."""
    return sum(len(part) if part.ndim == 1 else whole_blocks(len(part)) * part.shape[1] for part in parts), parts[0].dtype


def _pack(layers: Sequence[Tensor], place: Tensor) -> Tensor:
    """Write the weights of layers in the order of the kernels, one after the other."""
    at = 0
    for layer in layers:
        torch.ops.headstart_cpu.pack(layer, place, at)
        at += whole_blocks(len(layer))
    return place


def _biases(weight: Packed, held: Mapping[str, Tensor]) -> Tensor:
    """The biases of some layers, one after the other as their outputs are; zeros where there are none."""
    whole = torch.zeros(sum(map(whole_blocks, weight.outputs)))
    at = 0
    for name, outputs in zip(weight.names, weight.outputs, strict=True):
        if name is not None:
            whole[at : at + outputs] = held[name]
        at += whole_blocks(outputs)
    return whole


def side_by_side(parts: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Tensors of these numbers of elements, zeros, side by side in huge pages where the system has them."""
    places, end = [], 0
    for count, dtype in parts:
        places.append(end)
        end += -(-count * dtype.itemsize // ALIGNED) * ALIGNED
    raw = torch.empty(end + 2 * HUGE, dtype=torch.uint8)
    skip = -raw.data_ptr() % HUGE
    if hasattr(ctypes.CDLL(None), "madvise"):
        start, size = ctypes.c_void_p(raw.data_ptr() + skip), ctypes.c_size_t(-(-end // HUGE) * HUGE)
        ctypes.CDLL(None).madvise(start, size, MADV_HUGEPAGE)  # a hint: without it all works, more slowly
    raw[skip : skip + end].zero_()
    return [raw[skip + at : skip + at + count * dtype.itemsize].view(dtype) for at, (count, dtype) in zip(places, parts, strict=True)]
