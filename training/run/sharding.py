"""FSDP2 through `accelerate` (``accelerate launch --use_fsdp --fsdp_version 2``), and helpers for tensors that may be sharded.

The drafter is one FSDP unit: its weights are gathered before a forward and its gradients are reduce-scattered after the backward.
Results equal those of data parallelism. Mixed precision is left to autocast, so nothing is reduced in less than fp32.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState, init_empty_weights
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import attention_kernel, auto_model, load_config
from headstart.heads.backbone.probes import decoder_layers
from headstart.support.errors import UserError
from headstart.training.recipe import sections

UNSUPPORTED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config (tensor, context or sequence parallelism)",
}
"""What `accelerate` makes of a configuration that training does not follow, by the variable that its launcher sets."""


def fsdp_plugin() -> FullyShardedDataParallelPlugin | None:
    """Return FSDP2 settings if the launcher requests FSDP, else None. Raises UserError for another way of running processes."""
    for variable, way in UNSUPPORTED.items():
        if parse_flag_from_env(variable):
            raise UserError(
                f"launched with {way} ({variable}); training is data-parallel (accelerate launch --multi_gpu) "
                "or sharded by FSDP2 (accelerate launch --use_fsdp --fsdp_version 2)"
            )
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise UserError(f"launched with FSDP version {version}; training supports version 2: accelerate launch --use_fsdp --fsdp_version 2")
    # Every process builds the drafter itself, so no weights are broadcast. It is one unit, since its layers are not called as modules.
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, mixed_precision_policy=MixedPrecisionPolicy(), auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False
    )


def require_known(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Raise UserError for processes that would each train alone. On CPUs, enable FSDP, which accelerate 1.15 ignores there."""
    if accelerator.num_processes == 1 and (started := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise UserError(
            f"{started} processes were started and found no accelerator, so each would train alone; start them on a machine that has one, "
            "or set ACCELERATE_USE_CPU=true to train on CPUs"
        )
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin


def empty_model(section: sections.Backbone) -> PreTrainedModel:
    """Build a recipe's backbone with parameters on the meta device, for `shard_layers` to fill; its files are not read.

    Buffers that no file holds, such as rotary frequencies, have their values.
    """
    config = load_config(section.path, trust_remote_code=section.trust_remote_code)
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = auto_model(config).from_config(
            config, attn_implementation=attention_kernel(section.attention), trust_remote_code=section.trust_remote_code
        )
    return model.eval()


def shard_layers(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Shard the decoder layers of a frozen model over the processes, on the device; each layer is gathered while it runs.

    The weights are those of the first process, which sends each tensor to the others; theirs may be on the meta device. The embedding and
    output layer are not sharded, since the objective uses them chunk by chunk. All processes must run the model together.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    weights = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False))
    for layer in decoder_layers(model, model.config.get_text_config().num_hidden_layers):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # each layer is an FSDP root, and roots stay gathered by default
    model.load_state_dict(_receive(model, weights, device), strict=False, assign=True)
    model.tie_weights()
    return model.to(device)


def _receive(model: PreTrainedModel, weights: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Send the first process's ``weights`` to all, one at a time: whole, or each process its shard. Tied tensors are sent once."""
    once = {tensor.data_ptr(): name for name, tensor in reversed(weights.items())}.values()
    listed: list[Any] = [[(name, weights[name].shape, weights[name].dtype) for name in weights if name in set(once)]]
    torch.distributed.broadcast_object_list(listed, device=device)
    first, places, parameters = torch.distributed.get_rank() == 0, model.state_dict(), dict(model.named_parameters())
    received: dict[str, Tensor] = {}
    for name, shape, dtype in listed[0]:
        tensor = weights[name].to(device) if first else torch.empty(shape, dtype=dtype, device=device)
        if isinstance(place := places[name], DTensor):
            tensor = distribute_tensor(tensor, place.device_mesh, place.placements)
        else:
            torch.distributed.broadcast(tensor, 0)
        received[name] = nn.Parameter(tensor, requires_grad=False) if name in parameters else tensor
    return received


def keep_gathered(module: nn.Module, keep: bool) -> None:
    """Keep weights gathered until the next forward, so that processes may have different numbers of micro-batches."""
    if isinstance(module, FSDPModule):
        module.set_reshard_after_backward(not keep)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor. A collective operation: all processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, which may be changed in place."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor that every process holds whole like another one of the same shape."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:  # AdamW's step counter is a scalar
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def gather_like(shard: Tensor, like: Tensor) -> Tensor:
    """Gather the tensor of which ``shard`` is this process's shard, sharded like ``like``."""
    if not isinstance(like, DTensor):
        return shard
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def is_sharded(backbone: Backbone) -> bool:
    """Return True if the backbone's layers are sharded over the processes."""
    return any(isinstance(layer, FSDPModule) for layer in backbone.layers)
