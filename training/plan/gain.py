"""Whether heads will pay on this machine, before they are trained: untrained ones draft in the time in which trained ones do.

A chain of k drafted tokens, of which each is accepted with probability p if all before it are, writes 1 + p + ... + p^k tokens in the
time of drafting and verifying it. A pass over several tokens is taken to last no shorter than one over a single token, which noise may say.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch

from headstart.heads.base import Drafter
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, continue_text

PROMPT, WRITTEN, WARM = 64, 12, 32
"""Tokens of the text that is continued, tokens written to it in each shape, and by passes without drafts before, as captures need."""
DEPTHS, ACCEPTANCE = (1, 2, 4, 8), (0.4, 0.6, 0.8)


def gain_of(drafter: Drafter) -> dict[str, Any]:
    """Return ``step_ms`` of decoding without drafts, ``chains``: depth -> ``draft_ms`` and ``verify_ms``, and what follows.

    ``break_even`` is the acceptance from which on some chain is faster than no drafts, None if none is; ``expected`` has, by acceptance,
    the best depth, its ``tau`` and ``speedup``. The drafter no longer trains afterwards. Raises UserError for a model that decodes with
    no drafts.
    """
    heads = SpeculativeModel(drafter.backbone, drafter)
    depths = sorted({*(depth for depth in DEPTHS if depth < drafter.depth), drafter.depth})
    drafter.eval().requires_grad_(False)  # drafts of weights in training are not captured
    steps_of(heads, 0, WARM)
    turns = [{depth: steps_of(heads, depth, WRITTEN) for depth in (0, *depths)} for _ in range(3)]
    times = {depth: turns[1][depth] + turns[2][depth] for depth in turns[0]}  # by then all passes are captured, where they are at all
    (_, step), *rest = ((quick(times[depth], "draft"), quick(times[depth], "verify", "host")) for depth in times)
    chains = dict(zip(depths, rest, strict=True))
    costs = {depth: draft / step + max(verify / step, 1.0) for depth, (draft, verify) in chains.items()}
    best = {p: best_chain(p, costs) for p in ACCEPTANCE}
    return {
        "step_ms": step,
        "chains": {depth: {"draft_ms": draft, "verify_ms": verify} for depth, (draft, verify) in chains.items()},
        "break_even": next((p / 100 for p in range(101) if best_chain(p / 100, costs)[1] > 1), None),
        "expected": {p: {"depth": depth, "tau": tau(p, depth), "speedup": speedup} for p, (depth, speedup) in best.items()},
    }


def steps_of(heads: SpeculativeModel, depth: int, tokens: int) -> list[dict[str, float]]:
    """Return the seconds by part of the steps that continue a text by so many tokens, with chains of this depth; 0: without drafts."""
    ids_T = torch.randint(heads.backbone.vocab, (PROMPT,), generator=torch.Generator().manual_seed(0)).to(heads.backbone.device)
    settings = Settings(tokens, tree=TreeShape(1 + max(depth, 1), 1, max(depth, 1)))
    return [step.seconds for step in continue_text(heads, ids_T, settings, 0, speculate=depth > 0, timed=True).steps]


def quick(steps: list[dict[str, float]], *parts: str) -> float:
    """Return the milliseconds that these parts take in the quicker steps, which other programs did not hold up: the lower quartile."""
    return 1e3 * statistics.quantiles([sum(step[part] for part in parts) for step in steps], n=4)[0]


def tau(p: float, depth: int) -> float:
    """Return the mean tokens of a pass that verifies a chain of that depth."""
    return sum(p**k for k in range(depth + 1))


def best_chain(p: float, costs: Mapping[int, float]) -> tuple[int, float]:
    """Return the depth at which acceptance ``p`` brings most, and how many times as fast as without drafts that is.

    ``costs``: depth -> steps without drafts that drafting and verifying such a chain takes.
    """
    return max(((depth, tau(p, depth) / cost) for depth, cost in costs.items()), key=lambda found: found[1])
