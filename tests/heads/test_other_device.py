"""Heads compute on the backbone's device alone: without a GPU, the backbone's tensors are on the meta device, which computes shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import DRAFTERS, backbone, tiny
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.methods import build_drafter

COPIES = ("copy_", "_to_copy", "slice_scatter")


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of several devices, as CUDA does; numbers and copies may come from anywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) > 1 and func._schema.name.removeprefix("aten::") not in COPIES:
            raise AssertionError(f"{func} on {', '.join(sorted(devices))}")
        return func(*args, **(kwargs or {}))


class Values(TorchFunctionMode):
    """Gives the values that are read from tensors, which the meta device does not have."""

    GIVEN: dict[Any, Callable[[Tensor], Any]] = {
        Tensor.item: lambda tensor: 1.0,
        Tensor.__bool__: lambda tensor: False,
        Tensor.tolist: lambda tensor: [0] * tensor.numel(),
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.GIVEN[func](*args) if func in self.GIVEN else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if kind != "draft_model"])  # a model of its own, loaded as backbones are
def test_heads_start_and_draft_there(kind: str) -> None:
    on = Backbone(tiny("shallow"))
    on.model.to("meta")
    with Values(), OneDevice(), torch.no_grad():
        drafter = build_drafter(kind, on, {})
        assert {weight.device.type for weight in drafter.state_dict().values()} == {"meta"}
        tokens_BT = torch.zeros(2, 9, dtype=torch.int64, device="meta")
        features = on.read(tokens_BT, taps=drafter.taps)
        if drafter.anchor_share == drafter.deeper_share == 1:
            drafter(features)
        state = drafter.begin(features, drafter.reserve(drafter.begin(features), 64))
        hidden, _ = drafter.step(state, tokens_BT[:, :1], tokens_BT[:, :1], 0)
        drafter.readout(hidden[:, :1], 0, tokens_BT[:, :1])


def test_what_mixes_devices_is_found() -> None:
    with OneDevice(), pytest.raises(AssertionError, match="add_.* on cpu, meta"):
        torch.zeros(2, device="meta").add_(torch.ones(2))
    assert backbone("shallow").device.type == "cpu", "the shared backbone stays where it is"
