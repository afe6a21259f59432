"""Training: ``headstart train RECIPE [section.key=value ...]``, and ``train_heads.py`` for launchers that need a script."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

from headstart.cli.arguments import TRAIN_EXAMPLE, add_train
from headstart.support.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``train_heads.py``; returns the exit status of `train`."""
    parser = argparse.ArgumentParser(prog="train_heads.py", description="Train heads by a recipe.", epilog=TRAIN_EXAMPLE)
    add_train(parser)
    return train(parser.parse_args(argv))


def train(args: argparse.Namespace) -> int:
    """Train by a recipe; returns 0 (done), 2 (user error) or 128 + signal (stopped, saved and resumable)."""
    try:
        return _train(args.recipe, args.overrides)
    except UserError as error:
        return _report(error)
    except KeyboardInterrupt:   # while loading, or a second one while training
        return 130


def _train(path: str, overrides: Sequence[str]) -> int:
    import torch  # here, so that --help does not wait for it

    from headstart.training.loop import train
    from headstart.training.recipe.recipe import load_recipe
    from headstart.training.run.lock import sole_run
    from headstart.training.run.processes import lost_process
    from headstart.training.setup import prepare

    recipe = load_recipe(path, overrides)
    try:
        with sole_run(recipe.save.dir) if _rank() == 0 else nullcontext():
            run = prepare(recipe)
            try:
                return train(run)
            finally:
                run.log.close()
                run.accelerator.end_training()
    except torch.OutOfMemoryError as error:
        size, chunk, length = recipe.train.micro_batch, recipe.objective.chunk_size, recipe.data.max_length
        lower = f"train.micro_batch (now {size or 'null'}), objective.chunk_size ({chunk}) or data.max_length ({length})"
        raise UserError(f"out of memory; lower {lower}: {str(error).splitlines()[0]}") from None
    except OSError as error:   # a full or failing disk, no permission
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(
            f"the run has ended: {error.strerror or error}{where}; put that right, and the same command goes on from what was last saved "
            f"in {recipe.save.dir}"
        ) from None
    except RuntimeError as error:
        if (lost := lost_process(error, recipe.save.dir)) is None:
            raise
        return _report(lost, wait=False)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _report(error: UserError, wait: bool = True) -> int:
    rank = _rank()
    if rank and wait:
        time.sleep(15)   # if all processes have the error, rank 0 reports it and its exit ends the others
    print(f"error: {error}" if rank == 0 else f"error (process {rank}): {error}", file=sys.stderr, flush=True)
    return 2
