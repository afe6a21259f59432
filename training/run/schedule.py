"""Learning rate schedules."""

from __future__ import annotations

import math

from headstart.training.recipe.recipe import Train


def learning_rate(step: int, steps: int, train: Train) -> float:
    """Return the learning rate of optimiser step ``step`` (from 1): linear warm-up, then the schedule down to ``min_lr_ratio * lr``."""
    warmup = round(train.warmup_ratio * steps)
    if step <= warmup:
        return train.lr * step / warmup
    if train.schedule == "constant":
        return train.lr
    falling = round(train.decay_ratio * steps) if train.schedule == "wsd" else steps - warmup
    done = max(step - 1 - (steps - falling), 0) / max(falling, 1)   # from 0, so that the last step's rate is above the minimum
    left = (1 + math.cos(math.pi * min(done, 1.0))) / 2 if train.schedule == "cosine" else 1 - done
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * max(left, 0.0))
