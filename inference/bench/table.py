"""A report as text: aligned columns, and whether every token was identical in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]


def table(report: Row) -> str:
    """What was measured on what; a row for each system, baselines first; where prompts are of several tasks, those that draft by task."""
    settings = dict.fromkeys((row["temperature"], row["batch"]) for row in report["results"])
    batched = any(batch > 1 for _, batch in settings)
    titles = ["temperature", *(["batch"] if batched else []), "", "tau", "tokens/s", "x plain", "x transformers"]
    wide = [[*titles, "GB/s", "of memory", "draft ms", "verify ms", "host ms", "identical", "accepted at depth 1, 2, ..."]]
    tasks = [[*titles[:-4], "task", *titles[-4:], "accepted at depth 1, 2, ..."]]
    for temperature, batch in settings:
        where = [f"{temperature:g}", *([str(batch)] if batched else [])]
        for row in rows_at(report, temperature, batch):
            wide.append([*where, name(row), *speeds(row), *cells(row)])
            if name(row) not in ("transformers", "plain"):   # what the ratios of the others say already
                tasks += [[*where, name(row), task, *speeds(one), _shares(one)] for task, one in row["tasks"].items()]
    parts = [_head(report), _aligned(wide, {len(where), len(wide[0]) - 1})]
    if len(report["tasks"]) > 1:
        parts.append(_aligned(tasks, {len(where), len(where) + 1, len(tasks[0]) - 1}))
    return "\n\n".join(parts)


def rows_at(report: Row, temperature: float, batch: int) -> Iterator[Row]:
    """Baselines and heads at one setting."""
    return (row for row in (*report["baselines"], *report["results"]) if (row["temperature"], row["batch"]) == (temperature, batch))


def name(row: Row) -> str:
    """Of a row's system."""
    return str(row["head"] if "head" in row else row["name"])


def verdict(report: Row) -> tuple[bool, str]:
    """Whether all is as it must be, and one sentence: was every token identical?"""
    rows = [*report["results"], *(row for row in report["baselines"] if name(row) == "plain" and row["identical"] is not None)]
    differing = [row for row in rows if not row["identical"]]
    if not differing:
        to_theirs = {row["identical_to_transformers"] for row in report["results"] if row["temperature"] == 0}
        also = "; at temperature 0 also to transformers' generate" if to_theirs == {True} else ""
        return True, f"Every token of every prompt is identical to plain decoding with the same seed{also}."
    where = ", ".join(f"{name(row)} {_setting(row)} in {row['prompts_differing']}" for row in differing)
    where += f" of {report['prompts']} prompts"
    if report["dtype"] == "fp32":
        return False, f"NOT IDENTICAL to plain decoding: {where}. In fp32 this is a fault; please report it."
    return True, (
        f"Not every token is identical to plain decoding: {where}. In {report['dtype']}, passes of different widths"
        " round differently and a near-tie can fall the other way; --dtype fp32 compares exactly."
    )


def _setting(row: Row) -> str:
    batch = f", batch {row['batch']}," if row["batch"] > 1 else ""
    return f"at temperature {row['temperature']:g}{batch}"


def _head(report: Row) -> str:
    lines = [
        f"{report['backbone']}, {report['dtype']}, {report['device']}, {report['threads']} threads;"
        f" {report['prompts']} prompts, up to {report['max_new_tokens']} tokens each; milliseconds are per pass",
        f"GB/s: weights read ({report['weight_bytes'] / 1e6:.1f} MB a pass), of the {report['memory_bytes_per_second'] / 1e9:.1f}"
        " that a buffer larger than the caches is read with here",
    ]
    if report["skipped"] or report["left_out"]:
        lines.append(f"left out, too long for the context: {report['skipped']} prompts, {report['left_out']} later turns")
    return "\n".join(lines)


def speeds(row: Row) -> list[str]:
    """The cells of tau, tokens a second, and the two ratios."""
    forms = {"tau": ".2f", "tokens_per_second": ".1f", "speedup_vs_plain": ".2f", "speedup_vs_transformers": ".2f"}
    return [format(row[key], form) for key, form in forms.items()]


def cells(row: Row) -> list[str]:
    """The cells that follow: bandwidth, times, identity, acceptance."""
    times = [f"{row[key]:.2f}" if key in row else "" for key in ("draft_ms", "verify_ms", "host_ms")]
    identical = "" if row["identical"] is None else "yes" if row["identical"] else "no"
    return [f"{row['weight_bytes_per_second'] / 1e9:.1f}", f"{row['bandwidth_share']:.0%}", *times, identical, _shares(row)]


def _shares(row: Row) -> str:
    return " ".join(f"{share:.2f}" for share in row.get("acceptance_per_depth", ()))


def _aligned(rows: list[list[str]], left: set[int]) -> str:
    """Columns at the right, those of ``left`` at the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
