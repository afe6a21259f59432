"""Products of linear layers by oneDNN, which torch contains.

A row has the same bits among any number of rows from two to the 64 of a tree, with weights as they lie in memory and with packed ones
(headstart-cpu). `F.linear` in bf16 calls the same kernels. In fp32 it calls MKL, whose sums depend on the number of rows: hence the mode.
On CPUs with AMX, oneDNN adds up a single row of fewer than 64 inputs in another order, and more than 32 rows of more than about 600 inputs
(a batch of trees): one number in 10,000 then differs in its last bit. For such rows the order depends on the packing too.

Shape suffixes: R rows, N outputs, K inputs.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DTYPES = (torch.float32, torch.bfloat16)


def product(x: Tensor, weight: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``x W^T + b``: ``[..., K]`` -> ``[..., N]``. The weight ``[N, K]`` is packed, or as it lies in memory."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias_N, "none", [], "")


def pack(weight_NK: Tensor, rows: int) -> Tensor:
    """Bring a weight into the order of the kernel that is fastest for that number of rows; it works for any."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_NK, rows)


@functools.cache
def available(dtype: torch.dtype) -> bool:
    """True if this torch has right products of that dtype on this CPU, with packed weights too."""
    try:
        x_RK, weight_NK = torch.arange(6, dtype=dtype).view(2, 3), torch.arange(15, dtype=dtype).view(5, 3)
        products = [product(x_RK, weight) for weight in (weight_NK, pack(weight_NK, 2))]
    except (RuntimeError, AttributeError):  # the operator is not in this build of torch, or not for this processor
        return False
    return dtype in DTYPES and all(torch.equal(product, F.linear(x_RK, weight_NK)) for product in products)


class OneDNNProducts(TorchFunctionMode):
    """A mode in which linear layers in fp32 on a CPU are oneDNN's products; other functions and dtypes are left alone."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        if func is torch.addmm and len(args) == 3 and not kwargs and _fits(args[1], args[2]):  # transformers' Conv1D, of GPT-2
            return _linear(args[1], args[2].t(), args[0])
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _fits(input, weight):
        return F.linear(input, weight, bias)
    if input.numel() == input.shape[-1]:  # a single row is added up in another order
        return product(input.reshape(1, -1).expand(2, -1), weight, bias)[:1].view(*input.shape[:-1], -1)
    return product(input, weight, bias)


def _fits(x: Tensor, weight: Tensor) -> bool:
    plain = type(x) in (Tensor, nn.Parameter) and type(weight) in (Tensor, nn.Parameter) and not torch.is_autocast_enabled("cpu")
    return plain and x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu" and x.numel() > 0
