"""Which settings of EAGLE-3's training carry over from one backbone to another: settings x backbones x seeds, at equal tokens.

    python benchmarks/transfer.py --assemble FOLDER --models MODELS --rows DATA --own OWN
    python benchmarks/transfer.py --folder FOLDER --out OUT --jobs 14 --deadline 540
    python benchmarks/transfer.py --folder FOLDER --out OUT --settings default default+batch2 --seeds 0 1 --backbones tasks5 --tokens 600000
    python benchmarks/transfer.py --folder FOLDER --own-text --backbones stories260K babyllama-tok105 prose2 tasks5
    python benchmarks/transfer.py --out OUT --table

Every cell (transfer_cells.py) is a process of one thread: it trains heads for ``--tokens`` tokens and decodes held-out prompts greedily in
a chain of five drafts, and half as far at temperature 1. Acceptance is counted as a neutral decoder does: drafts kept per forward pass that
verified any, plus one. A cell's result is a line in OUT/cells.jsonl; cells that are there are skipped, so the same command goes on after an
interruption. After ``--deadline`` seconds no cell starts, nor one that would not end in time, and cells that run are dropped. Everything
runs on the CPU. Settings that begin with speculators train that project's heads instead (speculators_heads.py says what to install).

``--assemble`` copies the small models and cuts the data to what the cells need: FOLDER can be carried to another machine (about 25 MB).
``--table`` prints, for each setting, tau on every backbone, and its least and mean share of the best found there.
"""

from __future__ import annotations

import os

os.environ |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

import argparse
import json
import multiprocessing
import multiprocessing.connection
import shutil
import sys
import tempfile
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transfer_folder
import transfer_report
from runs import Results, Row, train_heads
from torch import Tensor
from transfer_cells import BACKBONES, DEPTH, RIVAL, Cell, cells, model_path, recipe_of, setting

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, continue_texts
from headstart.training.data.data import prompts


class Sweep:
    """Runs cells in processes of their own, a few at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start = args, time.monotonic()
        args.out.mkdir(parents=True, exist_ok=True)
        self.running: dict[Any, tuple[Cell, float]] = {}
        self.seconds: dict[str, float] = {}
        """By backbone, the most seconds that a token's cost has taken so far."""

    def run(self) -> None:
        args = self.args
        waiting = [cell for cell in cells(args.tokens, args.settings, args.backbones, args.seeds) if not self._known(cell)]
        print(f"{len(waiting)} cells to do", file=sys.stderr, flush=True)
        while (waiting or self.running) and self._left() > 0:
            while len(self.running) < self.args.jobs and (cell := self._next(waiting)) is not None:
                waiting.remove(cell)
                self._begin(cell)
            if not self.running:
                break   # nothing that is left would end in time
            self._collect()
        for process in self.running:
            process.kill()
            process.join()
        print(f"{len(self.running)} cells dropped, {len(waiting)} not begun", file=sys.stderr)
        shutil.rmtree(self.args.out / "work", ignore_errors=True)

    def _left(self) -> float:
        return self.args.deadline - (time.monotonic() - self.start)

    def _next(self, waiting: list[Cell]) -> Cell | None:
        """The first waiting cell whose backbone is there (it may be in training) and that is expected to end before the deadline."""
        fitting = (cell for cell in waiting if self.seconds.get(cell.backbone, 0.0) * cell.tokens < self._left())
        return next((cell for cell in fitting if model_path(cell.backbone, self.args.folder) is not None), None)

    def _begin(self, cell: Cell) -> None:
        process = multiprocessing.get_context("fork").Process(target=_measure, args=(cell, self.args))
        process.start()
        self.running[process] = (cell, time.monotonic())

    def _collect(self) -> None:
        """Wait for a process to end, at most to the deadline."""
        multiprocessing.connection.wait([process.sentinel for process in self.running], timeout=min(max(self._left(), 0.1), 60))
        for process in [process for process in self.running if not process.is_alive()]:
            cell, begun = self.running.pop(process)
            spent = time.monotonic() - begun
            if process.exitcode == 0:
                self.seconds[cell.backbone] = max(self.seconds.get(cell.backbone, 0.0), spent / cell.tokens)
            print(f"{time.monotonic() - self.start:.0f} s: {cell} {'took' if process.exitcode == 0 else 'FAILED after'} {spent:.0f} s",
                  file=sys.stderr, flush=True)  # fmt: skip

    def _known(self, cell: Cell) -> bool:
        return Results(self.args.out / "cells.jsonl").find(asdict(cell)) is not None


def _measure(cell: Cell, args: argparse.Namespace) -> None:
    """Train and decode one cell, in its own process; its line is written in one piece."""
    torch.set_num_threads(1)
    (args.out / "work").mkdir(exist_ok=True)
    with open(args.out / "errors.txt", "a") as errors, tempfile.TemporaryDirectory(dir=args.out / "work") as folder:
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        try:
            row = asdict(cell) | measured(cell, args, folder)
        except BaseException:
            traceback.print_exc()
            raise
        Results(args.out / "cells.jsonl").add(row)
        if args.keep is not None:
            shutil.copytree(folder, args.keep / f"{cell.backbone}-{cell.setting}-{cell.seed}", dirs_exist_ok=True)


def measured(cell: Cell, args: argparse.Namespace, folder: str) -> Row:
    """Train a cell's heads into ``folder``; returns tau with its standard error, acceptance per depth, tokens and seconds."""
    started = time.perf_counter()
    recipe = recipe_of(cell, args, folder)
    ready = time.perf_counter()
    if cell.setting.startswith(RIVAL):
        import speculators_heads

        run, theirs = speculators_heads.trained(recipe)
        heads: AbstractContextManager[Drafter] = nullcontext(theirs)
    else:
        run = train_heads(recipe)
        heads = run.trainers[0].eval_weights()
    trained = time.perf_counter()
    asked = prompts(run.held_out, recipe.eval, run.backbone.max_positions or sys.maxsize)
    with heads as drafter:
        found = acceptance(run.backbone, drafter, asked, args.new_tokens)
        sampled = acceptance(run.backbone, drafter, asked, args.new_tokens // 2, temperature=1.0)
    found |= {f"{name}_sampled": sampled[name] for name in ("tau", "tau_error", "accepted")}
    logged = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    norms = [round(line["grad_norm"], 4) for line in logged if "grad_norm" in line]
    return found | {
        "steps": run.done, "trained_tokens": run.tokens, "grad_norms": norms[:: max(1, len(norms) // 8)],
        "seconds": {"data": ready - started, "training": trained - ready, "decoding": time.perf_counter() - trained},
    }  # fmt: skip


@torch.no_grad()
def acceptance(backbone: Backbone, drafter: Drafter, asked: list[Tensor], new_tokens: int, temperature: float = 0.0) -> Row:
    """Decode prompts in a chain; ``tau_error`` is the standard error over the prompts."""
    heads = SpeculativeModel(backbone, drafter.eval(), capture="off")
    settings = Settings(new_tokens, temperature, tree=TreeShape(1 + DEPTH, 1, DEPTH))
    output = continue_texts(heads, asked, settings, range(len(asked)))
    assert output.kept is not None and output.drafted is not None
    kept = [[count for count, drafted in zip(*row, strict=True) if drafted] for row in zip(output.kept, output.drafted, strict=True)]
    kept = [row for row in kept if row]
    passes = sum(map(len, kept))
    tau = 1 + sum(map(sum, kept)) / passes
    spread = sum((sum(row) - (tau - 1) * len(row)) ** 2 for row in kept) ** 0.5 / passes
    accepted = [sum(count > depth for row in kept for count in row) / passes for depth in range(DEPTH)]
    return {"tau": round(tau, 4), "tau_error": round(spread, 4), "accepted": [round(rate, 4) for rate in accepted], "passes": passes}


def main() -> None:
    args = parser().parse_args()
    if args.assemble is not None:
        transfer_folder.assemble(args.assemble, args.models, args.rows, args.own)
    elif args.own_text:
        transfer_folder.write_own_text(args.folder, args.backbones)
    elif args.table:
        print(transfer_report.table(Results(args.out / "cells.jsonl").rows))
    else:
        Sweep(args).run()


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--folder", type=Path, metavar="FOLDER", help="of models and data, as assembled")
    options.add_argument("--out", type=Path, metavar="OUT", help="where results go, and what has them already")
    options.add_argument("--jobs", type=int, default=1, help="processes at a time, of one thread each (1)")
    options.add_argument("--deadline", type=float, default=float("inf"), metavar="SECONDS", help="when to end")
    options.add_argument("--tokens", type=int, default=150_000, help="training tokens of a whole cell (150,000)")
    options.add_argument("--settings", nargs="+", type=setting, default=[], metavar="NAME", help="these, as default+frozen, not the tiers")
    options.add_argument("--backbones", nargs="+", choices=list(BACKBONES), default=list(BACKBONES), metavar="NAME", help="these, not all")
    options.add_argument("--seeds", type=int, nargs="+", default=[0], help="with --settings")
    options.add_argument("--prompts", type=int, default=100, help="to decode (100)")
    options.add_argument("--new-tokens", type=int, default=128, help="to write after each of 32 tokens or of a question (128)")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the heads there")
    options.add_argument("--table", action="store_true", help="print what OUT has, as Markdown")
    options.add_argument("--own-text", action="store_true", help="write what the backbones write into FOLDER, for settings with +own")
    options.add_argument("--assemble", type=Path, metavar="FOLDER", help="make the folder of models and data, and nothing else")
    options.add_argument("--models", type=Path, help="with --assemble: folder of stories260K, babyllama-tok105 and chat-7m")
    options.add_argument("--rows", type=Path, help="with --assemble: folder of stories_train.jsonl, chat_train.jsonl and their _val.jsonl")
    options.add_argument("--own", type=Path, help="with --assemble: folder of prose2 and tasks5, by small_backbone.py")
    return options


if __name__ == "__main__":
    main()
