"""Trackers in addition to a run's log: Weights & Biases and TensorBoard, through accelerate."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from headstart.support.errors import UserError
from headstart.training.log.evaluate import marked
from headstart.training.recipe.recipe import Recipe, to_dict, to_yaml

FOLDER = "tensorboard"
"""Folder of TensorBoard's files in ``save.dir``."""


def require_trackers(recipe: Recipe) -> None:
    """Raise UserError if a tracker of the recipe is not installed; called before anything is loaded."""
    if recipe.log.wandb != "off" and not _installed("wandb"):
        raise UserError(f"log.wandb={recipe.log.wandb} needs wandb, which is not installed; pip install wandb, or set log.wandb=off")
    if recipe.log.tensorboard and not (_installed("tensorboard") or _installed("tensorboardX")):
        raise UserError(
            "log.tensorboard=true needs tensorboard or tensorboardX, and neither is installed; "
            "pip install tensorboardX (it writes; tensorboard also shows), or set log.tensorboard=false"
        )


def start_trackers(recipe: Recipe, done: int) -> list[GeneralTracker]:
    """Start the recipe's trackers and log the recipe. ``done``: optimiser steps before this start."""
    trackers: list[GeneralTracker] = []
    if recipe.log.wandb != "off":
        trackers.append(_start_wandb(recipe))
    if recipe.log.tensorboard:
        trackers.append(_start_tensorboard(recipe, done))
    return trackers


def log_examples(tracker: GeneralTracker, step: int, name: str, examples: list[dict[str, Any]]) -> None:
    """Log an evaluation's decoded examples: as a table in Weights & Biases, as text in others."""
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
    # purge_step hides steps of an earlier start that will be repeated. Files are named by the second: another start's would be overwritten.
    tracker = TensorBoardTracker(FOLDER, recipe.save.dir, purge_step=done + 1, filename_suffix=f".{time.time_ns()}")
    try:
        tracker.start()
        tracker.log({"recipe": _as_code(to_yaml(recipe))}, step=done)
    except OSError as error:
        folder = Path(recipe.save.dir) / FOLDER
        raise UserError(f"{folder} cannot be written: {error}; make room there, or set log.tensorboard=false") from None
    return tracker


def _as_code(text: str) -> str:
    """Indent as a code block, since TensorBoard renders text as Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
