"""How long a step takes: a few of them, by the loop that trains, on the recipe's backbone and data, and nothing of them kept."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from headstart.heads.backbone.backbone import resolve
from headstart.training.features.manifest import read_manifest
from headstart.training.loop import training_step
from headstart.training.recipe.recipe import Recipe
from headstart.training.run.signals import StopSignal
from headstart.training.setup import prepare

STEPS = 4
"""The first of them does not count."""


def why_not(recipe: Recipe) -> str | None:
    """Why the backbone's weights cannot be loaded without fetching them; None if they can."""
    path = resolve(recipe.backbone.path)
    if Path(path).is_dir():
        return None if list(Path(path).glob("*.safetensors")) else f"{recipe.backbone.path} has no weights (*.safetensors)"
    kept = [try_to_load_from_cache(path, name) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
    return None if any(isinstance(file, str) for file in kept) else f"the weights of {recipe.backbone.path} are not downloaded"


def live_until_cached(recipe: Recipe) -> Recipe:
    """The recipe; as long as the features it trains from are not written, one whose backbone reads at every step. Raises UserError."""
    settings = recipe.cache
    if settings.dir is None:
        return recipe
    manifest = read_manifest(Path(settings.dir))
    if manifest is not None and not manifest.missing():
        return recipe
    return recipe.model_copy(update={"cache": settings.model_copy(update={"dir": None})})


def seconds_a_step(recipe: Recipe, processes: int, steps: int) -> float:
    """Median of a few steps of one of ``processes``, so without what they say to each other; evaluations do not count.

    Raises UserError for what training would refuse.
    """
    share = -(-recipe.train.batch_size // processes)
    most = recipe.train.micro_batch or share
    fitting = max(size for size in range(1, share + 1) if share % size == 0 and size <= most)
    lengths = {"steps": max(steps, STEPS), "epochs": None, "batch_size": share, "micro_batch": fitting}
    with tempfile.TemporaryDirectory(prefix="headstart-plan-") as folder, redirect_stderr(StringIO()):
        sections = {
            "train": recipe.train.model_copy(update=lengths),
            "save": recipe.save.model_copy(update={"dir": folder}),
            "log": recipe.log.model_copy(update={"wandb": "off"}),
        }
        run = prepare(recipe.model_copy(update=sections))
        try:
            seconds = []
            with StopSignal() as signal:
                for step in range(1, STEPS + 1):
                    start = time.perf_counter()
                    training_step(run, step, signal)
                    seconds.append(time.perf_counter() - start)
                    if signal.received:
                        raise KeyboardInterrupt
        finally:
            run.log.close()
    return statistics.median(seconds[1:])
