"""What benchmarks that train share: a file of results that grows line by line, and a training run without evaluations."""

import json
import sys
from pathlib import Path
from typing import Any

from headstart.training.loop import train
from headstart.training.recipe.recipe import Recipe
from headstart.training.setup import Run, prepare

Row = dict[str, Any]


class Results:
    """A file of JSON lines: each has what identifies it and what was measured."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[Row] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def find(self, key: Row) -> Row | None:
        return next((row for row in self.rows if {**row, **key} == row), None)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        with self.file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def train_heads(recipe: Recipe) -> Run:
    """Train without evaluating; the heads are in ``recipe.save.dir``."""
    run = prepare(recipe)
    run.prompts = []
    try:
        if train(run):
            sys.exit(1)  # stopped by a signal
    finally:
        run.log.close()
    return run
