"""Weights of linear layers in packed form, with which products of few rows are faster on a CPU.

A decoding step multiplies every weight with one row, or with as many rows as a tree has nodes. `F.linear` reads the weight as it lies in
memory, and its cost jumps with the first few rows; with a weight that was brought into the order of the kernel beforehand, 12 rows cost
little more than one. Two libraries that torch contains can do it: MKL (``cblas_sgemm_compute``, fp32) and oneDNN (fp32 and bf16). In bf16 a
row's sums are also the same alone and among others. In fp32 that depends on library, sizes and processor; `F.linear` does not give it.

A packed copy takes as much memory as the weight. The weight itself stays for the model's other callers. Captured passes do not read it: if
it is mapped from a file, as transformers loads it in its own dtype, the system can take its memory back.

Shape suffixes: R rows, N outputs, K inputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["mkl", "onednn"]
KINDS: dict[torch.dtype, tuple[Kind, ...]] = {torch.float32: ("mkl", "onednn"), torch.bfloat16: ("onednn",)}
"""Which library can multiply weights of a dtype."""
PACKED_FOR = 12
"""Rows that the order is chosen for; it works for any number."""


@dataclass(eq=False)
class PackedWeight:
    """One packed weight, of one linear layer or of several that read the same input."""

    packed: Tensor
    """Opaque: only the kernels of its kind can read it."""
    bias_N: Tensor | None
    sizes: tuple[int, ...]
    """The outputs of each layer."""
    inputs: int
    originals: tuple[Tensor, ...]
    """The layers' own weights and biases, kept so that their addresses, by which packed weights are found, are not used again."""


_SHARED: WeakValueDictionary[Any, PackedWeight] = WeakValueDictionary()
"""Packed weights in use, by what they were made from: all captures of a model share them."""


def pack(weights: Sequence[Tensor], biases: Sequence[Tensor | None], kind: Kind) -> PackedWeight:
    """Pack the weights ``[N, K]`` of layers that read the same input; their outputs are concatenated."""
    originals = (*weights, *(bias for bias in biases if bias is not None))
    key = (kind, *((one.data_ptr(), tuple(one.shape), version(one)) for one in originals), *(bias is None for bias in biases))
    found = _SHARED.get(key)
    if found is None:
        weight_NK = torch.cat([weight.detach() for weight in weights]) if len(weights) > 1 else weights[0].detach()
        parts = [weight.new_zeros(len(weight)) if bias is None else bias.detach() for weight, bias in zip(weights, biases, strict=True)]
        bias_N = None if all(bias is None for bias in biases) else torch.cat(parts)
        sizes = tuple(len(weight) for weight in weights)
        found = PackedWeight(_packed(weight_NK.contiguous(), kind), bias_N, sizes, weight_NK.shape[1], originals)
        _SHARED[key] = found
    return found


def multiply(x: Tensor, weight: PackedWeight, kind: Kind) -> Tensor:
    """``x W^T + b``: ``[..., K]`` -> ``[..., N]``, as captured passes compute it."""
    if kind == "onednn":
        return torch.ops.mkldnn._linear_pointwise(x, weight.packed, weight.bias_N, "none", [], "")
    shape = torch.zeros(1).expand(sum(weight.sizes), weight.inputs)
    return torch.ops.mkl._mkl_linear(x, weight.packed, shape, weight.bias_N, math.prod(x.shape[:-1]))


@functools.cache
def available(dtype: torch.dtype) -> tuple[Kind, ...]:
    """The kinds that this torch has for weights of that dtype on this CPU."""
    return tuple(kind for kind in KINDS.get(dtype, ()) if _works(kind, dtype))


def _works(kind: Kind, dtype: torch.dtype) -> bool:
    """True if a product with a packed weight is right."""
    try:
        x_RK, weight_NK = torch.arange(6, dtype=dtype).view(2, 3), torch.arange(15, dtype=dtype).view(5, 3)
        product = multiply(x_RK, pack([weight_NK], [None], kind), kind)
    except (RuntimeError, AttributeError):   # the operator is not in this build of torch, or not for this processor
        return False
    return torch.equal(product, F.linear(x_RK, weight_NK))


def _packed(weight_NK: Tensor, kind: Kind) -> Tensor:
    if kind == "onednn":
        return torch.ops.mkldnn._reorder_linear_weight(weight_NK, PACKED_FOR)
    return torch.ops.mkl._mkl_reorder_linear_weight(weight_NK, PACKED_FOR)


def version(weight: Tensor) -> int:
    """How often the tensor was changed in place; changes through ``.data`` do not count."""
    return 0 if weight.is_inference() else weight._version
