"""A benchmark report on the terminal: tables, the capture backends in use, and one sentence on token identity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from headstart.inference.bench.systems import AR
from headstart.support.report.terminal import columns, show

Row = dict[str, Any]
SPEEDS = ("accept len (tau)", "tokens/s", "x AR", "x transformers")
STEP = ("MBU", "draft ms", "verify ms", "host ms", "identical")
NEAR_TIES = (
    " In 16 bits, passes of different widths may round differently, and near-ties then fall the other way; --dtype fp32 compares exactly."
)


def print_report(report: Row, out: TextIO) -> None:
    """Print settings and machine, a row for each system, a table by task if there are several, and the verdict."""
    parts: list[RenderableType] = [_header(report), systems_table(report)]
    if len(report["tasks"]) > 1:
        parts.append(_tasks_table(report))
    parts.append(Text("\n".join(notes(report))))
    fine, sentence = verdict(report)
    show([*parts, Text(sentence, style="green" if fine else "bold red")], out)


def settings_of(report: Row) -> list[tuple[float, int]]:
    """The measured pairs of temperature and batch size."""
    return list(dict.fromkeys((row["temperature"], row["batch"]) for row in report["results"]))


def rows_at(report: Row, temperature: float, batch: int) -> Iterator[Row]:
    """The entries of baselines and heads at one temperature and batch size."""
    return (row for row in (*report["baselines"], *report["results"]) if (row["temperature"], row["batch"]) == (temperature, batch))


def name(row: Row) -> str:
    """The name of an entry's system."""
    return str(row["head"] if "head" in row else row["name"])


def setting_titles(report: Row) -> list[str]:
    """Titles of the columns that identify a row; the batch size is among them only if one exceeds 1."""
    return ["temperature", *(["batch"] if any(batch > 1 for _, batch in settings_of(report)) else []), "system"]


def setting_cells(report: Row, row: Row) -> list[str]:
    """The cells of `setting_titles`."""
    return [f"{row['temperature']:g}", *([str(row["batch"])] if len(setting_titles(report)) > 2 else []), name(row)]


def systems_table(report: Row) -> Table:
    """A row for each system at each temperature and batch size."""
    titles = [*setting_titles(report), *SPEEDS, *STEP, "accepted at depth 0, 1, ..."]
    rows: list[tuple[str, list[str | Text]]] = []
    for temperature, batch in settings_of(report):
        for row in rows_at(report, temperature, batch):
            *cells, identical = step_cells(row)
            marked = Text(identical, style={"yes": "green", "no": "bold red"}.get(identical, ""))
            rows.append((_style(row), [*setting_cells(report, row), *speeds(row), *cells, marked, _acceptance(row)]))
    return columns(titles, rows, left=[len(setting_titles(report)) - 1, len(titles) - 1])


def _tasks_table(report: Row) -> Table:
    setting = len(setting_titles(report))
    titles = [*setting_titles(report), "task", *SPEEDS, "accepted at depth 0, 1, ..."]
    rows = [
        (_style(row), [*setting_cells(report, row), task, *speeds(one), _acceptance(one)])
        for temperature, batch in settings_of(report)
        for row in rows_at(report, temperature, batch)
        if row["kind"] != "ar"   # the ratios of autoregressive decoding add nothing
        for task, one in row["tasks"].items()
    ]
    return columns(titles, rows, left=[setting - 1, setting, len(titles) - 1])


def _style(row: Row) -> str:
    return "dim" if row["kind"] == "ar" else ""


def verdict(report: Row) -> tuple[bool, str]:
    """One sentence on token identity, and False before it for a fault: tokens that differ in fp32."""
    rows = [*report["results"], *(row for row in report["baselines"] if name(row) == AR and row["identical"] is not None)]
    differing = [row for row in rows if not row["identical"]]
    if not differing:
        to_transformers = {row["identical_to_transformers"] for row in report["results"] if row["temperature"] == 0}
        also = "; at temperature 0 also to transformers' generate" if to_transformers == {True} else ""
        return True, f"Every token of every prompt is identical to autoregressive decoding with the same seed{also}.{_bits(report)}"
    systems = ", ".join(f"{name(row)} {_setting(row)} in {row['prompts_differing']}" for row in differing)
    systems += f" of {report['prompts']} prompts"
    if report["dtype"] == "fp32":
        return False, f"NOT IDENTICAL to autoregressive decoding: {systems}. In fp32 this is a fault; please report it."
    return True, f"Not every token is identical to autoregressive decoding: {systems}.{_bits(report)}{NEAR_TIES}"


def _bits(report: Row) -> str:
    """A sentence on the logits, where they were compared."""
    compared = [row["logits"] for row in report["results"]]
    positions, differing = (sum(one[key] for one in compared) for key in ("positions", "differing"))
    if not positions:
        return ""
    if not differing:
        return f" So is every bit of the logits ({positions:,} positions compared)."
    largest, logit = (max(one[key] for one in compared) for key in ("largest_difference", "largest_logit"))
    return f" Logits differ by at most {largest:.2g}, the largest is {logit:.3g} ({differing:,} of {positions:,} positions differ)."


def _setting(row: Row) -> str:
    batch = f", batch {row['batch']}," if row["batch"] > 1 else ""
    return f"at temperature {row['temperature']:g}{batch}"


def notes(report: Row) -> list[str]:
    """All lines below the table."""
    return [*engine_notes(report), *capture_notes(report), *vocabulary_notes(report), *repetition_notes(report)]


def capture_notes(report: Row) -> list[str]:
    """A line for each capture backend and fallback reason, with the systems that have them."""
    systems: dict[tuple[str, str | None], dict[str, None]] = {}
    for row in (*report["baselines"], *report["results"]):
        if row["capture"] is not None:
            systems.setdefault((row["capture"]["backend"], row["capture"]["fallback"]), {})[name(row)] = None
    return [
        f"capture: {backend} ({', '.join(names)})" + (f"; fallback: {fallback}" if fallback else "")
        for (backend, fallback), names in systems.items()
    ]


def engine_notes(report: Row) -> list[str]:
    """A line for each entry of heads with its acceptance under vLLM's names, as vLLM counts it (docs/serving.md)."""
    return [
        f"as vLLM counts it: {name(row)} {_setting(row).rstrip(',')}: mean acceptance length {row['mean_acceptance_length']:.3f},"
        f" draft acceptance rate {row['draft_acceptance_rate']:.1%},"
        f" per position {' '.join(f'{share:.3f}' for share in row['acceptance_rate_per_pos'])}"
        for row in report["results"]
        if row["mean_acceptance_length"] is not None
    ]


def vocabulary_notes(report: Row) -> list[str]:
    """A line for each entry with a draft vocabulary: its share of the generated tokens, which bounds the acceptance."""
    return [
        f"draft vocabulary: {name(row)} {_setting(row)}, {one['size']:,} of {one['vocab_size']:,} tokens,"
        f" which are {one['coverage']:.1%} of those generated"
        for row in report["results"]
        if (one := row["draft_vocabulary"]) is not None
    ]


def repetition_notes(report: Row) -> list[str]:
    """A line for each temperature: how much of what AR wrote repeats itself, from which n-gram drafts gain."""
    return [
        f"repetition: {row['repeated_8grams']:.1%} of the 8-grams written {_setting(row)} by {name(row)} occur earlier in the same text"
        for row in report["baselines"]
        if row["name"] == AR and row["repeated_8grams"] is not None
    ]


def _header(report: Row) -> Text:
    lines = [
        f"{report['backbone']}, {report['dtype']}, {report['device']}, {report['threads']} threads;"
        f" {report['prompts']} prompts, up to {report['max_new_tokens']} tokens each; milliseconds are per decoding step",
        f"MBU: share of the memory bandwidth measured here ({report['memory_bytes_per_second'] / 1e9:.1f} GB/s) that reading the weights"
        f" takes ({report['weight_bytes'] / 1e6:.1f} MB per forward pass)",
    ]
    if report["dropped_prompts"] or report["dropped_turns"]:
        lines.append(f"dropped, too long for the context: {report['dropped_prompts']} prompts, {report['dropped_turns']} later turns")
    return Text("\n".join(lines))


def speeds(row: Row) -> list[str]:
    """The cells of `SPEEDS`."""
    forms = {"tau": ".2f", "tokens_per_second": ".1f", "speedup_vs_ar": ".2f", "speedup_vs_transformers": ".2f"}
    return [format(row[key], form) for key, form in forms.items()]


def step_cells(row: Row) -> list[str]:
    """The cells of `STEP`."""
    times = [f"{row[key]:.2f}" if key in row else "" for key in ("draft_ms", "verify_ms", "host_ms")]
    identical = "" if row["identical"] is None else "yes" if row["identical"] else "no"
    return [f"{row['mbu']:.0%}", *times, identical]


def _acceptance(row: Row) -> str:
    return " ".join(f"{share:.2f}" for share in row.get("acceptance_per_depth", ()))
