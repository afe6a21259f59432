"""Heads as read from a folder, the backbone under them, and the interface of the methods that draft.

Shape suffixes: T positions, D width, V vocabulary, DV draft vocabulary, K depth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from plain.layer import LayerShape

NextToken = Callable[[int], Tensor]
"""The logits ``[V]`` of the token that follows the one given; called with the root, then with each token drafted."""
Shapes = dict[str, tuple[int, ...]]


def _state(hidden: Tensor) -> Tensor:
    """A layer's hidden states ``[T, D]``: of DeepSeek-V4's several streams ``[T, S, D]`` the mean."""
    return hidden if hidden.ndim == 2 else hidden.mean(1)


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
    """The backbone as transformers runs it: greedy texts, and the hidden states of known tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self.config: Any = model.config.get_text_config()
        self.embed: Any = model.get_input_embeddings()
        self.dim: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self._unembed: Any = model.get_output_embeddings()
        self.vocab: int = self._unembed.weight.shape[0]
        stated = self.config.to_dict()
        self.max_positions: int | None = stated.get("max_position_embeddings") or stated.get("n_positions")
        self._cap: float | None = stated.get("final_logit_softcapping") or stated.get("logits_soft_cap")
        self._scale: float = float(stated.get("logit_scale") or 1.0) / float(stated.get("logits_scaling") or 1.0)
        lists = (one for one in model.get_decoder().modules() if isinstance(one, nn.ModuleList))
        self._layers = next(one for one in lists if len(one) == self.num_layers)

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
                lambda module, args, out, tap=tap: kept.update({tap: _state((out[0] if isinstance(out, tuple) else out)[0])})
            )
            for tap in set(taps) - {0}
        ]
        try:
            base = self.model.base_model if self.model.base_model is not self.model else self.model.model  # the latter is Llama-4's
            out = base(input_ids=tokens_T[None], use_cache=False, output_hidden_states=0 in taps)
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
        taken = signature(self.model.base_model.forward).parameters
        name = "cache" if "cache" in taken else "past_key_values"  # before transformers 5.24
        if "rope_deltas" in vars(self.model.base_model):
            self.model.base_model.rope_deltas = None  # of another batch (findings/transformers_rope_deltas_of_another_conversation.sh)
        for _ in range(count):
            tokens = [*prompt, *written] if "state" in taken else tokens  # RWKV, which takes no such cache
            ids_1T = torch.tensor([tokens], device=self._unembed.weight.device)
            out = self.model.base_model(input_ids=ids_1T, use_cache=True, **{name: cache})
            tokens = [int(self.logits(out.last_hidden_state[0, -1]).argmax())]
            written += tokens
        return written


@dataclass(frozen=True)
class Reading:
    """One way to read a folder. Tensors have one name each, whatever the format calls them."""

    reader: type[Reader]
    """What drafts with the heads."""
    config: Mapping[str, Any]
    """``config.json`` with its nested parts at the top level."""
    tensors: Mapping[str, Tensor]
    taps: tuple[int, ...] = ()
    """The layers read, as the residual stream after so many layers; empty: the final hidden state."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the method alone has, such as ``norm_output``."""
    layer: LayerShape | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape that each tensor should have, by the configuration."""
    optional: frozenset[str] = frozenset()
    """Names among ``shapes`` that may be absent."""

    def on(self, target: Target, text: Text) -> Reader:
        """Return the reader that drafts after prefixes of a text."""
        return self.reader(self, target, text)

    @property
    def faults(self) -> list[str]:
        """Name the tensors that are missing, unexpected or misshapen."""
        missing, unexpected = self.shapes.keys() - self.tensors.keys() - self.optional, self.tensors.keys() - self.shapes.keys()
        misshapen = {name for name in self.shapes.keys() & self.tensors.keys() if tuple(self.tensors[name].shape) != self.shapes[name]}
        return sorted(missing | unexpected | misshapen)

    @property
    def vocabulary(self) -> Tensor | None:
        """The backbone's token of each drafted one, int64 ``[DV]``, from ``d2t`` as offsets; None: the whole vocabulary."""
        offsets = self.tensors.get("d2t")
        return None if offsets is None else offsets.long() + torch.arange(len(offsets))

    def widened(self, logits_DV: Tensor, vocab: int) -> Tensor:
        """Return logits over the backbone's vocabulary, -inf for tokens that are not drafted.

        Without d2t, draft token i is token i, which is what engines take it for; offsets that lead outside the vocabulary are cut off.
        """
        tokens = self.vocabulary
        tokens = torch.arange(len(logits_DV)) if tokens is None else tokens.clamp(0, vocab - 1)
        whole_V = logits_DV.new_full((max(vocab, len(logits_DV)),), -torch.inf)
        return whole_V.scatter_reduce(0, tokens[: len(logits_DV)], logits_DV[: len(tokens)], "amax")[:vocab]


class Reader(ABC):
    """Drafts after any prefix of one text. A method is one subclass."""

    def __init__(self, reading: Reading, target: Target, text: Text) -> None:
        self.reading, self.target, self.text, self.tensors = reading, target, text, reading.tensors

    @abstractmethod
    def after(self, position: int) -> NextToken:
        """Return the draft after the first ``position`` tokens, the last of which is the root: the backbone has read those before it."""

    @property
    def max_depth(self) -> int | None:
        """The most tokens that can be drafted; None: any number."""
        return None

    @property
    def shape(self) -> LayerShape:
        assert self.reading.layer is not None
        return self.reading.layer

    def embed(self, tokens_T: Tensor) -> Tensor:
        """The embeddings of tokens: the heads' own where they have some, otherwise the backbone's."""
        own = self.tensors.get("embed_tokens.weight")
        embedded: Tensor = self.target.embed(tokens_T) if own is None else own[tokens_T]
        return embedded

    def shared_logits(self, hidden: Tensor) -> Tensor:
        """Logits by the heads' own output layer where they have one, otherwise by the backbone's."""
        own = self.tensors.get("lm_head.weight")
        return self.target.logits(hidden) if own is None else nn.functional.linear(hidden, own)

    @torch.no_grad()
    def draft(self, position: int, depth: int) -> list[int]:
        """Return the drafted tokens after the first ``position`` tokens, each the most likely one."""
        next_token, token, drafts = self.after(position), int(self.text.tokens_T[position - 1]), []
        for _ in range(depth):
            token = int(next_token(token).argmax())
            drafts.append(token)
        return drafts

    @torch.no_grad()
    def logits_at(self, position: int, drafts: Sequence[int]) -> Tensor:
        """Return the logits ``[K, V]`` of each draft after ``position`` tokens, given the drafts before it."""
        next_token = self.after(position)
        given = [int(self.text.tokens_T[position - 1]), *drafts[:-1]]
        return torch.stack([next_token(token) for token in given])
