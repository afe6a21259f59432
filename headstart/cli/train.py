"""Training: ``headstart train RECIPE [section.key=value ...]``, and ``train_heads.py`` for launchers that need a script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from headstart.cli.arguments import DEBUG, add_debug, add_recipe
from headstart.cli.failures import USER, Guard, rank, report
from headstart.support.errors import UserError, waiting
from headstart.support.files import require_folder
from headstart.support.text import lasting_stderr, open_streams, require_arguments_text

if TYPE_CHECKING:
    from headstart.training.recipe.recipe import Recipe

TRAIN_EXAMPLE = """examples:
  headstart train recipes/quickstart/eagle3.yaml train.lr=3e-4 save.dir=out/mine
  accelerate launch train_heads.py recipes/quickstart/eagle3.yaml train.lr=3e-4 save.dir=out/mine
  torchrun --nproc-per-node 2 train_heads.py recipes/quickstart/eagle3.yaml"""


def add_train(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart train`` and ``train_heads.py``."""
    add_recipe(parser, "YAML file: the only configuration")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``train_heads.py``; returns the exit status of `train`, or that of an error (`failures`)."""
    open_streams()
    parser = argparse.ArgumentParser(prog="train_heads.py", description="Train heads by a recipe.", epilog=TRAIN_EXAMPLE)
    add_train(parser)
    add_debug(parser)
    words = list(sys.argv[1:] if argv is None else argv)
    with Guard(debug=DEBUG in words) as guard:
        guard.status = train(parser.parse_args(words))
    return guard.status


def train(args: argparse.Namespace) -> int:
    """Train by a recipe; returns 0 (done) or 128 + signal (stopped, saved and resumable). Errors are logged beside the run."""
    from headstart.training.recipe.recipe import load_recipe  # here, so that --help does not wait for it

    require_arguments_text(args.overrides)
    recipe = load_recipe(args.recipe, args.overrides)
    folder = require_folder("save.dir", recipe.save.dir)
    with lasting_stderr(), Guard(folder, args.debug) as guard:
        guard.status = _train(recipe)
    return guard.status


def _train(recipe: Recipe) -> int:
    with waiting("importing torch and transformers"):
        import torch

        from headstart.support.devices import plain_arithmetic
        from headstart.training.loop import train
        from headstart.training.run.processes import keep_group, lost_process, sole_run
        from headstart.training.setup import prepare

    try:
        with plain_arithmetic(), sole_run(recipe.save.dir) if rank() == 0 else nullcontext():
            run = prepare(recipe)
            try:
                return train(run)
            finally:
                run.source.close()
                run.log.close()
                keep_group()
                run.accelerator.end_training()
    except torch.OutOfMemoryError as error:
        size, chunk, length = recipe.train.micro_batch, recipe.objective.chunk_size, recipe.data.max_length
        lower = f"train.micro_batch (now {size or 'null'}), objective.chunk_size ({chunk}) or data.max_length ({length})"
        raise UserError(f"out of memory; lower {lower}: {str(error).splitlines()[0]}") from None
    except OSError as error:  # a full or failing disk, no permission
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(
            f"the run has ended: {error.strerror or error}{where}; put that right, and the same command goes on from what was last saved "
            f"in {recipe.save.dir}"
        ) from None
    except RuntimeError as error:
        if (lost := lost_process(error, recipe.save.dir)) is None:
            raise
        return report(str(lost), USER, wait=False)
