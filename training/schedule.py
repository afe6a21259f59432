"""How far to step: AdamW on the drafter's weights, and the learning rate as a function of the step alone."""

from __future__ import annotations

import math

import torch

from headstart.heads.base import Drafter
from headstart.training.recipe import Train


def learning_rate(step: int, steps: int, train: Train) -> float:
    """Of optimiser step ``step`` (from 1) of ``steps``: linear warm-up, then the recipe's schedule down to ``min_lr * lr``."""
    warmup = round(train.warmup * steps)
    if step <= warmup:
        return train.lr * step / warmup
    if train.schedule == "constant":
        return train.lr
    done = (step - 1 - warmup) / max(steps - warmup, 1)   # from 0; the last step still moves
    left = 1 - done if train.schedule == "linear" else (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return train.lr * (train.min_lr + (1 - train.min_lr) * max(left, 0.0))


def build_optimizer(drafter: Drafter, train: Train) -> torch.optim.AdamW:
    """Weight decay pulls on matrices only; norms and biases have a scale of their own to keep."""
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=train.lr, betas=(train.betas[0], train.betas[1]))
