"""The command that trains: ``accelerate launch train_heads.py RECIPE [section.key=value ...]``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from headstart.support.errors import UserError
from headstart.training.processes import processes_missing, start_processes

EXAMPLE = "example: accelerate launch train_heads.py recipes/quickstart/eagle3.yaml train.lr=3e-4 save.dir=out/mine"


def main(argv: Sequence[str] | None = None) -> int:
    """Train by a recipe; the exit status: 0 done, 2 the user's mistake, 128 + signal if told to stop (saved, resumable)."""
    parser = argparse.ArgumentParser(prog="train_heads.py", description="Train lookahead heads on a frozen language model.", epilog=EXAMPLE)
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file: the only configuration")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replace what the recipe says")
    given = parser.parse_args(argv)
    if processes := processes_missing():
        return start_processes(processes, [given.recipe, *given.overrides])
    try:
        return _train(given.recipe, given.overrides)
    except UserError as error:
        return _complain(error)
    except KeyboardInterrupt:   # while loading, or the second one while training
        return 130


def _train(path: str, overrides: Sequence[str]) -> int:
    # What takes seconds to import, only now: --help and the parent of several processes do without.
    import torch

    from headstart.training.loop import train
    from headstart.training.recipe.recipe import load_recipe
    from headstart.training.setup import prepare

    recipe = load_recipe(path, overrides)
    try:
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


def _complain(error: UserError) -> int:
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        time.sleep(15)   # what every process found is said by the first, whose end also ends the others
    print(f"error: {error}" if rank == 0 else f"error (process {rank}): {error}", file=sys.stderr, flush=True)
    return 2
