"""A benchmark report as one self-contained HTML page: speed, acceptance by depth and by task, and recorded decoding.

Of the texts it shows sample outputs, and some prompts recorded pass by pass.

Shape suffix: T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from markupsafe import Markup, escape
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.inference.bench.judging import name
from headstart.inference.bench.systems import AR_TRANSFORMERS, HeadstartSystem, SystemResult
from headstart.inference.bench.table import conclusions, header, notes, rows_at, settings_of, systems_table, tasks_table
from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.measure import Settings, continue_text
from headstart.inference.show import drawn_tree
from headstart.support.chat.prompts import Prompt
from headstart.support.page import Section, Series, as_html, charts, page
from headstart.support.text import token_texts

SAMPLES, RECORDED = 6, 3
"""Maximum number of samples of each system and of prompts that are recorded, the first of each task."""
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
    return [
        {
            "head": one.system.name,
            "temperature": temperature,
            "task": task,
            "prompt": _end(prompts[i], tokenizer),
            "tokens": token_texts(tokenizer, one.sequences[i][0].tolist()[:TOKENS]),
            "accept_lengths": one.accept_lengths[i],
        }
        for one in results
        for task, i in _first_of_tasks(prompts, SAMPLES)
    ]


def record(
    systems: Sequence[HeadstartSystem], prompts: Sequence[Prompt], settings: Settings, seed: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Decode the first prompt of some tasks once more with every system: when each pass ended, its tokens, and its tree as HTML.

    ``seed``: that of prompt 0. The systems should be warm: a pass that captures is as slow here as it was.
    """
    return [
        {
            "title": f"{task}, temperature {settings.temperature:g}",
            "prompt": _end(prompts[i], tokenizer),
            "runs": [_recorded(system, prompts[i].ids_T, settings, seed + i, tokenizer) for system in systems],
        }
        for task, i in _first_of_tasks(prompts, RECORDED)
    ]


def _first_of_tasks(prompts: Sequence[Prompt], most: int) -> list[tuple[str, int]]:
    first: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        first.setdefault(prompt.task, i)
    return list(islice(first.items(), most))


def _end(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(prompt.ids_T, skip_special_tokens=True))[-SHOWN:]


def _recorded(
    system: HeadstartSystem, prompt_T: Tensor, settings: Settings, seed: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    with Stopwatch() as watch:
        output = continue_text(system.heads, prompt_T, system.settings(settings), seed, timed=True)
    assert output.trees is not None and output.pass_seconds is not None and output.accept_lengths is not None
    texts = token_texts(tokenizer, output.sequences[0, len(prompt_T) :].tolist()[: 1 + sum(output.accept_lengths[0])])
    at = max(watch.seconds - sum(output.pass_seconds), 0.0)  # the prefill writes the first token
    passes: list[dict[str, Any]] = [{"at": at, "tokens": texts[:1], "tree": None}]
    place = 1
    for seconds, tree, written in zip(output.pass_seconds, output.trees[0], output.accept_lengths[0], strict=True):
        at, tokens = at + seconds, texts[place : place + written]
        passes.append({"at": at, "tokens": tokens, "tree": as_html(drawn_tree(tree, tokens, tokenizer)) if len(tree.tokens) > 1 else None})
        place += written
    return {"name": system.name, "passes": passes}


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
    said = [Markup('<p class="{}">{}</p>').format(style, text) for text, style in conclusions(report)]
    below = [Markup("<p class=soft>{}</p>").format(note) for note in notes(report)]
    sections = [
        Section("Speed", SPEED, [*said, systems_table(report), *below]),
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
