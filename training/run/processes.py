"""The processes of a run: who goes first, who owns the folder, when to stop, who is gone, and how weights are sharded over them.

FSDP2 is used through `accelerate` (``accelerate launch --use_fsdp --fsdp_version 2``). The drafter is one FSDP unit: its weights are
gathered before a forward and its gradients are reduce-scattered after the backward. Results equal those of data parallelism. Mixed
precision is left to autocast, so nothing is reduced in less than fp32.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState, init_empty_weights
from accelerate.utils import gather_object, parse_flag_from_env
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import attention_kernel, auto_model, load_config
from headstart.heads.backbone.probes import decoder_layers
from headstart.support.errors import UserError, cause
from headstart.support.files import locked
from headstart.training.recipe import sections

T = TypeVar("T")
LOCK = "run.lock"
"""File in ``save.dir``; it stays there, and means nothing unless a process holds it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOST = re.compile(r"connection (closed|reset|refused|was likely closed)|broken pipe|gloo/transport|NCCL|timed? ?out|recvValue failed", re.I)
"""In messages of collective operations, which raise plain RuntimeErrors for most faults of a connection."""
_kept: list[ProcessGroup | None] = []
UNSUPPORTED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config (tensor, context or sequence parallelism)",
}
"""What `accelerate` makes of a configuration that training does not follow, by the variable that its launcher sets."""


def in_first_process(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, in every process; the first one of each machine does it while the others wait.

    If it fails there, it fails everywhere, and no process waits for one that has ended: UserError says why in the others.
    """
    result: list[T] = []
    failed: Exception | None = None
    if accelerator.is_local_main_process:
        try:
            result.append(work())
        except Exception as error:
            failed = error
    said = gather_object([None if failed is None else cause(failed)]) if accelerator.num_processes > 1 else []
    if failed is not None:
        raise failed
    if (first := next(filter(None, said), None)) is not None:
        raise UserError(first)
    return result[0] if result else work()


@contextmanager
def sole_run(save_dir: str) -> Iterator[None]:
    """Hold the folder's lock until this process ends, by a kill too. Raises UserError if another run has it, or it cannot be written."""
    folder = Path(save_dir)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"save.dir={save_dir} cannot be made ({error.strerror}); choose a folder that you may write to") from None
    with locked(folder / LOCK, "save.dir") as mine:
        if not mine:
            raise UserError(f"another run is writing to save.dir={save_dir}; let it end or stop it, or choose another save.dir")
        try:
            yield
        finally:
            if made and [path.name for path in folder.iterdir()] == [LOCK]:  # refused before anything was written
                with suppress(OSError):
                    (folder / LOCK).unlink()
                    for place in made:
                        place.rmdir()


class StopSignal:
    """Context in which the first signal is only recorded."""

    def __init__(self) -> None:
        self.number = int(signal.SIGTERM)
        """The received signal; SIGTERM if only another process received one."""
        self.received = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            self._before = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.number, self.received = number, True
        self._restore()

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def any_of(accelerator: Accelerator, flag: bool, group: ProcessGroup | None = None) -> bool:
    """Return True if the flag is set in any process, after all have called this. ``group``: one of CPUs; None: the run's own."""
    if accelerator.num_processes == 1:
        return flag
    flags = torch.tensor(float(flag), device=accelerator.device if group is None else "cpu")
    torch.distributed.all_reduce(flags, group=group)
    return bool(flags.item())


def keep_group() -> None:
    """Keep the process group until the process ends; to be called before it is destroyed.

    Else the last one to let go of it is DDP's reducer. That one joins gloo's threads with Python's lock in hand, and waits for ever if one
    of them waits for the lock, as it does to let go of the tensors of its last collective.
    """
    if torch.distributed.is_initialized():
        _kept.append(torch.distributed.group.WORLD)


def lost_process(error: RuntimeError, save_dir: str) -> UserError | None:
    """Return what to report if a collective operation failed because another process is gone; None for any other error."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or not (isinstance(error, torch.distributed.DistError) or LOST.search(str(error))):
        return None
    cause = re.sub(r"^\[[^\]]*\] ", "", str(error).strip()).split("\n")[0].split(". ")[0][:200]  # without the place in gloo's source
    fault = f"another process of this run has ended or does not answer ({cause}); its own message says why"
    return UserError(f"{fault}. The same command goes on from what was last saved in {save_dir}")


def fsdp_plugin() -> FullyShardedDataParallelPlugin | None:
    """Return FSDP2 settings if the launcher requests FSDP, else None. Raises UserError for another way of running processes."""
    for variable, way in UNSUPPORTED.items():
        if parse_flag_from_env(variable):
            sharded = "sharded by FSDP2 (accelerate launch --use_fsdp --fsdp_version 2)"
            raise UserError(f"launched with {way} ({variable}); training is data-parallel (accelerate launch --multi_gpu) or {sharded}")
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
        fault = f"{started} processes were started and found no accelerator, so each would train alone"
        raise UserError(f"{fault}; start them on a machine that has one, or set ACCELERATE_USE_CPU=true to train on CPUs")
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin


def empty_model(section: sections.Backbone) -> PreTrainedModel:
    """Build a recipe's backbone with parameters on the meta device, for `shard_layers` to fill; buffers that no file holds have values."""
    config = load_config(section.path, trust_remote_code=section.trust_remote_code)
    with init_empty_weights(include_buffers=False), no_init_weights():
        kernel = attention_kernel(section.attention)
        model = auto_model(config).from_config(config, attn_implementation=kernel, trust_remote_code=section.trust_remote_code)
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
    whole = DTensor.from_local(shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
    return whole.full_tensor()


def is_sharded(backbone: Backbone) -> bool:
    """Return True if the backbone's layers are sharded over the processes."""
    return any(isinstance(layer, FSDPModule) for layer in backbone.layers)
