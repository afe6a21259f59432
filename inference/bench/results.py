"""Entries of a report, as JSON values: the results of one system at one temperature and batch size.

Every forward pass of the backbone reads every weight once, so forward passes times weight bytes over seconds is bounded by the memory
bandwidth; their ratio is the MBU (memory bandwidth utilisation, as in gpt-fast). Near 1, only fewer passes (a higher tau) make decoding
faster; well below 1, the time is spent elsewhere. Weights that fit into the CPU caches are read faster than memory allows, so the MBU of
a small model may exceed 1.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.inference.bench.systems import HeadstartSystem, System, SystemResult
from headstart.inference.capture.captured import Stopwatch
from headstart.inference.engine.tree import TreeShape
from headstart.inference.measure import Settings
from headstart.inference.steps import Tally

BUFFER = 256 << 20
"""Bytes; larger than the CPU caches."""
SECONDS = 0.3
STEADY = 0.1
"""Ratios of rounds that differ from their median by more than this fraction were measured on a machine that did something else too, and so
were those beside programs that took more than this fraction of a thread's time."""


def weight_bytes(backbone: Backbone) -> int:
    """Bytes of weights that a forward pass reads: all but an untied input embedding, of which only single rows are read.

    All experts of a mixture of experts are counted, although a pass reads fewer.
    """
    tied = backbone.embed.weight is backbone.unembed.weight
    total = sum(weight.numel() * weight.element_size() for weight in backbone.model.parameters())
    return total - (0 if tied else backbone.embed.weight.numel() * backbone.embed.weight.element_size())


def memory_bandwidth(device: torch.device) -> float:
    """Read bandwidth of the device's memory in bytes per second: the best of several sums over a large buffer."""
    buffer = torch.ones(BUFFER // 4, device=device)
    best, end = 0.0, time.perf_counter() + SECONDS
    while best == 0.0 or time.perf_counter() < end:
        with Stopwatch(device) as watch:
            buffer.sum()
        best = max(best, BUFFER / watch.seconds)
    return best


@dataclass(frozen=True)
class Sizes:
    """Temperature and batch size of an entry, and the byte counts from which its bandwidth is computed."""

    temperature: float
    batch: int
    weight_bytes: int
    memory_bytes_per_second: float


@dataclass(frozen=True)
class References:
    """The results that an entry is compared with."""

    ar: SystemResult
    """Autoregressive decoding by headstart's loop."""
    ar_transformers: SystemResult
    """Autoregressive decoding by transformers' ``generate``."""
    ar_first_batch: SystemResult | None
    """``ar`` at the first batch size; None at the first batch size itself."""
    by_system: Mapping[System, SystemResult]
    """Those of all systems of the race."""


def result(measured: SystemResult, references: References, settings: Settings, sizes: Sizes) -> dict[str, Any]:
    """The entry of a system that drafts."""
    assert isinstance(measured.system, HeadstartSystem)
    tree, total = measured.system.settings(settings).tree, measured.total
    shape = tree if isinstance(tree, TreeShape) else None
    max_depth = max((drafter.depth for drafter in measured.system.heads.drafters), default=len(total.accepted))
    differing = measured.differing(references.ar)
    identical_to_transformers = measured.differing(references.ar_transformers) == 0 if sizes.temperature == 0 else None
    return {
        "head": measured.system.name,
        "kind": "+".join(measured.system.sources),
        **_common(measured, references, sizes),
        "acceptance_per_depth": total.acceptance_per_depth,
        "rested": total.rested_share,
        **total.engine_counts(),
        "draft_vocabulary": _draft_vocabulary(measured, measured.system.heads.drafter),
        "identical": differing == 0,
        "prompts_differing": differing,
        "identical_to_transformers": identical_to_transformers,
        **(measured.parts or total).milliseconds(),
        "nodes": shape.nodes if shape else None,
        "width": shape.width if shape else None,
        "depth": (shape and shape.depth) or max_depth,
        "draft_limits": measured.system.heads.limits,
        "tree_sizes": {str(nodes): passes for nodes, passes in sorted(total.nodes.items())},
    }


def baseline(measured: SystemResult, references: References, sizes: Sizes) -> dict[str, Any]:
    """The entry of autoregressive decoding, of one of transformers' assisted decoding methods, or of another engine.

    Tokens are compared only where they should be identical: headstart's autoregressive decoding with the same at the first batch size,
    and at temperature 0 a system that drafts with the same engine without drafts.
    """
    ours, greedy = isinstance(measured.system, HeadstartSystem), sizes.temperature == 0
    plain = references.ar_transformers if measured.system.plain is None else references.by_system[measured.system.plain]
    expected = references.ar_first_batch if ours else plain if greedy and measured.system.drafts else None
    differing = None if expected is None else measured.differing(expected)
    return {
        "name": measured.system.name,
        "kind": "assisted" if measured.system.drafts else "ar",
        **_common(measured, references, sizes),
        "repeated_8grams": repeated_ngrams([answer.tolist() for answers in measured.sequences.values() for answer in answers], 8),
        "identical": None if differing is None else differing == 0,
        "prompts_differing": differing,
        "prompts_differing_from_headstart": measured.differing(references.ar) if greedy and not ours else None,
    }


def repeated_ngrams(texts: Sequence[Sequence[int]], n: int) -> float | None:
    """The share of the n-grams of tokens that occur earlier in the same text (seq-rep-n of 1908.04319); None if all texts are shorter."""
    grams = [[tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in texts]
    total = sum(map(len, grams))
    return 1 - sum(len({*found}) for found in grams) / total if total else None


def _common(measured: SystemResult, references: References, sizes: Sizes) -> dict[str, Any]:
    total, ar, ar_transformers = measured.total, references.ar, references.ar_transformers
    ratios, to_transformers = measured.ratios(ar), measured.ratios(ar_transformers)
    rate = (total.passes + total.prefills) * sizes.weight_bytes / total.wall
    return {
        "temperature": sizes.temperature,
        "batch": sizes.batch,
        **_speeds(total, ar.total, ar_transformers.total),
        "speedup_vs_ar": median(ratios),
        "speedup_vs_transformers": median(to_transformers),
        "rounds": ratios,
        "spread": [min(ratios), max(ratios)],
        "weight_bytes_per_second": rate,
        "mbu": rate / sizes.memory_bytes_per_second,
        "capture": asdict(measured.system.capture) if measured.system.capture is not None else None,
        "teacher_forced": None,  # these two are filled in by `Judging`
        "verdict": None,
        "tasks": {
            task: _speeds(tally, ar.tasks[task], ar_transformers.tasks[task])
            | {"acceptance_per_depth": tally.acceptance_per_depth, **tally.engine_counts()}
            for task, tally in measured.tasks.items()
        },
    }


def busy(report: dict[str, Any]) -> str | None:
    """One line on what disturbed the measured speeds, and what to do; None if nothing was seen."""
    rows = [*report["results"], *report["baselines"]]
    others, free = report["other_programs"], report["processors"] - report["threads"]
    seen = [f"other programs used {others:.1f} of {report['processors']} processors meanwhile"] if others > free + STEADY else []
    worst = max(rows, key=lambda row: max(abs(ratio / row["speedup_vs_ar"] - 1) for ratio in row["spread"]))
    low, high = worst["spread"]
    if max(worst["speedup_vs_ar"] - low, high - worst["speedup_vs_ar"]) > STEADY * worst["speedup_vs_ar"]:
        seen.append(f"{worst.get('head', worst.get('name'))} was {low:.2f} to {high:.2f} x AR in the same prompts")
    return f"Speeds are uncertain: {'; '.join(seen)}. Measure again when the machine is idle." if seen else None


def _draft_vocabulary(measured: SystemResult, drafter: Drafter | None) -> dict[str, Any] | None:
    """The size of the drafter's vocabulary and its share of the generated tokens; None if it drafts every token."""
    if drafter is None or drafter.vocabulary is None:
        return None
    tokens = torch.cat([answer for answers in measured.sequences.values() for answer in answers])
    covered = torch.isin(tokens, drafter.vocabulary.cpu()).double().mean().item()
    return {"size": len(drafter.vocabulary), "vocab_size": drafter.backbone.vocab, "coverage": covered}


def _speeds(tally: Tally, ar: Tally, ar_transformers: Tally) -> dict[str, Any]:
    return {
        "tau": tally.tau,
        "tokens_per_second": tally.tokens_per_second,
        "decode_tokens_per_second": tally.decode_tokens_per_second,
        "speedup_vs_ar": tally.tokens_per_second / ar.tokens_per_second,
        "speedup_vs_transformers": tally.tokens_per_second / ar_transformers.tokens_per_second,
        "tokens": tally.tokens,
        "passes": tally.passes,
        "seconds": tally.wall,
    }
