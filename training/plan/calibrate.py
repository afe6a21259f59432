"""Measure the time per step with a few steps of the training loop on the recipe's backbone and data, in a temporary folder."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.shipped import resolve
from headstart.support.errors import waiting
from headstart.training.features.manifest import read_manifest
from headstart.training.loop import training_step
from headstart.training.recipe.recipe import Recipe
from headstart.training.run.processes import StopSignal
from headstart.training.setup import prepare

STEPS = 4
"""Number of steps, the first a warm-up."""


def why_not_loadable(recipe: Recipe) -> str | None:
    """Return the reason why the backbone's weights cannot be loaded without a download; None if they can."""
    if recipe.features.endpoint is not None and recipe.cache.dir is None:
        return "its hidden states come from servers (features.endpoint), which are as fast as they are"
    path = resolve(recipe.backbone.path)
    if find_gguf(path) is not None:
        return None
    if Path(path).is_dir():
        return None if list(Path(path).glob("*.safetensors")) else f"{recipe.backbone.path} has no weights (*.safetensors)"
    kept = [try_to_load_from_cache(path, name) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
    return None if any(isinstance(file, str) for file in kept) else f"the weights of {recipe.backbone.path} are not downloaded"


def live_until_cached(recipe: Recipe) -> Recipe:
    """Return the recipe, without its feature cache if that is incomplete. Raises UserError."""
    settings = recipe.cache
    if settings.dir is None:
        return recipe
    manifest = read_manifest(Path(settings.dir))
    if manifest is not None and not manifest.missing():
        return recipe
    return recipe.model_copy(update={"cache": settings.model_copy(update={"dir": None})})


@waiting("timing")
def seconds_per_step(recipe: Recipe, processes: int, steps: int) -> float:
    """Return the median duration of a step of one of ``processes`` processes, without communication and evaluation.

    Raises UserError for recipes that training would reject.
    """
    share = -(-recipe.train.batch_size // processes)
    limit = recipe.train.micro_batch or share
    fitting = max(size for size in range(1, share + 1) if share % size == 0 and size <= limit)
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
