"""A quantized linear layer that decides over all rows of a pass: a column that is large in one leaves low precision in all of them."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LARGE, STEPS = 2.0, 7
"""From where on a value is large, and the steps on each side of zero that the others are rounded to."""


class Columns(nn.Linear):
    """As LLM.int8 (2208.07339) on a CPU and a GPU, in fewer steps, so that texts change within a few tokens."""

    together = True
    """False: a column leaves in the rows alone in which it is large."""

    def forward(self, x: Tensor) -> Tensor:
        large = x.abs() >= LARGE
        leaves = large.flatten(0, -2).any(0) if self.together else large
        scale = x.masked_fill(large, 0).abs().amax(-1, keepdim=True).clamp(min=1e-9) / STEPS
        return super().forward(torch.where(leaves, x, (x / scale).round() * scale))


class Apart(Columns):
    together = False


def replaced(model: PreTrainedModel, kind: type[Columns]) -> PreTrainedModel:
    """The model with this kind of layer in place of those of its decoder layers."""
    for layer in model.base_model.layers:
        for module in layer.modules():
            if type(module) is nn.Linear:
                module.__class__ = kind
    return model
