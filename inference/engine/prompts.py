"""The prompts of one call: their prefill, and how many tokens may still follow each.

Shape suffixes: B batch, T positions, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.layers.ragged_cache import RaggedCache
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request
from headstart.inference.engine.sizes import TREE_SIZES


class Prompts:
    """The prompts of a call, padded on the right instead of the left; a prompt is identified by its row number."""

    def __init__(self, request: Request, reader: Reader) -> None:
        self.request, self.reader = request, reader
        T = request.ids_BT.shape[1]
        pads_B = torch.tensor(request.pads_B, device=request.ids_BT.device)
        index_BT = torch.arange(T, device=pads_B.device) + pads_B[:, None]
        self.tokens_BT, self.lengths_B = request.ids_BT.gather(1, index_BT.clamp(max=T - 1)), T - pads_B
        self.lengths: list[int] = self.lengths_B.tolist()
        reader.start(min(request.limit, reader.backbone.max_positions or request.limit) + TREE_SIZES[-1])

    def tokens(self, number: int) -> list[int]:
        """The tokens of one prompt."""
        return self.tokens_BT[number, : self.lengths[number]].tolist()

    def prefill(self, numbers: list[int]) -> tuple[Features, RaggedCache, Tensor]:
        """Prefill some prompts: returns their features, their cache, and the logits ``[B, 1, V]`` after each."""
        lengths_B = self.lengths_B[numbers]
        features, cache = self.reader.prompts(self.tokens_BT[numbers][:, : int(lengths_B.max())], lengths_B)
        last_BD = features.hidden_BTD[torch.arange(len(numbers), device=lengths_B.device), lengths_B - 1]
        return features, cache, self.reader.backbone.readout(last_BD)[:, None]

    def remaining(self, number: int, written: int, past_limit: bool = False) -> int:
        """The number of tokens that may follow ``written`` tokens, by the length limit and the model's maximum number of positions.

        ``past_limit``: by the latter alone, unless rotary frequencies depend on the length.
        """
        backbone = self.reader.backbone
        most = backbone.max_positions or 1 << 31
        if not past_limit or backbone.rope_limit is not None:
            most = min(most, self.request.limit - self.request.pads_B[number])
        return most - self.lengths[number] - written
