"""The log of a run: a JSONL file, a progress bar, and trackers (Weights & Biases, TensorBoard) through accelerate."""

import importlib.util
import json
import math
import secrets
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker
from tqdm import tqdm

from headstart.support.errors import UserError, cause
from headstart.support.files import discard_unfinished, write_text
from headstart.support.json_text import log_lines
from headstart.training.recipe.recipe import Recipe, to_dict, to_yaml

FOLDER = "tensorboard"
"""Folder of TensorBoard's files in ``save.dir``."""


def require_trackers(recipe: Recipe) -> None:
    """Raise UserError if a tracker of the recipe is not installed; called before anything is loaded."""
    installed = {name for name in ("wandb", "tensorboard", "tensorboardX") if importlib.util.find_spec(name) is not None}
    if recipe.log.wandb != "off" and "wandb" not in installed:
        raise UserError(f"log.wandb={recipe.log.wandb} needs wandb, which is not installed; pip install wandb, or set log.wandb=off")
    if recipe.log.tensorboard and not installed - {"wandb"}:
        remedy = "pip install tensorboardX (it writes; tensorboard also shows), or set log.tensorboard=false"
        raise UserError(f"log.tensorboard=true needs tensorboard or tensorboardX, and neither is installed; {remedy}")


def start_trackers(recipe: Recipe, done: int, wandb_id: str | None = None) -> list[GeneralTracker]:
    """Start the recipe's trackers and log the recipe. ``done``: optimiser steps before this start; ``wandb_id``: the run's in W&B."""
    started: list[GeneralTracker] = [] if recipe.log.wandb == "off" else [_start_wandb(recipe, wandb_id)]
    return started + ([_start_tensorboard(recipe, done)] if recipe.log.tensorboard else [])


def log_examples(tracker: GeneralTracker, step: int, name: str, examples: list[dict[str, Any]]) -> None:
    """Log an evaluation's decoded examples: as a table in Weights & Biases, as text in others."""
    if isinstance(tracker, WandBTracker):
        rows = [[example["prompt"], marked(example)] for example in examples]
        tracker.log_table(name, columns=["prompt", "continuation, [tokens of one step]"], data=rows, step=step)
    else:
        text = "\n".join(f"{json.dumps(example['prompt'], ensure_ascii=False)}\n{marked(example)}\n" for example in examples)
        tracker.log({name: _as_code(text)}, step=step)


def _start_wandb(recipe: Recipe, run_id: str | None) -> WandBTracker:
    import wandb

    log = recipe.log
    own: dict[str, Any] = {"name": log.name, "mode": log.wandb, "dir": recipe.save.dir, "config": to_dict(recipe)}
    tracker = WandBTracker(log.project, id=run_id, resume="allow", **own)
    try:
        tracker.start()
    except wandb.errors.Error as error:
        raise UserError(f"log.wandb={log.wandb}: {cause(error)}; run wandb login, or set log.wandb=offline or off") from None
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


def marked(example: dict[str, Any]) -> str:
    """Format an example with brackets around the tokens of one decoding step, as in ``[def fib][(n)]:``."""
    tokens, place = example["tokens"], 1
    text = "".join(tokens[:1])
    for length in example["accept_lengths"]:
        written = "".join(tokens[place : place + length])
        text += f"[{written}]" if length > 1 else written
        place += length
    return text


def _as_code(text: str) -> str:
    """Indent as a code block, since TensorBoard renders text as Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


@dataclass(frozen=True)
class Result:
    """Result of an optimiser step for one drafter, over all processes."""

    loss: float
    grad_norm: float
    depths: list[list[float]]
    """Three lists over depths: positions counted, top-1 agreements, summed acceptance rate (alpha)."""
    lm_loss: float = 0.0
    """Cross-entropy of a trainable backbone."""
    lm_kl: float = 0.0
    """Its KL divergence from the original backbone."""


@dataclass
class Meter:
    """Sums since the last log line, saved with the state so that a resumed run writes the same lines."""

    steps: int = 0
    """Steps not skipped."""
    skipped: int = 0
    loss: float = 0.0
    joint: int = 0
    """Steps that trained the backbone too."""
    lm_loss: float = 0.0
    lm_kl: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    count_K: list[float] = field(default_factory=list)
    correct_K: list[float] = field(default_factory=list)
    alpha_K: list[float] = field(default_factory=list)

    def add(self, result: Result | None, tokens: int, seconds: float) -> None:
        """Add an optimiser step; ``result`` None: it was skipped."""
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        if result is None:
            self.skipped += 1
            return
        norm = result.grad_norm if math.isfinite(result.grad_norm) else 0.0  # the gradient scaler skipped the step
        self.steps, self.loss, self.grad_norm = self.steps + 1, self.loss + result.loss, self.grad_norm + norm
        self.joint += result.lm_loss > 0
        self.lm_loss, self.lm_kl = self.lm_loss + result.lm_loss, self.lm_kl + result.lm_kl
        before = [self.count_K, self.correct_K, self.alpha_K] if self.count_K else [[0.0] * len(row) for row in result.depths]
        both = zip(before, result.depths, strict=True)
        self.count_K, self.correct_K, self.alpha_K = ([a + b for a, b in zip(*rows, strict=True)] for rows in both)

    def record(self) -> dict[str, Any]:
        """Return means, with accuracy and expected acceptance rate (alpha) per depth, None where it was trained at no position; loss and
        norm are None if all steps were skipped."""
        return {
            "loss": self.loss / self.steps if self.steps else None,
            "accuracy": [round(x / n, 5) if n else None for x, n in zip(self.correct_K, self.count_K, strict=True)],
            "alpha": [round(x / n, 5) if n else None for x, n in zip(self.alpha_K, self.count_K, strict=True)],
            "grad_norm": self.grad_norm / self.steps if self.steps else None,
            "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
            **{name: value / self.joint for name, value in (("lm_loss", self.lm_loss), ("lm_kl", self.lm_kl)) if value},
            **({"skipped": self.skipped} if self.skipped else {}),
        }


class Log:
    """``<save.dir>/log.jsonl`` and trackers; only the main process writes."""

    def __init__(self, recipe: Recipe, steps: int, done: int, main: bool, wandb_id: str | None = None) -> None:
        """``wandb_id``: that of the run in Weights & Biases which this one resumes, if any."""
        self.main, self.steps = main, steps
        self.wandb_id = None if recipe.log.wandb == "off" else wandb_id or secrets.token_hex(4)
        if not main:
            return
        path = Path(recipe.save.dir) / "log.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        started = {"recipe": to_dict(recipe), "steps": steps}
        before = _keep_until(path, done)
        self.file = path.open("a")
        if before != started:
            self._write({"step": done, **started})
        self.bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty())
        self.trackers = start_trackers(recipe, done, self.wandb_id)

    def say(self, text: str) -> None:
        """Print above the progress bar."""
        if self.main:
            tqdm.write(text, file=sys.stderr)

    def line(self, step: int, record: dict[str, Any], head: str = "") -> None:
        """Write a log line of training metrics or an evaluation; ``head`` names the drafter if there are several."""
        if not self.main:
            return
        self._write({"step": step, **({"head": head} if head else {}), **record})
        self._track(step, record, f"{head}/" if head else "")
        summary = f"{head}: {_summary(record)}" if head else _summary(record)
        if "loss" not in record:
            self.say(f"step {step}/{self.steps}: {summary}")
        elif self.bar.disable:
            self.say(f"step {step}/{self.steps}  {summary}")
        else:
            self.bar.set_postfix_str(summary, refresh=False)

    def note(self, step: int, record: dict[str, Any], head: str = "") -> None:
        """Write the values of ``record`` that are not None to the log file only."""
        record = {key: value for key, value in record.items() if value is not None}
        if self.main and record:
            self._write({"step": step, **({"head": head} if head else {}), **record})

    def warn(self, step: int, message: str, error: Exception) -> None:
        """Print a warning; the error's traceback goes to the log file, and to the screen where there is none."""
        trace = "".join(traceback.format_exception(error))
        try:
            self.note(step, {"warning": message, "traceback": trace})
            where = f"; the traceback is in {self.file.name}" if self.main else f"\n{trace}"
        except UserError:
            where = f"\n{trace}"
        tqdm.write(f"warning: {message}{where}", file=sys.stderr)

    def _track(self, step: int, record: dict[str, Any], prefix: str) -> None:
        """Pass a record to the trackers. One that fails gets no more: the log has everything, and the run goes on."""
        for tracker in [*self.trackers]:
            try:
                tracker.log({prefix + key: value for key, value in _scalars(record).items()}, step=step)
                if "examples" in record:
                    log_examples(tracker, step, f"{prefix}examples", record["examples"])
            except Exception as error:
                self.trackers.remove(tracker)
                self.warn(step, f"{tracker.name} failed ({type(error).__name__}: {cause(error)}) and gets no more lines", error)

    def advance(self) -> None:
        if self.main:
            self.bar.update()

    def close(self) -> None:
        if not self.main:
            return
        self.bar.close()
        with suppress(OSError):  # what could not be written has been reported
            self.file.close()
        for tracker in self.trackers:
            try:
                tracker.finish()
            except Exception as error:  # whatever was trained is saved
                self.say(f"warning: {tracker.name} could not be closed: {type(error).__name__}: {cause(error)}")

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as error:
            raise UserError(f"{self.file.name} cannot be written: {error}; make room there, and the same command goes on") from None


def _keep_until(path: Path, done: int) -> dict[str, Any] | None:
    """Drop lines after the resumed step, which will be written again, and incomplete ones. Returns the last recipe in the log."""
    discard_unfinished(path.with_name("*"))
    kept, recipe = [], None
    for text, line in log_lines(path) if path.exists() and done else ():
        if line.get("step", 0) <= done:
            kept.append(text + "\n")
            recipe = {key: line[key] for key in ("recipe", "steps")} if "recipe" in line else recipe
    write_text(path, "".join(kept))
    return recipe


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return scalar metrics; lists become one metric per depth: accuracy/0, accuracy/1, ..."""
    flat: dict[str, float] = {}
    for key, value in record.items():
        if key in ("examples", "measured_on"):
            continue
        flat |= {f"{key}/{i}": x for i, x in enumerate(value)} if isinstance(value, list) else {key: value}
    return {key: value for key, value in flat.items() if value is not None}


def _summary(record: dict[str, Any]) -> str:
    if "tau" in record:
        accepted = " ".join(f"{x:.0%}" for x in record["acceptance_per_depth"])
        backbone = ""
        if "backbone_loss" in record:
            backbone = f"; the backbone's loss {record['backbone_loss']:.4f}, {record['backbone_loss_before']:.4f} without the adapter"
        own, where = "the backbone's own included", record["measured_on"]
        return f"tau {record['tau']:.3f} tokens a pass ({own}), accepted per depth {accepted}; on {where}{backbone}"
    if "teacher_forced_tau" in record:
        accepted = " ".join(f"{x:.0%}" for x in record["teacher_forced_acceptance_per_depth"])
        tau = f"tau {record['teacher_forced_tau']:.3f} as a teacher-forced chain on held-out features"
        return f"{tau} (not decoded), accepted per depth {accepted}"
    accuracy = " ".join("-" if x is None else f"{x:.0%}" for x in record["accuracy"])
    loss = "no loss" if record["loss"] is None else f"loss {record['loss']:.4f}"
    skipped = f", {record['skipped']} steps skipped (not finite)" if "skipped" in record else ""
    backbone = "".join(f", {key} {record[key]:.4f}" for key in ("lm_loss", "lm_kl") if key in record)
    return f"{loss}{backbone}, accuracy {accuracy}, {record['tokens_per_second']:.0f} tokens/s{skipped}"
