"""What a pass takes by how many nodes it reads, on this machine: for looking at.

Shape suffix: T positions.
"""

from __future__ import annotations

from torch import Tensor

from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, Tally, continue_text

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
TOKENS = 24
REPEATS = 3


def cost_curve(heads: SpeculativeModel, prompt_T: Tensor, tokens: int = TOKENS) -> list[dict[str, float]]:
    """Milliseconds a pass by nodes: reading (``verify_ms``) and all of it (``pass_ms``), the least of a few times."""
    best: dict[int, dict[str, float]] = {}
    for _ in range(REPEATS):
        for size in SIZES:
            tally = Tally()
            settings = Settings(min(tokens, TOKENS), tree=TreeShape(nodes=size, width=max(1, size // 4)))
            tally.add(continue_text(heads, prompt_T, settings, 0, timed=True))
            nodes = max(tally.nodes, default=1)
            times = tally.milliseconds()
            found = {"verify_ms": times["verify_ms"], "pass_ms": sum(times.values())}
            known = best.get(nodes, found)
            best[nodes] = {part: min(known[part], milliseconds) for part, milliseconds in found.items()}
    return [{"nodes": nodes, **times} for nodes, times in sorted(best.items())]
