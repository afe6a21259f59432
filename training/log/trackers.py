"""Where a run's numbers go beside its own log, when a recipe asks for it: Weights & Biases, and TensorBoard through accelerate."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from headstart.support.errors import UserError
from headstart.training.log.evaluate import marked
from headstart.training.recipe.recipe import Recipe, to_dict, to_yaml

FOLDER = "tensorboard"
"""Of its files, in ``save.dir``."""


class Tracker(Protocol):
    """One such place."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Curves' next points, by name."""

    def examples(self, step: int, name: str, examples: list[dict[str, Any]]) -> None:
        """What was decoded at an evaluation, as `evaluate` gives it."""

    def finish(self) -> None:
        """Send and close."""


def require_trackers(recipe: Recipe) -> None:
    """Raise UserError, before anything is loaded, if one is asked for and not installed."""
    if recipe.log.wandb != "off" and not _installed("wandb"):
        raise UserError(f"log.wandb={recipe.log.wandb} needs wandb, which is not installed; pip install wandb, or set log.wandb=off")
    if recipe.log.tensorboard and not (_installed("tensorboard") or _installed("tensorboardX")):
        raise UserError(
            "log.tensorboard=true needs tensorboard or tensorboardX, and neither is installed; "
            "pip install tensorboardX (it writes; tensorboard also shows), or set log.tensorboard=false"
        )


def start_trackers(recipe: Recipe, done: int) -> list[Tracker]:
    """Those the recipe asks for, told what it says. ``done``: steps before this start."""
    asked: list[Tracker] = []
    if recipe.log.wandb != "off":
        asked.append(_Wandb(recipe))
    if recipe.log.tensorboard:
        asked.append(_TensorBoard(recipe, done))
    return asked


class _Wandb:
    def __init__(self, recipe: Recipe) -> None:
        import wandb

        log = recipe.log
        assert log.wandb != "off"
        self.wandb = wandb
        try:
            self.run = wandb.init(project=log.project, name=log.name, mode=log.wandb, dir=recipe.save.dir, config=to_dict(recipe))
        except wandb.errors.Error as error:
            told = " ".join(str(error).split())
            raise UserError(f"log.wandb={log.wandb}: {told}; run wandb login, or set log.wandb=offline or off") from None

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def examples(self, step: int, name: str, examples: list[dict[str, Any]]) -> None:
        rows = [[one["prompt"], marked(one)] for one in examples]
        self.run.log({name: self.wandb.Table(columns=["prompt", "continuation, [what one pass wrote]"], data=rows)}, step=step)

    def finish(self) -> None:
        self.run.finish()


class _TensorBoard:
    def __init__(self, recipe: Recipe, done: int) -> None:
        from accelerate.tracking import TensorBoardTracker

        # What an earlier start wrote of steps that are about to be taken again is not shown.
        self.tracker = TensorBoardTracker(FOLDER, recipe.save.dir, purge_step=done + 1)
        try:
            self.tracker.start()
            self.tracker.log({"recipe": _as_code(to_yaml(recipe))}, step=done)
        except OSError as error:
            where = Path(recipe.save.dir) / FOLDER
            raise UserError(f"{where} cannot be written: {error}; make room there, or set log.tensorboard=false") from None

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self.tracker.log(dict(values), step=step)

    def examples(self, step: int, name: str, examples: list[dict[str, Any]]) -> None:
        text = "\n".join(f"{json.dumps(one['prompt'], ensure_ascii=False)}\n{marked(one)}\n" for one in examples)
        self.tracker.log({name: _as_code(text)}, step=step)

    def finish(self) -> None:
        self.tracker.finish()


def _as_code(text: str) -> str:
    """TensorBoard takes texts for Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
