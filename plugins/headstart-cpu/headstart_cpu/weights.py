"""Weights in the order of the kernels, side by side in memory of huge pages, shared by all programs of a model.

They are a second copy of the model's linear layers; where these were dequantized from GGUF's blocks, codes of 4 or 8 bits, in three or five
eighths of the memory (codes.h). Read in pages of 4 KB a pass takes half as long again (LOG.md).
"""

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from operator import itemgetter
from typing import Any
from weakref import WeakValueDictionary

import psutil
import torch
from torch import Tensor

from headstart.inference.capture.capture import version
from headstart.support.text import gigabytes
from headstart_cpu.program import NotCompiled, Packed, whole_blocks

MEMORY_SHARE = 1 / 3
"""The copy takes at most this share of the memory that is free."""
HUGE = 2 << 20
ALIGNED = 64

_SHARED: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()
"""Packed weights in use, by what they were made of: all programs of a model share them."""


def packed_weights(packed: Mapping[str, Packed], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of packed weights, by their names; ``held``: what they are made of. Raises NotCompiled if there is no room for them."""
    keys = {name: _key(one, held) for name, one in packed.items()}
    found = {key: tensor for key in keys.values() if (tensor := _SHARED.get(key)) is not None}
    new = {keys[name]: one for name, one in packed.items() if keys[name] not in found}
    parts = {key: _parts(one, held) for key, one in new.items() if not one.bias}
    sizes = list(map(_size, parts.values()))
    needed, free = sum(count * dtype.itemsize for count, dtype in sizes), psutil.virtual_memory().available
    if needed > MEMORY_SHARE * free:
        raise NotCompiled(f"the packed weights take {gigabytes(needed)}, more than a third of the {gigabytes(free)} of free memory")
    for (key, made_of), place in zip(parts.items(), side_by_side(sizes), strict=True):
        found[key] = torch.cat(made_of, out=place) if made_of[0].ndim == 1 else _pack(made_of, place)
    found |= {key: _biases(one, held) for key, one in new.items() if one.bias}
    _SHARED.update(found)
    return {name: found[key] for name, key in keys.items()}


def _key(packed: Packed, held: Mapping[str, Tensor]) -> Any:
    """Programs name weights differently; addresses do not change while they are in use, and changes in place are counted."""
    made_of = tuple(None if name is None else (held[name].data_ptr(), version(held[name])) for name in packed.names)
    return packed.outputs, packed.transposed, packed.bias, made_of


def _parts(packed: Packed, held: Mapping[str, Tensor]) -> list[Tensor]:
    """The weights of layers, ``[N, K]``, or their codes if all have some, behind the place and kind of every block."""
    layers = [held[str(name)].t() if packed.transposed else held[str(name)] for name in packed.names]
    encoded = [*takewhile(itemgetter(1), map(torch.ops.headstart_cpu.encoded, layers))]
    if len(encoded) < len(layers):
        short = [layer.bfloat16() for layer in layers]
        return short if all(map(torch.equal, (layer.float() for layer in short), layers)) else layers
    sizes = torch.tensor([0] + [codes.shape[1] for codes, _ in encoded for _ in codes])
    kinds = torch.tensor([kind for codes, kind in encoded for _ in codes])
    start = -(-len(kinds) * kinds.itemsize // ALIGNED) * ALIGNED
    header = torch.zeros(start, dtype=torch.uint8)
    header[: kinds.nbytes] = (8 * (start + sizes.cumsum(0)[:-1]) + kinds).view(torch.uint8)
    return [header, *(codes.flatten() for codes, _ in encoded)]


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
    memory = mmap.mmap(-1, end + 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a hint: without it all works, more slowly
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -raw.data_ptr() % HUGE
    return [raw[skip + at : skip + at + count * dtype.itemsize].view(dtype) for at, (count, dtype) in zip(places, parts, strict=True)]
