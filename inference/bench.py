"""Heads against plain decoding and transformers' own ``generate``: one process, the same prompts, turn and turn about.

What is compared takes turns prompt by prompt, in an order that rotates, so that a machine that slows down or warms up does so
for all of them. Shape suffix: T positions.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from headstart import __version__
from headstart.heads.backbone import Backbone
from headstart.heads.errors import UserError
from headstart.inference.heads import Heads
from headstart.inference.measure import Settings, Tally, continue_by_transformers, continue_text
from headstart.inference.tree import TreeShape

PLAIN, TRANSFORMERS = "plain", "transformers"
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
WARM_UP = 16
"""Tokens each system writes before it is measured."""
TIMED = 4
"""Prompts decoded once more, on an accelerator, for exact times of the parts of a pass (waiting for them costs speed)."""


@dataclass(frozen=True)
class Plan:
    """What is measured: the temperatures, the first prompt's seed, how much each writes, how large trees may be."""

    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    tree: TreeShape = field(default_factory=TreeShape)
    sampled: TreeShape | None = None
    """Instead of ``tree`` above temperature 0, where the next token is less certain and a wider tree pays."""


@dataclass
class System:
    """One of those compared. ``heads`` None: transformers' own generate; without a drafter: plain decoding by our rule."""

    name: str
    backbone: Backbone
    heads: Heads | None
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    texts: list[Tensor] = field(default_factory=list)
    parts: Tally | None = None
    """Where the time of a pass goes, where the run itself cannot tell."""

    def run(self, prompt_T: Tensor, settings: Settings, seed: int, timed: bool = False) -> Any:
        """One prompt continued, not counted."""
        if self.heads is None:
            return continue_by_transformers(self.backbone.model, prompt_T, settings, seed)
        return continue_text(self.heads, prompt_T, settings, seed, timed=timed)

    def measure(self, prompt_T: Tensor, settings: Settings, seed: int) -> None:
        """One prompt continued and counted."""
        start = _now(self.backbone.device)
        output = self.run(prompt_T, settings, seed)
        self.seconds += _now(self.backbone.device) - start
        self.texts.append(output.sequences[0].cpu())
        if self.heads is None:
            self.tally.tokens += output.sequences.shape[1] - len(prompt_T)
        else:
            self.tally.add(output, prompt_T)

    def time_parts(self, prompts: Sequence[Tensor], settings: Settings, seed: int) -> None:
        """Decode some prompts once more, waiting for the accelerator at every step."""
        self.parts = Tally()
        for i, prompt_T in enumerate(prompts[:TIMED]):
            self.parts.add(self.run(prompt_T, settings, seed + i, timed=True), prompt_T)

    @property
    def tokens_per_second(self) -> float:
        """Over all prompts, reading them included."""
        return self.tally.tokens / self.seconds

    def differing(self, other: System) -> int:
        """How many prompts the two continue differently."""
        return sum(not torch.equal(mine, theirs) for mine, theirs in zip(self.texts, other.texts, strict=True))


def compare(heads: Sequence[tuple[str, Heads]], prompts: Sequence[Tensor], plan: Plan) -> dict[str, Any]:
    """The report: baselines by temperature, and a row for each of the heads at each temperature.

    ``heads``: by the name to report them under, all on one backbone. Raises UserError for a prompt that leaves no room in the context.
    """
    backbone = heads[0][1].backbone
    for number, prompt_T in enumerate(prompts, 1):
        require_room(f"prompt {number}", len(prompt_T), plan.max_new_tokens, backbone)
    report = _header(backbone, len(prompts), plan)
    for temperature in plan.temperatures:
        tree = plan.sampled if plan.sampled is not None and temperature > 0 else plan.tree
        settings = Settings(plan.max_new_tokens, temperature, tree=tree)
        theirs, plain, *ours = _decode_all(heads, prompts, settings, plan.seed)
        report["baselines"][f"{temperature:g}"] = _baseline(plain) | _baseline(theirs)
        report["results"] += [_row(system, plain, theirs, settings) for system in ours]
    return report


def _header(backbone: Backbone, prompts: int, plan: Plan) -> dict[str, Any]:
    """What was measured, on what, with what; the results are still to come."""
    return {
        "backbone": backbone.name,
        "prompts": prompts,
        "max_new_tokens": plan.max_new_tokens,
        "seed": plan.seed,
        "threads": torch.get_num_threads(),
        "versions": {
            "headstart": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": _device_name(backbone.device),
        "dtype": DTYPES.get(backbone.dtype, str(backbone.dtype)),
        "baselines": {},
        "results": [],
    }


def require_room(what: str, prompt_tokens: int, max_new_tokens: int, backbone: Backbone) -> None:
    """Raise UserError unless prompt and answer fit into the backbone's context."""
    context = backbone.max_positions
    if context is not None and prompt_tokens + max_new_tokens > context:
        raise UserError(
            f"{what} has {prompt_tokens} tokens, which with max_new_tokens {max_new_tokens} exceeds the backbone's context of {context};"
            " shorten the prompt or lower --max-new-tokens"
        )


def _decode_all(heads: Sequence[tuple[str, Heads]], prompts: Sequence[Tensor], settings: Settings, seed: int) -> list[System]:
    """Transformers, plain and the heads, having continued every prompt."""
    backbone = heads[0][1].backbone
    systems = [System(TRANSFORMERS, backbone, None), System(PLAIN, backbone, Heads(backbone))]
    systems += [System(name, backbone, one) for name, one in heads]
    for system in systems:
        system.run(prompts[0], Settings(min(WARM_UP, settings.max_new_tokens), settings.temperature, tree=settings.tree), seed)
    pace = 0.1 if sys.stderr.isatty() else 10.0   # seconds between lines of a log
    with tqdm(total=len(prompts) * len(systems), desc=f"temperature {settings.temperature:g}", unit="text", mininterval=pace) as progress:
        for i, prompt_T in enumerate(prompts):
            first = i % len(systems)
            for system in systems[first:] + systems[:first]:
                system.measure(prompt_T, settings, seed + i)
                progress.update()
    if backbone.device.type != "cpu":
        for system in systems[2:]:
            system.time_parts(prompts, settings, seed)
    return systems


def _baseline(system: System) -> dict[str, float]:
    name = system.name
    return {f"{name}_tokens_per_second": system.tokens_per_second, f"{name}_tokens": system.tally.tokens, f"{name}_seconds": system.seconds}


def _row(system: System, plain: System, theirs: System, settings: Settings) -> dict[str, Any]:
    assert system.heads is not None and system.heads.drafter is not None
    drafter = system.heads.drafter
    differing = system.differing(plain)
    return {
        "head": system.name,
        "kind": type(drafter).__name__.lower(),
        "temperature": settings.temperature,
        "tau": system.tally.tau,
        "acceptance_per_depth": system.tally.acceptance_per_depth,
        "tokens_per_second": system.tokens_per_second,
        "speedup_vs_plain": system.tokens_per_second / plain.tokens_per_second,
        "speedup_vs_transformers": system.tokens_per_second / theirs.tokens_per_second,
        "identical": differing == 0,
        "prompts_differing": differing,
        "identical_to_transformers": system.differing(theirs) == 0 if settings.temperature == 0 else None,
        "tokens": system.tally.tokens,
        "passes": system.tally.passes,
        "seconds": system.seconds,
        **(system.parts or system.tally).milliseconds(),
        "nodes": settings.tree.nodes,
        "width": settings.tree.width,
        "depth": min(settings.tree.depth or drafter.depth, drafter.depth),
    }


def table(report: dict[str, Any]) -> str:
    """The report as aligned columns, baselines first at each temperature."""
    columns = ["temperature", "", "tau", "tokens/s", "x plain", "x transformers", "draft ms", "verify ms", "host ms", "identical"]
    rows = [[*columns, "accepted at depth 1, 2, ..."]]
    for temperature, base in report["baselines"].items():
        plain, theirs = base["plain_tokens_per_second"], base["transformers_tokens_per_second"]
        for name, speed in ((TRANSFORMERS, theirs), (PLAIN, plain)):
            rows.append([temperature, name, "1.00", f"{speed:.1f}", f"{speed / plain:.2f}", f"{speed / theirs:.2f}", *[""] * 5])
        for row in report["results"]:
            if f"{row['temperature']:g}" == temperature:
                rows.append([temperature, row["head"], *_cells(row)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = (1, len(widths) - 1)
    lines = [
        "  ".join(cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    head = (
        f"{report['backbone']}, {report['dtype']}, {report['device']}, {report['threads']} threads;"
        f" {report['prompts']} prompts, up to {report['max_new_tokens']} tokens each; milliseconds are per pass"
    )
    return "\n".join([head, "", *(line.rstrip() for line in lines)])


def _cells(row: dict[str, Any]) -> list[str]:
    keys = {"tau": ".2f", "tokens_per_second": ".1f", "speedup_vs_plain": ".2f", "speedup_vs_transformers": ".2f"}
    numbers = [format(row[key], form) for key, form in keys.items()]
    times = [f"{row[key]:.2f}" for key in ("draft_ms", "verify_ms", "host_ms")]
    return [*numbers, *times, "yes" if row["identical"] else "no", " ".join(f"{share:.2f}" for share in row["acceptance_per_depth"])]


def verdict(report: dict[str, Any]) -> tuple[bool, str]:
    """Whether all is as it must be, and one sentence: was every token identical?"""
    rows = report["results"]
    differing = [row for row in rows if not row["identical"]]
    if not differing:
        to_theirs = {row["identical_to_transformers"] for row in rows if row["temperature"] == 0}
        also = "; at temperature 0 also to transformers' generate" if to_theirs == {True} else ""
        return True, f"Every token of every prompt is identical to plain decoding with the same seed{also}."
    where = ", ".join(f"{row['head']} at temperature {row['temperature']:g} in {row['prompts_differing']}" for row in differing)
    where += f" of {report['prompts']} prompts"
    if report["dtype"] == "fp32":
        return False, f"NOT IDENTICAL to plain decoding: {where}. In fp32 this is a fault; please report it."
    return True, (
        f"Not every token is identical to plain decoding: {where}. In {report['dtype']}, passes of different widths"
        " round differently and a near-tie can fall the other way; --dtype fp32 compares exactly."
    )


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
