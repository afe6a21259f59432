"""The prompts of one call: their prefill, and how many tokens may still follow each.

Shape suffixes: B batch, T positions, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.heads.backbone.features import Features
from headstart.heads.kv.ragged_cache import RaggedCache
from headstart.inference.engine.continued import Continued
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request
from headstart.inference.engine.sizes import TREE_SIZES


class Prompts:
    """The prompts of a call, without padding; a prompt is identified by the number of its sequence."""

    def __init__(self, request: Request, reader: Reader) -> None:
        self.reader, self.continued = reader, Continued(request, reader)
        self.rows = {number: ids_T[pad:] for number, (ids_T, pad) in enumerate(zip(request.ids_BT, request.pads_B, strict=True))}
        self.limits = {number: request.limit - pad for number, pad in enumerate(request.pads_B)}
        """The length at which each sequence ends, its prompt included."""
        self._start(request.limit)

    def put(self, number: int, ids_T: Tensor, limit: int) -> None:
        """Add a prompt, or replace that of a sequence which has ended."""
        self.rows[number], self.limits[number] = ids_T, limit
        self._start(limit)

    def _start(self, limit: int) -> None:
        self.reader.start(min(limit, self.reader.backbone.max_positions or limit) + TREE_SIZES[-1])

    def length(self, number: int) -> int:
        """The number of tokens of one prompt."""
        return len(self.rows[number])

    def tokens(self, number: int) -> list[int]:
        """The tokens of one prompt."""
        return self.rows[number].tolist()

    def prefill(self, numbers: list[int]) -> tuple[Features, RaggedCache, Tensor]:
        """Prefill some prompts, padded on the right: returns their features, their cache, and the logits ``[B, 1, V]`` after each."""
        rows = [self.rows[number] for number in numbers]
        lengths_B = torch.tensor([*map(len, rows)], device=rows[0].device)
        known = self.continued.prefill(rows[0])
        features, cache = known or self.reader.prompts(pad_sequence(rows, batch_first=True), lengths_B)
        self.continued.note(features)
        last_BD = features.hidden_BTD[torch.arange(len(numbers), device=lengths_B.device), lengths_B - 1]
        return features, cache, self.reader.backbone.readout(last_BD)[:, None]

    def remaining(self, number: int, written: int, past_limit: bool = False) -> int:
        """The number of tokens that may follow ``written`` tokens, by the length limit and the model's maximum number of positions.

        ``past_limit``: by the latter alone, unless rotary frequencies depend on the length.
        """
        backbone = self.reader.backbone
        most = backbone.max_positions or 1 << 31
        if not past_limit or backbone.rope_limit is not None:
            most = min(most, self.limits[number])
        return most - self.length(number) - written
