"""The arithmetic of a training step, and from it the duration on hardware that is not here.

The backbone's forward pass takes two operations per active weight of its layers and token. A drafter's forward and backward pass and the
objective run on fake tensors and are counted by torch's formulas for each operation, so by their own code: on a row of a few tokens,
scaled to all of them. Attention scores grow faster than that and are left out: about 5 % at 2,048 tokens of a model of 8 billion weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from headstart.heads.backbone.backbone import Backbone
from headstart.training.plan.memory import MemoryPlan, MicroBatch

UTILISATION = 0.4
"""Share of the peak that a step is assumed to reach: an estimate, not measured; large models are commonly trained at 0.35 to 0.55."""
SAMPLE = 128
"""Positions of the row whose operations are counted."""
ROUTED = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that configurations give to the number of experts; ``num_experts_per_tok`` says how many of them a token meets."""


class _Counter(TorchDispatchMode):
    """Counts floating-point operations. `FlopCounterMode` would count by module too, for which it cannot run `autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.paused = 0, False

    @contextmanager
    def pause_in(self, backbone: Backbone) -> Iterator[None]:
        """Count nothing while the backbone runs."""

        def pause(module: nn.Module, args: Any) -> None:
            self.paused = True

        def resume(module: nn.Module, args: Any, output: Any) -> None:
            self.paused = False

        handles = [backbone.base.register_forward_pre_hook(pause), backbone.base.register_forward_hook(resume)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None and not self.paused:
            self.operations += formula(*args, **kwargs, out_val=result)
        return result


def active_parameters(layers: nn.ModuleList, stated: Mapping[str, Any]) -> int:
    """Return how many weights of the layers a token meets: all, or of the experts as many as its router chooses.

    ``stated``: the fields of the configuration.
    """
    experts = next((stated[name] for name in ROUTED if stated.get(name)), None)
    named = [(name, weight.numel()) for layer in layers for name, weight in layer.named_parameters()]
    total = sum(count for _, count in named)
    if experts is None:
        return total
    routed = sum(count for name, count in named if ".experts." in f".{name}")
    return total - routed + routed * int(stated["num_experts_per_tok"]) // int(experts)


def step_operations(memory_plan: MemoryPlan, size: MicroBatch) -> dict[str, int]:
    """Return the floating-point operations of one forward and backward pass over a micro-batch: of the backbone's forward, and of the
    drafters, with which a trained backbone's backward is counted.
    """
    recipe, backbone = memory_plan.recipe, memory_plan.models.backbone
    sample = MicroBatch(1, min(SAMPLE, size.length), size.label_share)
    with _Counter() as counter, counter.pause_in(backbone):
        memory_plan.step(sample)
    lora = recipe.backbone.lora
    passes = 0 if recipe.cache.dir is not None or recipe.features.endpoint is not None else 2 if lora is not None and lora.kl_weight else 1
    tokens = size.rows * size.length
    return {
        "backbone": passes * 2 * active_parameters(backbone.layers, backbone.config.to_dict()) * tokens,
        "drafters": counter.operations * tokens // sample.length,
    }


def estimated_hours(operations: Mapping[str, int], micro_batches: float, steps: int, tflops: float) -> float:
    """Return the hours of ``steps`` steps in which each device computes this many micro-batches, at a peak of ``tflops`` each."""
    return sum(operations.values()) * micro_batches * steps / (tflops * 1e12 * UTILISATION) / 3600
