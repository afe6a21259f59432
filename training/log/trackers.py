"""Trackers beside a run's own log: accelerate's Weights & Biases and TensorBoard trackers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from headstart.support.errors import UserError
from headstart.training.log.evaluate import marked
from headstart.training.recipe.recipe import Recipe, to_dict, to_yaml

FOLDER = "tensorboard"
"""The folder of TensorBoard's files in ``save.dir``."""


def require_trackers(recipe: Recipe) -> None:
    """Raise UserError, before anything is loaded, if a tracker of the recipe is not installed."""
    if recipe.log.wandb != "off" and not _installed("wandb"):
        raise UserError(f"log.wandb={recipe.log.wandb} needs wandb, which is not installed; pip install wandb, or set log.wandb=off")
    if recipe.log.tensorboard and not (_installed("tensorboard") or _installed("tensorboardX")):
        raise UserError(
            "log.tensorboard=true needs tensorboard or tensorboardX, and neither is installed; "
            "pip install tensorboardX (it writes; tensorboard also shows), or set log.tensorboard=false"
        )


def start_trackers(recipe: Recipe, done: int) -> list[GeneralTracker]:
    """The trackers of the recipe, started, with the recipe in them. ``done``: optimiser steps before this start."""
    trackers: list[GeneralTracker] = []
    if recipe.log.wandb != "off":
        trackers.append(_start_wandb(recipe))
    if recipe.log.tensorboard:
        trackers.append(_start_tensorboard(recipe, done))
    return trackers


def log_examples(tracker: GeneralTracker, step: int, name: str, examples: list[dict[str, Any]]) -> None:
    """The decoded examples of an evaluation: a table in Weights & Biases, a text elsewhere."""
    if isinstance(tracker, WandBTracker):
        rows = [[one["prompt"], marked(one)] for one in examples]
        tracker.log_table(name, columns=["prompt", "continuation, [tokens of one step]"], data=rows, step=step)
    else:
        text = "\n".join(f"{json.dumps(one['prompt'], ensure_ascii=False)}\n{marked(one)}\n" for one in examples)
        tracker.log({name: _as_code(text)}, step=step)


def _start_wandb(recipe: Recipe) -> WandBTracker:
    import wandb

    log = recipe.log
    tracker = WandBTracker(log.project, name=log.name, mode=log.wandb, dir=recipe.save.dir, config=to_dict(recipe))
    try:
        tracker.start()
    except wandb.errors.Error as error:
        cause = " ".join(str(error).split())
        raise UserError(f"log.wandb={log.wandb}: {cause}; run wandb login, or set log.wandb=offline or off") from None
    return tracker


def _start_tensorboard(recipe: Recipe, done: int) -> TensorBoardTracker:
    # Steps that are about to be repeated were already written by an earlier start: TensorBoard is to hide those.
    tracker = TensorBoardTracker(FOLDER, recipe.save.dir, purge_step=done + 1)
    try:
        tracker.start()
        tracker.log({"recipe": _as_code(to_yaml(recipe))}, step=done)
    except OSError as error:
        folder = Path(recipe.save.dir) / FOLDER
        raise UserError(f"{folder} cannot be written: {error}; make room there, or set log.tensorboard=false") from None
    return tracker


def _as_code(text: str) -> str:
    """As a code block: TensorBoard renders texts as Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
