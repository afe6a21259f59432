"""Build the drafter of a reading; every tensor has to be there, in its shape, and none besides."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.heads.methods import construct_drafter, require_weights
from headstart.inference.serving.imports.reading import DERIVED, Reading
from headstart.support.errors import UserError


def build(reading: Reading, backbone: Backbone, path: str) -> Drafter:
    """Return the drafter with the reading's weights, in fp32. Raises UserError naming the first tensor that does not fit."""
    drafter = construct_drafter(reading.kind, backbone, reading.arguments)
    expected = drafter.tensors()
    found = {name: tensor for name, tensor in reading.tensors.items() if not name.endswith(DERIVED)}
    for name, tensor in expected.items():
        theirs = reading.names.get(name, name)
        called = theirs if theirs == name else f"{theirs} ({name} here)"
        if name not in found:
            raise UserError(f"{path} lacks the tensor {called} {list(tensor.shape)} of {reading.kind} heads{_near(found, expected)}")
        if found[name].shape != tensor.shape:
            raise UserError(
                f"{path}: tensor {called} is {list(found[name].shape)}; with this config.json and backbone it is {list(tensor.shape)}"
            )
    for name, tensor in found.items():
        if name not in expected:
            theirs = reading.names.get(name, name)
            raise UserError(f"{path} has a tensor {theirs} {list(tensor.shape)}, which {reading.kind} heads of its config.json do not have")
    drafter.load_tensors(found)
    require_weights(drafter, path)
    return drafter.eval().requires_grad_(False)


def _near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """Name a tensor that is there instead of a missing one."""
    odd = next((name for name in found if name not in expected), None)
    return "" if odd is None else f"; it has {odd} {list(found[odd].shape)}, which they do not have"


def stored_dtype(reading: Reading) -> torch.dtype:
    """Return the widest floating-point dtype of the reading's tensors."""
    dtypes = {tensor.dtype for tensor in reading.tensors.values() if tensor.is_floating_point()}
    widest = torch.float16 if dtypes == {torch.float16} else torch.bfloat16
    for dtype in dtypes:
        widest = dtype if dtypes == {dtype} else torch.promote_types(widest, dtype)
    return widest
