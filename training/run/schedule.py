"""Schedules, as functions of the step: the learning rate, and the stages of joint training."""

from __future__ import annotations

import math

from headstart.training.recipe.recipe import Train
from headstart.training.recipe.sections import Lora


def learning_rate(step: int, steps: int, train: Train) -> float:
    """Return the learning rate of optimiser step ``step`` (from 1): linear warm-up, then the schedule down to ``min_lr_ratio * lr``."""
    warmup = round(train.warmup_ratio * steps)
    if step <= warmup:
        return train.peak_lr * step / warmup
    if train.schedule == "constant":
        return train.peak_lr
    falling = round(train.decay_ratio * steps) if train.schedule == "wsd" else steps - warmup
    done = max(step - 1 - (steps - falling), 0) / max(falling, 1)   # from 0, so that the last step's rate is above the minimum
    left = (1 + math.cos(math.pi * min(done, 1.0))) / 2 if train.schedule == "cosine" else 1 - done
    return train.peak_lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * max(left, 0.0))


def adapter_rise(step: int, steps: int, lora: Lora) -> float:
    """Return the factor of the adapter's learning rate and of the heads' loss at step ``step`` (from 1) of joint training.

    0 while the heads are trained alone, then a quarter sine wave up to 1 (Medusa-2, 2401.10774 section 2.2.2).
    """
    warmup, ramp = round(lora.warmup_ratio * steps), round(lora.ramp_ratio * steps)
    if step <= warmup:
        return 0.0
    return math.sin(math.pi / 2 * min((step - warmup) / (ramp + 1), 1.0))
