"""Measures forward passes on this machine by nodes, batch size and context, drafting times, and the calibration of draft scores.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from headstart import __version__
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.kv.ragged_cache import RaggedCache
from headstart.inference.bench.timing import WARM_UP, median_seconds
from headstart.inference.engine.request import require_memory
from headstart.inference.engine.tree import TUNED_SIZES, CandidateTree, Pool, TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, Tally, continue_text
from headstart.inference.runtime import Engine
from headstart.inference.sources.drafter_source import DrafterSource
from headstart.inference.sources.source import Draft
from headstart.inference.speculation.tuned import GREEDY, SAMPLED, Tuned
from headstart.support.errors import UserError

WIDE = TreeShape(nodes=40, width=8)
"""The tree used for calibration: larger than the fastest one, so that more nodes are verified."""


@dataclass(frozen=True)
class TunePlan:
    """The measurements of `tune`. Contexts are in tokens; decoding at other context lengths uses the costs of the nearest one."""

    rows: tuple[int, ...] = (1, 4)
    contexts: tuple[int, ...] = (256, 1024)
    nodes: tuple[int, ...] = TUNED_SIZES
    repeats: int = 7
    max_new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)


def tune(heads: SpeculativeModel, prompts: Sequence[Tensor], plan: TunePlan, say: Callable[[str], None] = lambda line: None) -> Tuned:
    """Measure the plan; ``say`` receives progress lines. Raises UserError if a context and its tree exceed the backbone's positions."""
    longest = heads.backbone.max_positions
    for context in plan.contexts:
        if longest is not None and context + max(plan.nodes) > longest:
            most = max(plan.nodes)
            raise UserError(
                f"context {context} and {most} nodes exceed the backbone's {longest} positions; lower --contexts or --max-nodes"
            )
        require_memory(heads.backbone, max(plan.rows), context, max(plan.nodes))
    engine = heads.engine(bool(heads.drafters or heads.proposers))
    curves: dict[str, Any] = {}
    others = []
    for context in plan.contexts:
        for rows in plan.rows:
            say(f"forward passes of batch size {rows} after {context} tokens")
            features, cache = _prompt(heads, engine, rows, context)
            curve = [[nodes, _pass(engine, cache, nodes, plan.repeats)] for nodes in plan.nodes]
            curves.setdefault(str(context), {})[str(rows)] = curve
            drafting = [_drafting(source, features, cache, plan.repeats) for source in engine.speculation.of_kind(DrafterSource)]
            others.append({"context": context, "rows": rows, "pass_ms": [[n, 1e3 * s] for n, s in curve], "drafting_ms": drafting})
    details = {
        "measured": date.today().isoformat(),
        "versions": {"headstart": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "by_context": others,
        "tau_of_wide_trees": _calibrate(heads, engine, prompts, plan, say),
    }
    calibration = {
        mode: {source.name: source.by_mode[mode == SAMPLED].calibration.to_json() for source in engine.speculation.sources}
        for mode in (GREEDY, SAMPLED)
    }
    return Tuned(curves, calibration, details)


def contexts_of(asked: Sequence[int] | None, max_nodes: int, backbone: Backbone) -> tuple[int, ...]:
    """The requested contexts; by default 256 and 1,024, limited by the backbone's context."""
    room = (backbone.max_positions or 1 << 31) - max_nodes
    return tuple(asked) if asked else tuple(dict.fromkeys(max(1, min(context, room)) for context in (256, 1024)))


def summary(tuned: Tuned) -> str:
    """The curves as lines of text: milliseconds of a forward pass by nodes."""
    lines = []
    for entry in tuned.details["by_context"]:
        passes = "  ".join(f"{nodes}: {ms:.1f}" for nodes, ms in entry["pass_ms"])
        drafting = "".join(f"; drafting {depths} depths {ms:.1f}" for times in entry["drafting_ms"] for depths, ms in times[-1:])
        lines.append(f"batch size {entry['rows']} after {entry['context']} tokens, ms by nodes: {passes}{drafting}")
    return "\n".join(lines)


def _prompt(heads: SpeculativeModel, engine: Engine, rows: int, context: int) -> tuple[Features, RaggedCache]:
    """Prefill random tokens: the cost of a forward pass does not depend on them."""
    tokens_BT = torch.randint(heads.backbone.vocab, (rows, context), generator=torch.Generator().manual_seed(0)).to(heads.backbone.device)
    with torch.no_grad():
        return engine.reader.prompts(tokens_BT, torch.full((rows,), context, device=tokens_BT.device))


def _pass(engine: Engine, cache: RaggedCache, nodes: int, repeats: int) -> float:
    """Seconds to verify a tree of that many nodes, including the transfer of the picks to the host."""
    parents = [max(0, (node - 1) // 2) for node in range(nodes)]
    rows = len(cache.lengths_B)
    tree = CandidateTree([list(range(nodes)) for _ in range(rows)], [parents for _ in range(rows)])
    cold = engine.reader.read.calls < WARM_UP
    return median_seconds(lambda: engine.reader.tree(cache, tree)[1].argmax(-1).tolist(), repeats, cold, engine.reader.backbone.device)


def _drafting(source: DrafterSource, features: Features, cache: RaggedCache, repeats: int) -> list[list[float]]:
    """Milliseconds of a draft by its depths: to extend the drafter's state by three tokens and to draft so many levels."""
    rows, longest = features.tokens_BT.shape[:2]
    index_BT = torch.arange(3, device=source.device).expand(rows, 3)
    few, width = features.gather(index_BT, index_BT >= 0), source.width(rows)
    source.start(sampled=False)
    source.join([], [], features)

    def draft(depths: int) -> None:
        source.state = prompt
        source.append(few)
        source.prepare(longest + 3, width, cache)
        source.draft(Draft([Pool(0) for _ in range(rows)], [depths] * rows), depths)

    with torch.no_grad():
        source.prepare(longest + 3, width, None)
        prompt = source.state
        cold = source.calls < WARM_UP
        times = [[depths, 1e3 * median_seconds(partial(draft, depths), repeats, cold, source.device)] for depths in source.counts]
    source.start(sampled=False)
    return times


def _calibrate(
    heads: SpeculativeModel, engine: Engine, prompts: Sequence[Tensor], plan: TunePlan, say: Callable[[str], None]
) -> dict[str, float]:
    """Decode the prompts with wide trees, which calibrates the engine's draft scores; returns tau by temperature."""
    if not engine.speculation.sources:
        return {}
    taus = {}
    for temperature in plan.temperatures:
        settings = Settings(plan.max_new_tokens, temperature, tree=WIDE)
        tally = Tally()
        for number, prompt_T in enumerate(prompts, 1):
            say(f"calibrating at temperature {temperature:g}: prompt {number} of {len(prompts)}")
            output = continue_text(heads, prompt_T, settings, seed=number)
            tally.add(output)
        taus[f"{temperature:g}"] = tally.tau
    return taus
