"""The backbone as transformers runs it: greedy texts, and the hidden states of known tokens.

Shape suffixes: T positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from headstart.heads.backbone.backbone import load_backbone
from headstart.support.errors import UserError


@dataclass(frozen=True)
class Text:
    """Tokens and the backbone's hidden states at them."""

    tokens_T: Tensor
    hidden_TD: Tensor
    """The final hidden state, after the final norm."""
    streams: Mapping[int, Tensor]
    """The residual stream ``[T, D]`` after so many layers (0: the embedding), before any final norm."""

    def concatenated(self, taps: Sequence[int]) -> Tensor:
        return torch.cat([self.streams[tap] for tap in taps], -1)


class Target:
    """The backbone of heads that are read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self.config: Any = model.config.get_text_config()
        self.embedding: Any = model.get_input_embeddings()
        self.dim: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self._unembed: Any = model.get_output_embeddings()
        self.vocab: int = self._unembed.weight.shape[0]
        stated = self.config.to_dict()
        self.max_positions: int | None = stated.get("max_position_embeddings") or stated.get("n_positions")
        self._cap: float | None = stated.get("final_logit_softcapping")
        self._scale: float = float(stated.get("logit_scale") or 1.0) / float(stated.get("logits_scaling") or 1.0)
        lists = [one for one in model.get_decoder().modules() if isinstance(one, nn.ModuleList) and len(one) == self.num_layers]
        if not lists:
            raise UserError(f"{type(model).__name__} has no list of its {self.num_layers} decoder layers, which the reference engine reads")
        self._layers = lists[0]

    def embed(self, tokens_T: Tensor) -> Tensor:
        return self.embedding(tokens_T)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map final hidden states to logits over the vocabulary, as the model does: by its output layer, which may have a bias."""
        logits = self._unembed(hidden) * self._scale
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    @torch.no_grad()
    def read(self, tokens: Sequence[int], taps: Sequence[int]) -> Text:
        """Run the model over the tokens and keep the hidden states after these layers."""
        tokens_T = torch.tensor(tokens, device=self._unembed.weight.device)
        kept: dict[int, Tensor] = {}
        handles = [
            self._layers[tap - 1].register_forward_hook(
                lambda module, args, out, tap=tap: kept.update({tap: (out[0] if isinstance(out, tuple) else out)[0]})
            )
            for tap in set(taps) - {0}
        ]
        try:
            out = self.model.base_model(input_ids=tokens_T[None], use_cache=False, output_hidden_states=0 in taps)
        finally:
            for handle in handles:
                handle.remove()
        if 0 in taps:
            kept[0] = out.hidden_states[0][0]
        return Text(tokens_T, out.last_hidden_state[0], kept)

    @torch.no_grad()
    def continued(self, prompt: Sequence[int], count: int) -> list[int]:
        """Write ``count`` tokens after the prompt, each the most likely one; end-of-text tokens do not end it."""
        written: list[int] = []
        tokens, cache = list(prompt), DynamicCache(config=self.model.config)
        for _ in range(count):
            ids_1T = torch.tensor([tokens], device=self._unembed.weight.device)
            out = self.model.base_model(input_ids=ids_1T, past_key_values=cache, use_cache=True)
            tokens = [int(self.logits(out.last_hidden_state[0, -1]).argmax())]
            written += tokens
        return written


def load_target(path: str) -> Target:
    """Load the backbone in fp32, as `load_backbone` does. Raises UserError."""
    return Target(load_backbone(path, dtype="fp32", device="cpu").model)
