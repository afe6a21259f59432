"""The verdict of a benchmark report in one sentence: identical tokens, near-ties, or a fault."""

from __future__ import annotations

from typing import Any

from headstart.inference.bench.judging import FAULT, IDENTICAL, NEAR_TIE
from headstart.inference.bench.systems import AR

Row = dict[str, Any]
TITLES = {IDENTICAL: "yes", NEAR_TIE: "near-tie", FAULT: "no", None: ""}
"""What a table says of an entry, in the column `identical`."""


def sentence(report: Row) -> str:
    """What the verdict is, and the figures that it rests on."""
    own = [*report["results"], *(row for row in report["baselines"] if row.get("name") == AR)]
    if report["verdict"] == FAULT:
        return _fault(report, [row for row in own if row["verdict"] == FAULT])
    differing = [row for row in own if row["identical"] is False]
    if not differing:
        to_transformers = {row["identical_to_transformers"] for row in report["results"] if row["temperature"] == 0}
        also = "; at temperature 0 also to transformers' generate" if to_transformers == {True} else ""
        return f"Every token of every prompt is identical to autoregressive decoding with the same seed{also}.{_bits(report)}"
    systems = ", ".join(f"{name(row)} {setting(row)} in {row['prompts_differing']}" for row in differing)
    shortfall = max(row["teacher_forced"]["largest_shortfall"] for row in own)
    return (
        f"Not every token is identical to autoregressive decoding: {systems} of {report['prompts']} prompts. These are near-ties: each"
        f" token is the model's own pick or falls short of it by {shortfall:.2g} at most, and the model's passes of other widths differ by"
        f" up to {report['rounding']['size']:.2g} by themselves.{_bits(report)} --dtype fp32 rounds less."
    )


def _fault(report: Row, rows: list[Row]) -> str:
    found = "; ".join(f"{name(row)} {setting(row)} {_wrong(row['teacher_forced'])}" for row in rows)
    captured = any((row["capture"] or {}).get("backend", "off") != "off" for row in rows)
    off = " If --capture off mends it, a capture is at fault." if captured else ""
    return (
        f"FAULT: {found}. The model's passes of other widths differ by {report['rounding']['size']:.2g} at most by themselves, so this is"
        f" no rounding; please report it.{off}"
    )


def _wrong(found: Row) -> str:
    """What is wrong with an entry."""
    sizes = (found["largest_shortfall"], found["largest_difference"])
    shortfall, difference = ("any size" if size is None else f"{size:.3g}" for size in sizes)
    tokens = f"wrote {found['faults']} of {found['tokens']:,} tokens that the model does not pick, short by up to {shortfall}"
    logits = f"has logits off by up to {difference} at {found['logits_beyond']} of {found['logits']:,} positions"
    return " and ".join([tokens] * bool(found["faults"]) + [logits] * bool(found["logits_beyond"]))


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


def name(row: Row) -> str:
    """The name of an entry's system."""
    return str(row["head"] if "head" in row else row["name"])


def setting(row: Row) -> str:
    """The temperature of an entry and, above 1, the size of its batches."""
    return f"at temperature {row['temperature']:g}" + (f", batch {row['batch']}," if row["batch"] > 1 else "")
