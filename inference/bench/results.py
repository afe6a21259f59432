"""Rows of a report: what one system came to at one setting, in numbers that can be written as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headstart.inference.bench.systems import HeadstartSystem, SystemResult, TransformersSystem
from headstart.inference.measure import Settings, Tally


@dataclass(frozen=True)
class Sizes:
    """Where a row belongs, and what its bandwidth is measured by."""

    temperature: float
    batch: int
    weight_bytes: int
    memory_bytes_per_second: float


def result(measured: SystemResult, plain: SystemResult, theirs: SystemResult, settings: Settings, sizes: Sizes) -> dict[str, Any]:
    """A row of heads."""
    assert isinstance(measured.system, HeadstartSystem)
    tree, total = measured.system.settings(settings).tree, measured.total
    deepest = max((one.depth for one in measured.system.heads.drafters), default=len(total.accepted))
    differing = measured.differing(plain)
    return {
        "head": measured.system.name,
        "kind": "+".join(measured.system.sources),
        **_common(measured, plain, theirs, sizes),
        "acceptance_per_depth": total.acceptance_per_depth,
        "identical": differing == 0,
        "prompts_differing": differing,
        "identical_to_transformers": measured.differing(theirs) == 0 if sizes.temperature == 0 else None,
        **(measured.parts or total).milliseconds(),
        "nodes": tree.nodes if tree else None,
        "width": tree.width if tree else None,
        "depth": min((tree and tree.depth) or deepest, deepest),
        "draft_limits": measured.system.heads.limits,
        "tree_sizes": {str(nodes): passes for nodes, passes in sorted(total.nodes.items())},
        "tasks": {task: _task(tally, plain.tasks[task], theirs.tasks[task]) for task, tally in measured.tasks.items()},
    }


def baseline(measured: SystemResult, plain: SystemResult, theirs: SystemResult, first: SystemResult | None, sizes: Sizes) -> dict[str, Any]:
    """A row of plain decoding or of one of transformers' own ways. ``first``: plain decoding at the first batch size, if this is another.

    Identity is only told where it is to be expected: of plain decoding in batches with that at the first batch size, and of
    transformers' assisted decoding with its greedy decoding.
    """
    compared = None
    if measured is plain and first is not None:
        compared = first
    elif isinstance(measured.system, TransformersSystem) and measured.system.drafts and sizes.temperature == 0:
        compared = theirs
    differing = None if compared is None else measured.differing(compared)
    return {
        "name": measured.system.name,
        **_common(measured, plain, theirs, sizes),
        "identical": None if differing is None else differing == 0,
        "prompts_differing": differing,
        "tasks": {task: _task(tally, plain.tasks[task], theirs.tasks[task]) for task, tally in measured.tasks.items()},
    }


def _common(measured: SystemResult, plain: SystemResult, theirs: SystemResult, sizes: Sizes) -> dict[str, Any]:
    total = measured.total
    rate = total.reads * sizes.weight_bytes / total.wall
    return {
        "temperature": sizes.temperature,
        "batch": sizes.batch,
        **_speeds(total, plain.total, theirs.total),
        "weight_bytes_per_second": rate,
        "bandwidth_share": rate / sizes.memory_bytes_per_second,
    }


def _task(tally: Tally, plain: Tally, theirs: Tally) -> dict[str, Any]:
    return _speeds(tally, plain, theirs) | {"acceptance_per_depth": tally.acceptance_per_depth}


def _speeds(tally: Tally, plain: Tally, theirs: Tally) -> dict[str, Any]:
    return {
        "tau": tally.tau,
        "tokens_per_second": tally.tokens_per_second,
        "speedup_vs_plain": tally.tokens_per_second / plain.tokens_per_second,
        "speedup_vs_transformers": tally.tokens_per_second / theirs.tokens_per_second,
        "tokens": tally.tokens,
        "passes": tally.passes,
        "seconds": tally.wall,
    }
