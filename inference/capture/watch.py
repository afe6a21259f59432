"""What captured passes of a model depend on: if it changes, they are made again.

Captures hold weights as they were, some in packed copies. In-place changes are counted by torch; those through ``.data`` are not, so a
sample of every weight is compared too. Hooks are run at the capture alone, and whether an adapter is active is decided there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.backbone.adapter import tuner_state

SAMPLED = 32
"""Values of a weight that are compared."""
RECORDING = "transformers.utils.output_capturing"
"""Where hooks are from that transformers leaves on a model whose hidden states were asked for; they do nothing otherwise."""
HOOKED = "forward hooks of your own are on the model, which a capture would not call"


def dependencies(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Return what captures of these modules depend on, but for changes through ``.data``."""
    weights = [(weight.data_ptr(), version(weight)) for module in modules for weight in module.parameters()]
    return (*weights, *(tuner_state(module) for module in modules), *hooks(modules))


def version(weight: Tensor) -> int:
    """How often the tensor was changed in place; changes through ``.data`` do not count."""
    return 0 if weight.is_inference() else weight._version


def hooks(modules: Iterable[nn.Module]) -> list[int]:
    """Return the numbers of the user's hooks on forward passes of these modules and of what is in them; none if there are none."""
    parts = (part for module in modules for part in module.modules())
    tables = (table for part in parts for table in (part._forward_hooks, part._forward_pre_hooks) if table)
    return [number for table in tables for number, hook in table.items() if getattr(hook, "__module__", "") != RECORDING]


def sample_of(modules: Sequence[nn.Module]) -> Tensor:
    """Return some values of every weight in fp32, one after the other."""
    weights = {id(weight): weight for module in modules for weight in module.parameters() if type(weight) is nn.Parameter}
    return torch.cat([weight.detach().flatten()[:: weight.numel() // SAMPLED + 1].float() for weight in weights.values() if weight.numel()])
