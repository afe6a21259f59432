"""transformers' filters for draft logits, in a form that can be captured.

Shape suffixes: N nodes, K the largest logits, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TOP_K_SIZES = tuple(16**power * 4 for power in range(1, 6))
"""Numbers of largest logits among which a top-k filter of drafts looks for its threshold; few, since each is captured apart."""


@dataclass(frozen=True)
class Filters:
    """transformers' top-k, top-p and min-p filters for draft logits; None: not filtered so.

    The values are tensors ``[1]``, so that a captured function serves all of them.
    """

    top_k_1: Tensor | None
    top_k_size: int
    """How many of the largest logits are looked at: at least top-k."""
    left_out_1: Tensor | None
    """``1 - top_p``."""
    min_p_1: Tensor | None

    @staticmethod
    def of(top_k: int, top_p: float, min_p: float, device: torch.device) -> Filters | None:
        """The filters with these values; None if they filter nothing (top_k 0, top_p 1 and min_p 0)."""
        if not top_k and top_p >= 1 and not min_p:
            return None
        size = next((size for size in TOP_K_SIZES if size >= top_k), TOP_K_SIZES[-1]) if top_k else 0
        return Filters(
            torch.full((1,), min(top_k, size), device=device) if top_k else None,
            size,
            torch.full((1,), 1 - top_p, dtype=torch.float32, device=device) if top_p < 1 else None,
            torch.full((1,), min_p, dtype=torch.float32, device=device) if min_p else None,
        )

    def __call__(self, logits_NV: Tensor) -> Tensor:
        """Set the logits of filtered tokens to -inf."""
        if self.top_k_1 is not None:
            V = logits_NV.shape[-1]
            largest_NK = logits_NV.topk(min(self.top_k_size, V)).values
            index_N1 = (self.top_k_1.clamp(max=V) - 1).expand(logits_NV.shape[0], 1)
            logits_NV = logits_NV.masked_fill(logits_NV < largest_NK.gather(1, index_N1), -math.inf)
        if self.left_out_1 is not None:
            ascending_NV = logits_NV.sort(-1)
            out_NV = ascending_NV.values.softmax(-1).cumsum(-1) <= self.left_out_1
            last = logits_NV.shape[-1] - 1
            out_NV = out_NV & (torch.arange(last + 1, device=out_NV.device) < last)  # an assignment of False would not be compiled
            logits_NV = logits_NV.masked_fill(out_NV.scatter(1, ascending_NV.indices, out_NV), -math.inf)
        if self.min_p_1 is not None:
            probs_NV = logits_NV.softmax(-1)
            logits_NV = logits_NV.masked_fill(probs_NV < self.min_p_1 * probs_NV.amax(-1, keepdim=True), -math.inf)
        return logits_NV
