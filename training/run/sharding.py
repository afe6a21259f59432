"""FSDP2: every process keeps a part of each weight. What `accelerate` makes of it, and the few places where a whole is wanted.

``accelerate launch --use_fsdp --fsdp_version 2`` asks for it. The drafter is one unit: its weights are gathered before a forward,
their gradients are divided afterwards, and numbers are those of data parallelism. Precision is autocast's, as everywhere, so
nothing is reduced in less than fp32.
"""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from headstart.heads.backbone.backbone import Backbone, decoder_layers
from headstart.support.errors import UserError

OTHERS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Ways of sharding that training does not know."""


def fsdp_plugin() -> FullyShardedDataParallelPlugin | None:
    """What the launcher asks for; None: nothing. Raises UserError for the first version of FSDP."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise UserError(f"launched with FSDP version {version}; training knows version 2: accelerate launch --use_fsdp --fsdp_version 2")
    # Every process builds the drafter itself, so none is to be sent its weights; layers are not called as modules, so one unit.
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, mixed_precision_policy=MixedPrecisionPolicy(), auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False
    )


def require_known(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Raise UserError for a way of running that training does not know. On CPUs, take up FSDP, which accelerate 1.15 passes over."""
    if accelerator.distributed_type in OTHERS:
        raise UserError(
            f"launched as {accelerator.distributed_type.value}; training is data-parallel (accelerate launch --multi_gpu) "
            "or sharded by FSDP2 (accelerate launch --use_fsdp --fsdp_version 2)"
        )
    if accelerator.num_processes == 1 and (started := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise UserError(
            f"{started} processes were started and found no accelerator, so each would train alone; start them on a machine that has one, "
            "or set ACCELERATE_USE_CPU=true to train on CPUs"
        )
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin


def shard_layers(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A frozen model on that device, of whose decoder layers every process keeps a part; a layer is gathered while it runs.

    Embedding and readout stay whole: the objective multiplies by them chunk by chunk. All processes have to run it alike.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    model.requires_grad_(False)
    for layer in decoder_layers(model.base_model, model.config.get_text_config().num_hidden_layers):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)   # each is a root of its own, and roots stay gathered unless told
    return model.to(device)


def is_sharded(backbone: Backbone) -> bool:
    """Whether every process has but a part of its layers."""
    return any(isinstance(layer, FSDPModule) for layer in backbone.layers)


def keep_whole(module: nn.Module, kept: bool) -> None:
    """Whether weights that were gathered for a forward stay until the next: then processes may differ in their number of micro-batches."""
    if isinstance(module, FSDPModule):
        module.set_reshard_after_backward(not kept)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be shared out; then all processes have to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """This process's part of it, to be changed in place."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every process has whole, shared out as another one of its shape is."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:   # AdamW counts its steps in a number of its own
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def joined(part: Tensor, like: Tensor) -> Tensor:
    """The whole of which ``part`` is this process's, shared out as ``like``."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def all_finite(tensors: dict[str, Tensor], prefix: str) -> bool:
    """Whether the floating-point tensors whose names begin so are finite."""
    found = [tensor for name, tensor in tensors.items() if name.startswith(prefix) and tensor.is_floating_point()]
    return all(bool(torch.isfinite(tensor).all()) for tensor in found)
