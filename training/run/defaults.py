"""What ``auto`` stands for in a recipe: values that depend on the drafter, the steps and the length of the run.

The rule was fitted to sweeps over backbones of width 64 to 384, in runs of 59 to 6,000 steps (docs/defaults.md).
Wider drafters and longer runs follow the same exponents, which is an extrapolation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from accelerate.utils import is_bf16_available

from headstart.heads.base import Drafter
from headstart.training.recipe.recipe import Recipe, Train, split_drafter

WIDTH, STEP_TOKENS, STEPS = 128, 512, 300
"""The size of run at which the learning rate is `PEAK`."""
LONG = 1000
"""Steps from which on the rate falls more slowly."""
PEAK = {"muon": 1e-2, "adamw": 5e-3}
WIDTH_EXPONENT, TOKENS_EXPONENT, STEPS_EXPONENT, LONG_EXPONENT = -1.0, 0.25, -0.5, -0.25
HIGHEST = 3e-2
FEW_STEPS, ENOUGH_STEPS = 300, 600
"""A run of fewer steps than the first learns much more from the same text in as many as the second (measured with EAGLE-3)."""
ADAPTED = 0.3
"""Factor of the learning rate where training goes on from weights that were trained before."""
AUTO = "auto"


@dataclass(frozen=True)
class Chosen:
    """Values in place of ``auto`` by dotted key, and what they follow from. Saved with a run, so that resuming it keeps them."""

    values: dict[str, float | str]
    reason: str

    def __str__(self) -> str:
        return f"{', '.join(f'{key}={value}' for key, value in self.values.items())} (auto: {self.reason})"

    def put_into(self, recipe: Recipe) -> Recipe:
        """Return the recipe with these values."""
        values = {key.removeprefix("train."): value for key, value in self.values.items()}
        return recipe.model_copy(update={"train": recipe.train.model_copy(update=values)})


def choose(recipe: Recipe, drafter: Drafter, step_tokens: float, steps: int) -> Chosen:
    """Choose what a drafter's recipe leaves to ``auto``; nothing if it names all values.

    ``step_tokens``: mean number of tokens of an optimizer step, padding excluded; ``steps``: optimizer steps of the run.
    """
    values: dict[str, float | str] = {}
    adapted = drafter.pretrained or split_drafter(recipe.drafter)[0].init is not None
    reason = f"width {drafter.width:,}, {steps:,} steps of about {step_tokens:,.0f} tokens"
    if recipe.train.lr == AUTO:
        optimizer = recipe.train.chosen_optimizer
        values = {"train.optimizer": optimizer, "train.lr": learning_rate(optimizer, drafter.width, step_tokens, steps, adapted)}
        reason += ", weights that were trained before" if adapted else ""
    ratio = drafter.readout_lr_ratio if recipe.train.chosen_optimizer == "muon" and not drafter.frozen() else 1.0
    if recipe.train.readout_lr_ratio == AUTO and ratio != 1.0:
        values["train.readout_lr_ratio"] = ratio
    return Chosen(values, reason)


def autocast_name(precision: str, backbone: torch.dtype) -> str:
    """Return ``train.precision`` with ``auto`` resolved; ``backbone``: the dtype that the backbone is loaded in."""
    if precision != AUTO:
        return precision
    return "bf16" if backbone in (torch.bfloat16, torch.float16) and is_bf16_available() else "no"


def learning_rate(optimizer: str, width: int, step_tokens: float, steps: int, adapted: bool = False) -> float:
    """Return the peak learning rate with two significant digits."""
    rate = PEAK[optimizer] * (width / WIDTH) ** WIDTH_EXPONENT
    rate *= (step_tokens / STEP_TOKENS) ** TOKENS_EXPONENT
    rate *= (min(steps, LONG) / STEPS) ** STEPS_EXPONENT * (max(steps, LONG) / LONG) ** LONG_EXPONENT
    return float(f"{min(rate, HIGHEST) * (ADAPTED if adapted else 1.0):.2g}")


def advice(train: Train, steps: int, processes: int) -> str | None:
    """Return what to set for more and smaller steps over the same text, where a run has few; None if it has enough or can have no more.

    A recipe that gives ``train.steps`` has chosen their number.
    """
    unit = math.lcm(processes, train.micro_batch or 1)
    size = max(train.batch_size * steps // ENOUGH_STEPS // unit, 1) * unit
    if train.steps is not None or steps >= FEW_STEPS or size >= train.batch_size:
        return None
    more = steps * train.batch_size // size
    return f"{steps:,} steps are few: train.batch_size={size} makes {more:,} of the same text, and heads learn more from it"
