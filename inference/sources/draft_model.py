"""A smaller causal language model with the same vocabulary as a drafter, untrained (the original speculative decoding, 2211.17192).

It has its own KV cache. Newly accepted tokens are kept until the next draft, which processes them and the root in one forward pass. Its
candidates are ranked with the noise of the backbone's picks, so that both models tend to agree when sampling too.

Shape suffixes: B batch, T positions, N tree nodes, S slots, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter, DrafterConfig, require_count
from headstart.heads.layers.levels import Rows, read_chain, read_level
from headstart.heads.layers.ragged_cache import RaggedCache, TreeCache
from headstart.heads.layers.row_state import RowState
from headstart.support.errors import UserError

Tokenizers = tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]
"""The tokenizers of the backbone and of the draft model."""


@dataclass(frozen=True)
class State(RowState):
    """The rows in the draft model's cache, and accepted tokens that it has not processed yet."""

    rows: Rows
    waiting_BT: Tensor | None = None
    """Accepted tokens to process, right-padded."""
    counts_B: Tensor | None = None
    """The number of waiting tokens of each row."""


class DraftModel(Drafter):
    """A draft model. ``model``: any causal model of transformers that can be a backbone, on the backbone's device.

    ``tokenizers``: the backbone's and the model's, to compare the tokens of equal ids; without them, both vocabularies must have the same
    size. Raises UserError if the vocabularies differ.
    """

    reads_hidden = False
    capturable = True

    def __init__(
        self,
        backbone: Backbone,
        model: PreTrainedModel | Backbone,
        *,
        depth: int = 6,
        tokenizers: Tokenizers | None = None,
    ) -> None:
        require_count("depth", depth, of="draft model")
        super().__init__(backbone, DrafterConfig(depth=depth))
        self.small = model if isinstance(model, Backbone) else Backbone(model)
        self.model = self.small.model   # a submodule, so that moved weights are noticed
        _require_fitting(backbone, self.small, tokenizers)
        if self.small.vocab < backbone.vocab:
            self.vocabulary = torch.arange(self.small.vocab, device=backbone.device)
        self.view: TreeCache | None = None

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return self.small.readout(hidden)[..., : self.backbone.vocab]

    def join(self, state: State, other: State) -> State:
        return State(self._settle(state).join(self._settle(other)))

    def begin(self, features: Features, state: State | None = None) -> State:
        if state is None:
            return State(self._prompts(features.tokens_BT, features.lengths_B))
        return State(self._settle(state), features.tokens_BT, features.lengths_B)

    def _prompts(self, tokens_BT: Tensor, lengths_B: Tensor) -> Rows:
        """Prefill new rows, right-padded."""
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        if self.small.max_positions is not None:
            places_T = places_T.clamp(max=self.small.max_positions - 1)
        cache = DynamicCache()   # without the model's configuration, sliding-window layers keep all keys
        self.small.read(tokens_BT.clamp(max=self.small.vocab - 1), cache, places_T.expand_as(tokens_BT))
        ragged = RaggedCache([(layer.keys, layer.values) for layer in cache.layers], lengths_B)
        if self.view is None:
            self.view = TreeCache(ragged.groups)
        return Rows((ragged.keys, ragged.values), lengths_B)

    def _settle(self, state: State) -> Rows:
        """Process the waiting tokens; returns the extended rows."""
        rows = Rows(state.rows.stores, state.rows.lengths_B)
        if state.waiting_BT is None or state.counts_B is None:
            return rows
        assert self.view is not None
        read_chain(self.small, self.view, rows, state.waiting_BT)
        return replace(rows, lengths_B=rows.lengths_B + state.counts_B)

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        assert self.view is not None
        if depth or state.waiting_BT is None or state.counts_B is None:
            hidden_BND, rows = read_level(self.small, self.view, state.rows, tokens_BN, parents_BN, depth)
            return hidden_BND, State(rows)
        counts_B1 = state.counts_B[:, None]
        tokens_BT = torch.cat([state.waiting_BT, tokens_BN], 1).scatter(1, counts_B1, tokens_BN)   # the root after a row's tokens
        hidden_BTD = read_chain(self.small, self.view, state.rows, tokens_BT)
        hidden_B1D = hidden_BTD.gather(1, counts_B1[..., None].expand(-1, -1, hidden_BTD.shape[-1]))
        itself_B11 = torch.ones_like(counts_B1, dtype=torch.bool)[..., None]
        depths_1 = torch.zeros(1, dtype=torch.int64, device=tokens_BN.device)
        return hidden_B1D, State(Rows(state.rows.stores, state.rows.lengths_B + state.counts_B, itself_B11, depths_1))


def load_draft_model(
    path: str,
    backbone: Backbone,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    depth: int = 6,
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    trust_remote_code: bool = False,
) -> DraftModel:
    """Load a model from a folder or hub id as a drafter onto the backbone's device; see `load_backbone` for ``dtype``.

    ``tokenizer``: the backbone's, to compare with the draft model's. Raises UserError if there is no such model or the vocabularies differ.
    """
    try:
        small = load_backbone(path, dtype=dtype, trust_remote_code=trust_remote_code, device=backbone.device)
        own = load_tokenizer(path, trust_remote_code=trust_remote_code) if tokenizer is not None else None
    except UserError as error:
        raise UserError(f"draft model: {error}") from None
    return DraftModel(backbone, small, depth=depth, tokenizers=None if tokenizer is None or own is None else (tokenizer, own))


def _require_fitting(backbone: Backbone, small: Backbone, tokenizers: Tokenizers | None) -> None:
    """Raise UserError unless the small model can draft for the backbone: no recurrent layers, the same device and the same vocabulary."""
    ours, theirs = (model.name or type(model.model).__name__ for model in (backbone, small))
    if small.recurrent is not None:
        raise UserError(f"draft model {theirs} has recurrent layers, whose states can't follow drafted nodes; use one with attention alone")
    if small.device != backbone.device:
        raise UserError(f"draft model {theirs} is on {small.device} and backbone {ours} on {backbone.device}; move one to the other")
    if tokenizers is None:
        if small.vocab != backbone.vocab:
            raise UserError(
                f"draft model {theirs} has a vocabulary of {small.vocab} and backbone {ours} of {backbone.vocab}; "
                "draft with a model of the same vocabulary, or give both tokenizers if one size is padded"
            )
        return
    mine, other = ({place: token for token, place in one.get_vocab().items()} for one in tokenizers)
    apart = [place for place in mine if place in other and mine[place] != other[place]]
    if apart:
        place = min(apart)
        raise UserError(
            f"token {place} is {other[place]!r} to draft model {theirs} and {mine[place]!r} to backbone {ours} "
            f"({len(apart)} tokens differ); draft with a model of the same vocabulary"
        )
