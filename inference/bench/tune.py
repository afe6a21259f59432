"""Measures this machine: time of a forward pass by nodes, batch size and context, time of drafting, and the calibration of draft scores.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
import transformers
from torch import Tensor

from headstart import __version__
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.inference.bench.timing import WARM_UP, median_seconds
from headstart.inference.engine.cache import RaggedCache
from headstart.inference.engine.tree import CandidateTree, TreeShape
from headstart.inference.generate import Engine, SpeculativeModel
from headstart.inference.measure import Settings, Tally, continue_text
from headstart.inference.sources.expansion import DraftScoring, Growth, root_level
from headstart.inference.speculation.speculation import WIDTH
from headstart.inference.speculation.tuned import GREEDY, SAMPLED, Tuned
from headstart.support.errors import UserError

NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WIDE = TreeShape(nodes=40, width=8)
"""The tree of calibration: larger than is fastest, so that more nodes are verified."""


@dataclass(frozen=True)
class TunePlan:
    """What is measured. Contexts are in tokens; a sequence's forward passes count as costing what was measured at the nearest context."""

    rows: tuple[int, ...] = (1, 4)
    contexts: tuple[int, ...] = (256, 1024)
    nodes: tuple[int, ...] = NODES
    repeats: int = 7
    max_new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)


def tune(heads: SpeculativeModel, prompts: Sequence[Tensor], plan: TunePlan, say: Callable[[str], None] = lambda line: None) -> Tuned:
    """Measure all of it; ``say`` gets lines of progress. Raises UserError if a context is longer than the backbone's."""
    longest = heads.backbone.max_positions
    for context in plan.contexts:
        if longest is not None and context + max(plan.nodes) > longest:
            most = max(plan.nodes)
            raise UserError(
                f"context {context} and {most} nodes exceed the backbone's {longest} positions; lower --contexts or --max-nodes"
            )
    engine = heads.engine(bool(heads.drafters or heads.proposers))
    curves: dict[str, Any] = {}
    others = []
    for context in plan.contexts:
        for rows in plan.rows:
            say(f"forward passes of batch size {rows} after {context} tokens")
            features, cache = _prompt(heads, engine, rows, context)
            curve = [[nodes, _pass(engine, cache, nodes, plan.repeats)] for nodes in plan.nodes]
            curves.setdefault(str(context), {})[str(rows)] = curve
            drafting = [_drafting(growth, features, cache, plan.repeats) for growth in _growths(engine)]
            others.append({"context": context, "rows": rows, "pass_ms": [[n, 1e3 * s] for n, s in curve], "drafting_ms": drafting})
    details = {
        "measured": date.today().isoformat(),
        "versions": {"headstart": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "by_context": others,
        "tau_of_wide_trees": _calibrate(heads, engine, prompts, plan, say),
    }
    by_mode = engine.speculation.by_mode if engine.speculation is not None else {}
    calibration = {SAMPLED if sampled else GREEDY: learned.calibration.to_json() for sampled, learned in by_mode.items()}
    return Tuned(curves, calibration, details)


def contexts_of(asked: Sequence[int] | None, max_nodes: int, backbone: Backbone) -> tuple[int, ...]:
    """The contexts asked for; by default 256 and 1,024, as far as the backbone's context goes."""
    room = (backbone.max_positions or 1 << 31) - max_nodes
    return tuple(asked) if asked else tuple(dict.fromkeys(max(1, min(context, room)) for context in (256, 1024)))


def summary(tuned: Tuned) -> str:
    """The curves as lines: milliseconds of a forward pass by nodes."""
    lines = []
    for entry in tuned.details["by_context"]:
        passes = "  ".join(f"{nodes}: {ms:.1f}" for nodes, ms in entry["pass_ms"])
        drafting = "".join(f"; drafting {one['begin'] + sum(one['depths']):.1f}" for one in entry["drafting_ms"])
        lines.append(f"batch size {entry['rows']} after {entry['context']} tokens, ms by nodes: {passes}{drafting}")
    return "\n".join(lines)


def _growths(engine: Engine) -> list[Growth]:
    return engine.speculation.growths if engine.speculation is not None else []


def _prompt(heads: SpeculativeModel, engine: Engine, rows: int, context: int) -> tuple[Features, RaggedCache]:
    """Prefill any tokens: the cost of a forward pass does not depend on them."""
    tokens_BT = torch.randint(heads.backbone.vocab, (rows, context), generator=torch.Generator().manual_seed(0)).to(heads.backbone.device)
    with torch.no_grad():
        return engine.reader.prompts(tokens_BT, torch.full((rows,), context, device=tokens_BT.device))


def _pass(engine: Engine, cache: RaggedCache, nodes: int, repeats: int) -> float:
    """Seconds of verifying a tree of that many nodes, with the picks brought to the host."""
    parents = [max(0, (node - 1) // 2) for node in range(nodes)]
    rows = len(cache.lengths_B)
    tree = CandidateTree([list(range(nodes)) for _ in range(rows)], [parents for _ in range(rows)])
    cold = engine.reader.read.calls < WARM_UP
    return median_seconds(lambda: engine.reader.tree(cache, tree)[1].argmax(-1).tolist(), repeats, cold, engine.reader.backbone.device)


def _drafting(growth: Growth, features: Features, cache: RaggedCache, repeats: int) -> dict[str, Any]:
    """Milliseconds of extending the drafter's state with three tokens, and of each draft level."""
    rows, device = features.tokens_BT.shape[0], features.tokens_BT.device
    room = features.tokens_BT.shape[1] + (growth.drafter.depth + 2) * (WIDTH + 1)
    with torch.no_grad():
        state = growth.extend_state(features, None, room)
        index = torch.arange(3, device=device).expand(rows, 3)
        few = features.gather(index, index >= 0)
        cold = growth.begin.calls < WARM_UP
        begin = median_seconds(lambda: growth.extend_state(few, state, room), repeats, cold, device)
        state = growth.drafter.prepare_draft(growth.extend_state(few, state, room), cache, (growth.drafter.depth + 2) * (WIDTH + 1))
        level, depths = root_level([0] * rows, device), []
        for depth in range(growth.drafter.depth):
            before = (level, state)
            depths.append(
                median_seconds(lambda d=depth, b=before: _level(growth, d, *b)[0].tokens_BW.tolist(), repeats, cold, device)   # type: ignore[misc]
            )
            level, state = _level(growth, depth, *before)
    return {"begin": 1e3 * begin, "depths": [1e3 * seconds for seconds in depths]}


def _level(growth: Growth, depth: int, level: Any, state: Any) -> tuple[Any, Any]:
    return growth.level(depth, state, level, WIDTH, DraftScoring())


def _calibrate(
    heads: SpeculativeModel, engine: Engine, prompts: Sequence[Tensor], plan: TunePlan, say: Callable[[str], None]
) -> dict[str, float]:
    """Decode the prompts with wide trees, by which the engine calibrates its scores; tau by temperature."""
    if engine.speculation is None:
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
