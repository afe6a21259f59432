"""Measured figures of a model card: from reports of `headstart bench`, and from the run's last evaluation. Nothing else is a figure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.heads.checkpoint import recipe_section
from headstart.inference.bench.systems import ALONE, FIXED
from headstart.inference.serving.publish.heads import Heads, last_part
from headstart.support.errors import UserError
from headstart.support.files import require_file
from headstart.support.json_text import log_lines, read_json

SETTINGS = {"nodes", "width", "prompts", "temperature", "max_new_tokens"}
"""Keys of an evaluation's settings that are shown."""


@dataclass(frozen=True)
class Figure:
    """Acceptance on one task at one setting."""

    task: str
    prompts: int
    temperature: float
    tree: str
    tau: float
    per_depth: list[float]
    engines_count: float | None = None
    """Mean acceptance length as vLLM counts it; None: not measured."""
    speedup: float | None = None
    """Tokens per second over those of autoregressive decoding; None: not measured."""
    batch: int = 1

    def cells(self) -> list[str]:
        """Return the row of the card's table."""
        depths = " ".join(f"{share:.2f}" for share in self.per_depth)
        own = [self.task, str(self.prompts), f"{self.temperature:g}", str(self.batch), self.tree, f"{self.tau:.2f}", depths]
        return [*own, *("not measured" if value is None else f"{value:.2f}" for value in (self.engines_count, self.speedup))]


@dataclass(frozen=True)
class Measured:
    """Figures of one measurement, and its settings in a sentence."""

    figures: tuple[Figure, ...]
    about: str


def bench_figures(file: Path, heads: Heads) -> Measured:
    """Return the figures of a report of ``headstart bench --json``. Raises UserError if it is none, or does not have these heads."""
    try:
        report = read_json(require_file("--bench", file), "measure again")
        rows = [row for row in report["results"] if _name(row) in heads.names]
        if not rows:
            measured = ", ".join(sorted({_name(row) for row in report["results"]}))
            raise UserError(f"{file} has figures of {measured}, not of {heads.names[0]}; give a report of headstart bench on these heads")
        about = (
            f"`headstart bench` {report['versions']['headstart']} on {last_part(report['backbone'])}, {report['dtype']},"
            f" {report['device']}, {report['threads']} threads; {report['prompts']} prompts, up to {report['max_new_tokens']} tokens each,"
            f" seed {report['seed']}. {_identity(rows)}"
        )
        return Measured(tuple(figure for row in rows for figure in _figures(row, report)), about)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        fault = f"{type(error).__name__}: {error}"
        raise UserError(f"--bench {file} is no report of this version's headstart bench --json ({fault}); measure again") from None


def training_figures(heads: Heads) -> Measured | None:
    """Return the last evaluation of the training run; None if there was none, or the run's log is not there."""
    tau, settings = heads.provenance.get("tau"), recipe_section(heads.provenance, "eval")
    line = _last_evaluation(heads)
    if tau is None or line is None or not SETTINGS <= settings.keys():
        return None
    tree = _tree(settings["nodes"], settings["width"], None)
    figure = Figure("held out from training", settings["prompts"], settings["temperature"], tree, tau, line["acceptance_per_depth"])
    about = (
        f"The evaluation of the training run at step {line['step']} of {heads.provenance['steps']}: at most {settings['prompts']} prompts,"
        f" {settings['max_new_tokens']} tokens each."
    )
    return Measured((figure,), about)


def _last_evaluation(heads: Heads) -> dict[str, Any] | None:
    """Return the log's last line with the evaluation that the checkpoint states."""
    file = heads.run / "log.jsonl" if heads.run is not None else None
    if file is None or not file.is_file():
        return None
    found = None
    for _, line in log_lines(file):
        if line.get("tau") == heads.provenance.get("tau") and line.get("step", 0) <= heads.provenance.get("steps", 0):
            found = line
    return found if found is not None and "acceptance_per_depth" in found else None


def _name(row: dict[str, Any]) -> str:
    return Path(str(row["head"]).removesuffix(FIXED).removesuffix(ALONE)).name


def _figures(row: dict[str, Any], report: dict[str, Any]) -> list[Figure]:
    tree = _tree(row["nodes"], row["width"], row["depth"])
    tasks = {task: (report["tasks"][task], one) for task, one in row["tasks"].items()}
    if len(tasks) > 1:
        tasks["all"] = (report["prompts"], row)
    return [
        Figure(
            task or "all", prompts, row["temperature"], tree, one["tau"], one["acceptance_per_depth"], one["mean_acceptance_length"],
            one["speedup_vs_ar"], row["batch"],
        )
        for task, (prompts, one) in tasks.items()
    ]  # fmt: skip


def _tree(nodes: int | None, width: int | None, depth: int | None) -> str:
    if nodes is None:
        return "adaptive"
    return f"{nodes} nodes, width {width}" + (f", depth {depth}" if depth is not None else "")


def _identity(rows: list[dict[str, Any]]) -> str:
    differing = max(row["prompts_differing"] for row in rows)
    if not differing:
        return "Every token is that of autoregressive decoding with the same seed."
    return f"Tokens differ from autoregressive decoding in up to {differing} prompts, by rounding in this dtype."
