"""Notes what a function writes into, so that running it once more, as recording does, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Writes(TorchDispatchMode):
    """While it is active, the tensors that are about to be written into are copied; `undo` brings the copies back.

    A head of two layers with a sliding window attends to slots that it then overwrites: run twice, it would read other keys.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._of: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            self._of.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self._before: dict[int, list[Tensor]] = {}
        """Copies of the tensors of each storage that was written into."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                address = value.untyped_storage().data_ptr()
                if address in self._of and address not in self._before:
                    self._before[address] = [tensor.clone() for tensor in self._of[address]]
        return func(*args, **(kwargs or {}))

    def into(self, tensor: Tensor) -> bool:
        """True if the tensor's storage was written into."""
        return tensor.untyped_storage().data_ptr() in self._before

    def undo(self) -> None:
        """Give the tensors that were written into the values they had before."""
        for address, copies in self._before.items():
            for tensor, copy in zip(self._of[address], copies, strict=True):
                tensor.copy_(copy)
