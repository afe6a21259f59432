"""A draft model: an ordinary causal language model with the backbone's vocabulary (2211.17192), or a parallel one (PARD, 2504.18583).

A parallel model reads the text, the root and mask tokens (``pard_token``) in one pass: the logits at the k-th mask draft depth k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.inference.serving.layouts.reader.base import NextToken, Reader


class DraftModelReader(Reader):
    """``reading.options``: the model, and the mask token of a parallel one."""

    method = "draft-model"

    def after(self, position: int) -> NextToken:
        model, mask = self.reading.options["model"], self.reading.options["mask"]
        tokens, vocab = self.text.tokens_T[: position - 1].tolist(), self.target.vocab

        def next_token(token: int) -> Tensor:
            tokens.append(token if mask is None or len(tokens) < position else mask)
            logits_V = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            whole_V = logits_V.new_full((vocab,), -torch.inf)  # over the backbone's vocabulary
            whole_V[: len(logits_V)] = logits_V[:vocab]
            return whole_V

        return next_token
