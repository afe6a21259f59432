"""Memory at fixed addresses for tensors that a captured function reads from and writes to, as CUDA graphs need it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class FixedMemory:
    """Places tensors in memory of its own: the tensor of one number starts at one address at every call, whatever its shape.

    The address changes only when a tensor is larger than any of its number before.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[int, torch.dtype], Tensor] = {}

    def place(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in this memory: themselves if they are there already, else copies."""
        own = {memory.untyped_storage().data_ptr() for memory in self._memory.values()}
        homes = [self._home(number, tensor) for number, tensor in enumerate(tensors)]
        moved = [number for number, (tensor, home) in enumerate(zip(tensors, homes, strict=True)) if not is_same_memory(tensor, home)]
        # What lies elsewhere in this memory is copied aside first, since its place may be overwritten.
        aside = {i: tensors[i].clone() if tensors[i].untyped_storage().data_ptr() in own else tensors[i] for i in moved}
        return [home.copy_(aside[i]) if i in aside else tensors[i] for i, home in enumerate(homes)]

    def _home(self, number: int, tensor: Tensor) -> Tensor:
        memory = self._memory.get((number, tensor.dtype))
        if memory is None or len(memory) < tensor.numel():
            memory = self._memory[number, tensor.dtype] = tensor.new_empty(tensor.numel())
        return memory[: tensor.numel()].view(tensor.shape)


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of one dtype are the same elements in memory."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


class Writes(TorchDispatchMode):
    """Notes which storages operations write into while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self.storages.add(value.untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))

    def into(self, tensor: Tensor) -> bool:
        """True if the tensor's storage was written into."""
        return tensor.untyped_storage().data_ptr() in self.storages
