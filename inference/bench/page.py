"""A benchmark report as one self-contained HTML page: speed, acceptance by depth and by task, and recorded decoding."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup, escape

from headstart.inference.bench.judging import name, sentence
from headstart.inference.bench.systems import AR_TRANSFORMERS
from headstart.inference.bench.table import STYLES, header, notes, rows_at, settings_of, systems_table, tasks_table
from headstart.support.page import Section, Series, charts, page

Row = dict[str, Any]
SPEED = (
    "Mean acceptance length (tau): tokens a sequence gets per forward pass of the backbone, its own included; 1 is autoregressive decoding."
)
DEPTHS = "The share of decoding steps in which the draft of a depth was accepted; tau is 1 plus the sum of a line's points."
REPLAY = (
    "Some prompts decoded once more. A stretch of colour is what one forward pass wrote. In a tree, ✓ marks accepted drafts, and → the"
    " backbone's own token after them."
)


def report_page(report: Row) -> str:
    """Render the page."""
    versions = ", ".join(f"{library} {version}" for library, version in report["versions"].items())
    first = settings_of(report)[0][0]
    verdict = Markup('<p class="{}">{}</p>').format(STYLES[report["verdict"]], sentence(report))
    below = [Markup("<p class=soft>{}</p>").format(note) for note in notes(report)]
    sections = [
        Section("Speed", SPEED, [verdict, systems_table(report), *below]),
        Section("Acceptance by depth", DEPTHS, _depths(report)),
        Section("Speed by batch size", f"At temperature {first:g}.", _batches(report, first)),
        Section("Tasks", "The same by task.", tasks_table(report)),
        Section("Replay", REPLAY, [part for one in report.get("replays", []) for part in _replay(one)]),
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


def _replay(one: Row) -> list[Markup]:
    """One recorded prompt (see `record`): the texts of each system, coloured by pass, and below them the trees."""
    parts = [Markup("<p><b>{}</b></p>").format(one["title"])]
    for run in one["runs"]:
        passes, seconds = run["passes"], run["passes"][-1]["at"]
        tokens = sum(len(step["tokens"]) for step in passes)
        spans = [
            Markup('<span class={} title="pass {}, at {:.2f} s: {} tokens">{}</span>').format(
                "ab"[number % 2], number, step["at"], len(step["tokens"]), "".join(step["tokens"])
            )
            for number, step in enumerate(passes)
        ]
        said = f"{run['name']}: {tokens} tokens in {len(passes) - 1} passes after the prefill, {seconds:.2f} s"
        text = Markup("<div class=text><span class=soft>{}</span>{}</div>").format(one["prompt"], Markup("").join(spans))
        trees = [
            escape(f"pass {number}: {len(step['tokens'])} tokens") + step["tree"] for number, step in enumerate(passes) if step["tree"]
        ]
        shown = Markup("<details><summary>the trees of its passes</summary>{}</details>").format(Markup("").join(trees)) if trees else ""
        parts.append(Markup("<p>{}</p>{}{}").format(said, text, shown))
    return parts
