"""How good the heads are at what they are for: accepted tokens per backbone pass, by really decoding held-out prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.inference.heads import Heads
from headstart.inference.measure import measure_tau
from headstart.inference.tree import TreeShape
from headstart.training.recipe import Eval


def evaluate(backbone: Backbone, drafter: Drafter, prompts: list[Tensor], settings: Eval, seed: int) -> dict[str, Any]:
    """``tau`` (the backbone's own token included) and ``acceptance_per_depth``; leaves the random state and the mode as they were."""
    training = drafter.training
    devices = [backbone.device] if backbone.device.type == "cuda" else []
    drafter.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            measured = measure_tau(
                Heads(backbone, drafter),
                prompts,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                seed=seed,
                tree=TreeShape(nodes=settings.nodes, width=settings.width),
            )
    finally:
        drafter.train(training)
    return {"tau": measured["tau"], "acceptance_per_depth": measured["acceptance_per_depth"]}
