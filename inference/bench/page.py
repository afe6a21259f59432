"""A benchmark report as one self-contained HTML page: speed, and acceptance by depth and by task; and the report's sample outputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from markupsafe import Markup
from transformers import PreTrainedTokenizerBase

from headstart.chat.prompts import Prompt
from headstart.inference.bench.judging import name
from headstart.inference.bench.systems import AR_TRANSFORMERS, SystemResult
from headstart.inference.bench.table import conclusions, header, notes, rows_at, settings_of, systems_table, tasks_table
from headstart.support.page import Section, Series, charts, page
from headstart.support.text import token_texts

SAMPLES = 6
"""Maximum number of samples of each system, the first of each task."""
TOKENS = 300
"""Maximum number of tokens per sample."""
SHOWN = 300
"""Characters of the end of the prompt that are shown."""


def samples(
    results: Sequence[SystemResult], prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, temperature: float
) -> list[dict[str, Any]]:
    """One sample for each system and the first prompt of each task: the tokens of the first answer as text, and the accept lengths.

    The prefill writes the first token, decoding step n the next ``accept_lengths[n]`` tokens.
    """
    first: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        first.setdefault(prompt.task, i)
    return [
        {
            "head": one.system.name,
            "temperature": temperature,
            "task": task,
            "prompt": str(tokenizer.decode(prompts[i].ids_T, skip_special_tokens=True))[-SHOWN:],
            "tokens": token_texts(tokenizer, one.sequences[i][0].tolist()[:TOKENS]),
            "accept_lengths": one.accept_lengths[i],
        }
        for one in results
        for task, i in islice(first.items(), SAMPLES)
    ]


Row = dict[str, Any]
SPEED = (
    "Mean acceptance length (tau): tokens a sequence gets per forward pass of the backbone, its own included; 1 is autoregressive decoding."
)
DEPTHS = "The share of decoding steps in which the draft of a depth was accepted; tau is 1 plus the sum of a line's points."


def report_page(report: Row) -> str:
    """Render the page."""
    versions = ", ".join(f"{library} {version}" for library, version in report["versions"].items())
    first = settings_of(report)[0][0]
    said = [Markup('<p class="{}">{}</p>').format(style, text) for text, style in conclusions(report)]
    below = [Markup("<p class=soft>{}</p>").format(note) for note in notes(report)]
    sections = [
        Section("Speed", SPEED, [*said, systems_table(report), *below]),
        Section("Acceptance by depth", DEPTHS, _depths(report)),
        Section("Speed by batch size", f"At temperature {first:g}.", _batches(report, first)),
        Section("Tasks", "The same by task.", tasks_table(report)),
    ]
    return page(report["backbone"], [*header(report), f"seed {report['seed']}; {versions}"], sections)


def _hues(report: Row) -> dict[str, int]:
    """A colour index for each system."""
    return {one: i for i, one in enumerate(dict.fromkeys(name(row) for row in (*report["results"], *report["baselines"])))}


def _depths(report: Row) -> list[Markup]:
    """The acceptance rate by depth at the first batch size, with a line for each of the heads and each temperature."""
    hues, rows = _hues(report), [row for row in report["results"] if row["batch"] == report["results"][0]["batch"]]
    several = len({row["temperature"] for row in rows}) > 1
    series = [
        Series(
            name(row) + (f", temperature {row['temperature']:g}" if several else ""),
            list(enumerate(row["acceptance_per_depth"])),
            hues[name(row)],
            dashed=row["temperature"] > 0,
        )
        for row in rows
    ]
    return charts(series, "depth", "share of decoding steps", 1.0)


def _batches(report: Row, temperature: float) -> list[Markup]:
    """Tokens per second by batch size, with a line for each system; nothing for a single batch size."""
    hues = _hues(report)
    speeds: dict[str, list[tuple[float, float]]] = {}
    for batch in sorted(batch for one, batch in settings_of(report) if one == temperature):
        for row in rows_at(report, temperature, batch):
            speeds.setdefault(name(row), []).append((batch, row["tokens_per_second"]))
    series = [Series(one, points, hues[one], one == AR_TRANSFORMERS) for one, points in speeds.items() if len(points) > 1]
    return charts(series, "batch size", "tokens per second, all sequences")
