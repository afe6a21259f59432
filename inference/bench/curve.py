"""The cost curve of a benchmark report: the time of a decoding step by tree size on this machine.

Shape suffix: T positions.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from headstart.inference.bench.timing import warm_up
from headstart.inference.engine.sizes import CURVE_SIZES
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, Tally, continue_text
from headstart.support.progress import watched

TOKENS = 24
REPEATS = 3


def cost_curve(heads: SpeculativeModel, prompt_T: Tensor, tokens: int = TOKENS) -> list[dict[str, float]]:
    """Milliseconds per decoding step by nodes: verification (``verify_ms``) and whole step (``pass_ms``), the best of `REPEATS` runs."""

    def decode(nodes: int) -> Tally:
        tally = Tally()
        settings = Settings(min(tokens, TOKENS), tree=TreeShape(nodes=nodes, width=max(1, nodes // 4)))
        tally.add(continue_text(heads, prompt_T, settings, 0, timed=True))
        return tally

    def passes(nodes: int) -> int:
        return decode(nodes).reads

    best: dict[int, dict[str, float]] = {}
    for size in watched(CURVE_SIZES, "timing steps by tree size", "size"):
        warm_up([partial(passes, size)] * REPEATS, at_least=1)
        for _ in range(REPEATS):
            tally = decode(size)
            times = tally.milliseconds()
            nodes = max(tally.nodes, default=1)
            point = {"verify_ms": times["verify_ms"], "pass_ms": sum(times.values())}
            known = best.get(nodes, point)
            best[nodes] = {part: min(known[part], milliseconds) for part, milliseconds in point.items()}
    return [{"nodes": nodes, **times} for nodes, times in sorted(best.items())]
