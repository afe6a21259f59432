"""The page of ``headstart inspect --html``: a training sample as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from headstart.support.report.page import render


@dataclass(frozen=True)
class Run:
    """Tokens of one part in a row, each as `TokenText` has it."""

    part: str
    tokens: list[dict[str, Any]]


def sample_page(report: dict[str, Any], recipe: str) -> str:
    """Return the page for a report on a recipe."""
    data = report["data"]
    about = [f"{recipe}: {data['summary']}", *([data["check"]["said"]] if data["check"] else [])]
    return render("inspect.html.j2", title="training sample", about=about, row=report["row"], runs=runs(report["sample"]))


def runs(tokens: Sequence[dict[str, Any]]) -> list[Run]:
    """Divide a sample's tokens by part: label, prompt (before an answer) and neither (after the last label)."""
    last = max((i for i, token in enumerate(tokens) if token["loss"]), default=-1)
    parts = ["label" if token["loss"] else "prompt" if i < last else "neither" for i, token in enumerate(tokens)]
    return [Run(part, [token for _, token in run]) for part, run in groupby(zip(parts, tokens, strict=True), key=lambda pair: pair[0])]
