"""Weights of linear layers in packed form, with which products of few rows are faster on a CPU.

A decoding step multiplies every weight with one row, or with as many rows as a tree has nodes. `F.linear` reads the weight as it lies in
memory, and its cost jumps with the first few rows; with a weight that was brought into the order of the kernel beforehand, 12 rows cost
little more than one.

A packed copy takes as much memory as the weight. The weight itself stays for the model's other callers. Captured passes do not read it: if
it is mapped from a file, as transformers loads it in its own dtype, the system can take its memory back.

Shape suffixes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import psutil
import torch
from torch import Tensor, nn

from headstart.inference.capture import onednn
from headstart.inference.capture.capture import version

PACKED_FOR = 12
"""Rows that the order is chosen for; it works for any number."""
MEMORY_SHARE = 0.25
"""Weights are packed if they take at most this share of the machine's memory."""


@dataclass(eq=False)
class PackedWeight:
    """One packed weight, of one linear layer or of several that read the same input."""

    packed: Tensor
    """Opaque: only oneDNN's kernels can read it."""
    bias_N: Tensor | None
    sizes: tuple[int, ...]
    """The outputs of each layer."""
    originals: tuple[Tensor, ...]
    """The layers' own weights and biases, kept so that their addresses, by which packed weights are found, are not used again."""


_SHARED: WeakValueDictionary[Any, PackedWeight] = WeakValueDictionary()
"""Packed weights in use, by what they were made from: all captures of a model share them."""


def pack(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> PackedWeight:
    """Pack the weights ``[N, K]`` of layers that read the same input; their outputs are concatenated."""
    originals = (*weights, *(bias for bias in biases if bias is not None))
    layouts = ((one.data_ptr(), tuple(one.shape), one.stride(), version(one)) for one in originals)
    key = (*layouts, *(bias is None for bias in biases))
    found = _SHARED.get(key)
    if found is None:
        weight_NK = torch.cat([weight.detach() for weight in weights]) if len(weights) > 1 else weights[0].detach()
        parts = [weight.new_zeros(len(weight)) if bias is None else bias.detach() for weight, bias in zip(weights, biases, strict=True)]
        bias_N = None if all(bias is None for bias in biases) else torch.cat(parts)
        found = PackedWeight(onednn.pack(weight_NK.contiguous(), PACKED_FOR), bias_N, tuple(map(len, weights)), originals)
        _SHARED[key] = found
    return found


def multiply(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x W^T + b``: ``[..., K]`` -> ``[..., N]``, as captured passes compute it."""
    return onednn.product(x, weight.packed, weight.bias_N)


def fits_in_memory(module: nn.Module | None) -> bool:
    """True if the packed weights of the module's linear layers take at most `MEMORY_SHARE` of the machine's memory."""
    layers = [] if module is None else [one for one in module.modules() if isinstance(one, nn.Linear)]
    return sum(one.weight.nbytes for one in layers) <= MEMORY_SHARE * psutil.virtual_memory().total
