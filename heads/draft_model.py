"""A smaller causal language model as a drafter (2211.17192), distilled (DistillSpec, 2310.08461), one token per pass or parallel (PARD).

The model is a pretrained one with the backbone's vocabulary, the backbone's own layers pruned to a few, or a new one. It reads tokens
alone and has a KV cache of its own. Newly accepted tokens are kept until the next draft, which processes them and the root in one pass.

All depths share the hidden states of one forward pass: the model's state at position ``t+1+k`` drafts depth k. A parallel model (PARD,
2504.18583) drafts depth k at the k-th of the mask tokens that follow the root, all in one pass; each attends to the tokens up to the
root and to the masks before it. It is trained at sampled anchors, so that few masks are added to a sequence.

Shape suffixes: B batch, T positions, N tree nodes, M anchors, R anchors of a row, X masks of a row, K depth, D width, V vocabulary.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from annotated_types import Ge
from pydantic import model_validator
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads.backbone import smaller
from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.heads.backbone.features import Anchors, Features, anchors_by_row, dense_from_anchors
from headstart.heads.backbone.hooks import contexts
from headstart.heads.base import Drafter, DrafterConfig, require_count
from headstart.heads.layers.cached_model import CachedModel, State
from headstart.heads.layers.causal_attention import document_masks, document_positions, draft_masks
from headstart.support.config import Depth, Layers, RuleError
from headstart.support.errors import UserError, naming

DRAFT_DEPTH = 6
"""Tokens drafted beyond the root unless a recipe says how many."""


class DraftModel(Drafter):
    """A draft model; see `load_draft_model` and `DraftModel.of` for drafting with one that is not trained here.

    Raises UserError for a configuration that cannot be built.
    """

    class Config(DrafterConfig):
        depth: Depth = 1
        """Depths in the loss. Depths share their hidden states, so 1 is enough but for parallel drafts and objective.on_policy."""
        draft_depth: Depth | None = None
        """Tokens beyond the root that it drafts when decoding (null: depth, at least 6; adaptive trees twice as many; parallel: depth)."""
        path: str | None = None
        """Folder or hub id of the model to start from (null: the backbone, pruned)."""
        layers: Layers | None = None
        """Layers of the backbone that a pruned model keeps (null: a quarter of them)."""
        choose: Literal["first", "even"] = "first"
        """Which layers a pruned model keeps: the first ones, or layers at even distances, the last among them."""
        untie: bool = False
        """Give the output layer weights of its own in a model that shares those of the embedding."""
        architecture: dict[str, Any] | None = None
        """The model's config.json, as checkpoints store it (null: that of path, or the backbone's with fewer layers). Without path the
        model starts from random weights."""
        parallel: bool = False
        """Draft all depths in one forward pass, by mask tokens (PARD)."""
        mask_token: Annotated[int, Ge(0)] | None = None
        """The mask: a token that texts do not contain (null: the last of the vocabulary, which is padding in many models)."""

        @model_validator(mode="after")
        def _coherent(self) -> Self:
            if self.layers is not None and (self.path or self.architecture):
                raise RuleError("layers", "prunes the backbone and goes with neither path nor architecture", self.layers)
            if self.parallel and self.depth < 2:
                raise RuleError("depth", "is at least 2 with parallel, which drafts that many tokens in a pass", self.depth)
            if self.mask_token is not None and not self.parallel:
                raise RuleError("mask_token", "goes with parallel: true", self.mask_token)
            return self

    config: Config
    reads_hidden = False
    capturable = pretrained = recomputable = True

    def __init__(self, backbone: Backbone, config: Config, model: PreTrainedModel | Backbone | None = None) -> None:
        """``model``: the model itself, with the backbone's vocabulary; by default one is allocated as ``config`` says."""
        layers = _layers(config, backbone.num_layers) if model is None else []
        model = _allocated(backbone, config, layers) if model is None else model
        whole = model.model if isinstance(model, Backbone) else model
        if not layers:
            config = config.model_copy(update={"architecture": smaller.stated_config(whole.config)})
        super().__init__(backbone, config)
        self.layers = layers
        """Numbers of the backbone's layers that a pruned model keeps."""
        self.model, self.width = whole, whole.config.get_text_config().hidden_size
        self._cached = CachedModel(model) if isinstance(model, Backbone) else None
        self.masks = config.depth - 1 if config.parallel else 0
        """Number of mask tokens after the root."""
        self.mask = backbone.vocab - 1 if config.mask_token is None else config.mask_token
        if config.parallel:
            self.sequential, self.all_depths_at_once, self.anchor_share = False, True, 0.25
            if self.mask >= backbone.vocab:
                raise UserError(f"drafter.mask_token is a token of the vocabulary, from 0 to {backbone.vocab - 1}; got {self.mask}")
            whole.config.pard_token = self.mask  # the name under which engines look for it

    @classmethod
    def of(
        cls,
        backbone: Backbone,
        model: PreTrainedModel | Backbone,
        *,
        depth: int | None = None,
        tokenizers: smaller.Tokenizers | None = None,
    ) -> Self:
        """Return a drafter that is ``model`` as it is: any causal model that can be a backbone, on the backbone's device.

        ``depth``: the number of tokens drafted; None: `DRAFT_DEPTH`, and in adaptive trees up to twice as many.
        ``tokenizers``: the backbone's and the model's, to compare the tokens of equal ids; the model's embedding is then given the size of
        the backbone's vocabulary, in place. Without them both must have it. Raises UserError if the vocabularies differ.
        """
        if depth is not None:
            require_count("depth", depth, of="draft model")
        small = model if isinstance(model, Backbone) else Backbone(model)
        smaller.require_fitting(backbone, small, tokenizers)
        kept = small if small.vocab == backbone.vocab else small.model
        smaller.resize(small.model, backbone.vocab)
        return cls(backbone, cls.Config(draft_depth=depth), kept)

    @property
    def cached(self) -> CachedModel:
        """The model with its KV cache. Made when it is first used, since the model is probed, which takes weights."""
        self._cached = self._cached or CachedModel(smaller.trainable(self.model))
        return self._cached

    @property
    def small(self) -> Backbone:
        return self.cached.model

    def init_from(self, backbone: Backbone) -> None:
        """Initialise the model: from the backbone's layers, from ``path``, or at random."""
        if self.layers:
            smaller.copy_pruned(backbone, self.model, self.layers)
        elif self.config.path is not None:
            source = _load(self.config.path, backbone)
            smaller.require_fitting(backbone, source, smaller.find_tokenizers(backbone.name, self.config.path))
            smaller.copy_model(source.model, self.model)
        else:
            self.model.init_weights()

    @property
    def default_depth(self) -> int:
        return self.trained_depth if self.config.parallel else max(self.trained_depth, DRAFT_DEPTH)

    @property
    def max_depth(self) -> int | None:
        """A parallel model drafts as many tokens as it was trained for."""
        return self.trained_depth if self.config.parallel else None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or convert the weights; buffers, such as rotary frequencies, keep their precision."""
        exact = {name: buffer for name, buffer in self.model.named_buffers() if buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            owner, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(owner)
            setattr(module, leaf, buffer.to(module.get_buffer(leaf).device))
        return self

    # Training.

    def forward(self, features: Features, at: Anchors | None = None) -> list[Tensor]:
        if not self.config.parallel:
            return super().forward(features, at)
        if at is None:
            return dense_from_anchors(lambda anchors: self.forward(features, anchors), features.tokens_BT)
        (B, T), N, cache = features.tokens_BT.shape, self.masks, DynamicCache()  # without a configuration, all keys are kept
        text_BTD = self._read(features, T, cache)
        rank_M, anchor_BR = anchors_by_row(at, B)
        document_BT = torch.zeros_like(features.tokens_BT) if features.document_BT is None else features.document_BT
        positions_BX, attention_mask = draft_masks(document_BT, anchor_BR, N, self.small.windows)
        masks_BX = torch.full_like(positions_BX, self.mask)
        hidden_BXD = self.small.read(masks_BX, cache, self._known(positions_BX), attention_mask).hidden_BTD
        first_MD = text_BTD[at.row_M, (at.position_M + 1).clamp(max=T - 1)]
        return [first_MD, *hidden_BXD.unflatten(1, (-1, N))[at.row_M, rank_M].unbind(1)]

    def forward_dense(self, features: Features) -> list[Tensor]:
        T = features.tokens_BT.shape[1]
        hidden_BTD = self._read(features, max(T - 1, 1))
        return [hidden_BTD[:, 1 + k : max(T - 1, 1 + k)] for k in range(self.trained_depth)]

    def _read(self, features: Features, length: int, cache: DynamicCache | None = None) -> Tensor:
        """Return the model's hidden states ``[B, length, D]`` over the first tokens of the rows, each document by itself."""
        tokens_BT, document_BT, limit = features.tokens_BT[:, :length], features.document_BT, self.small.max_positions
        packed = document_BT is not None and bool(document_BT.gt(0).any())
        if not packed and (limit is None or length <= limit):
            return self.small.read(tokens_BT, cache).hidden_BTD
        document_BT = torch.zeros_like(tokens_BT) if document_BT is None else document_BT[:, :length]
        positions_BT = self._known(document_positions(document_BT))
        return self.small.read(tokens_BT, cache, positions_BT, document_masks(document_BT, self.small.windows)).hidden_BTD

    def _known(self, positions: Tensor) -> Tensor:
        """Clamp positions to those that the model knows."""
        return positions if self.small.max_positions is None else positions.clamp(max=self.small.max_positions - 1)

    def recompute(self) -> None:
        if self.config.parallel:
            raise UserError("train.gradient_checkpointing is not available for parallel draft models, which keep keys; set it to false")
        self.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return self.small.readout(hidden)

    # Decoding.

    def reserve(self, state: State, length: int) -> State:
        return super().reserve(state, length + self.masks)

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        raise UserError("a draft model keeps all keys in memory; leave out draft windows and offloading")

    def begin(self, features: Features, state: State | None = None) -> State:
        return self.cached.begin(features.tokens_BT, features.lengths_B, state)

    def join(self, state: State, other: State) -> State:
        return self.cached.join(state, other)

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        if depth:
            return self.cached.nodes(state, tokens_BN, parents_BN, depth)
        return self.cached.roots(state, tokens_BN, self.mask, self.masks)

    # On disk: an ordinary folder of transformers.

    def engine_config(self) -> dict[str, Any]:
        stated = {"architectures": [type(self.model).__name__], "dtype": str(self.model.dtype).removeprefix("torch.")}
        return smaller.stated_config(self.model.config) | stated

    def engine_files(self) -> dict[str, bytes]:
        """Return the backbone's generation configuration and, where there is one, its tokenizer."""
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "generation_config.json").write_text(self.backbone.model.generation_config.to_json_string())
            if (tokenizer := smaller.find_tokenizer(self.backbone.name)) is not None:
                tokenizer.save_pretrained(name)
            return {file.name: file.read_bytes() for file in Path(name).iterdir() if file.is_file()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights under the model's own names; of weights that are one, the first."""
        own = {id(tensor): name for name, tensor in reversed(self.model.state_dict(keep_vars=True).items())}
        return {name: tensor for name, tensor in self.model.state_dict(keep_vars=True).items() if own[id(tensor)] == name}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        held = self.model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(held.items())}
        tied = {name: tensors[first[id(tensor)]] for name, tensor in held.items() if first[id(tensor)] in tensors}
        self.model.load_state_dict({**tied, **tensors}, strict=True)


def load_draft_model(
    path: str,
    backbone: Backbone,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    depth: int | None = None,
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    trust_remote_code: bool = False,
) -> DraftModel:
    """Load a model from a folder or hub id as a drafter onto the backbone's device; see `load_backbone` for ``dtype``.

    ``tokenizer``: the backbone's, to compare with the draft model's. Raises UserError if there is no such model or the vocabularies differ.
    """
    small = _load(path, backbone, dtype, trust_remote_code)
    with naming("draft model"):
        own = load_tokenizer(path, trust_remote_code=trust_remote_code) if tokenizer is not None else None
    return DraftModel.of(backbone, small, depth=depth, tokenizers=None if tokenizer is None or own is None else (tokenizer, own))


def _load(path: str, backbone: Backbone, dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto", trust: bool = False) -> Backbone:
    with naming("draft model"):
        return load_backbone(path, dtype=dtype, trust_remote_code=trust, device=backbone.device)


def _layers(config: DraftModel.Config, total: int) -> list[int]:
    """Return the numbers of the backbone's layers that the model is pruned to; none if it is not pruned."""
    if config.path is not None or config.architecture is not None:
        return []
    count = config.layers or max(1, total // 4)
    if count > total:
        raise UserError(f"drafter.layers is from 1 to {total}, the layers that the backbone has; got {count}")
    return smaller.evenly(total, count) if config.choose == "even" else list(range(count))


def _allocated(backbone: Backbone, config: DraftModel.Config, layers: Sequence[int]) -> PreTrainedModel:
    if config.architecture is not None:
        shape = smaller.config_from(config.architecture)
    else:
        shape = smaller.pruned_config(backbone, layers) if config.path is None else smaller.read_config(config.path)
    shape.vocab_size = backbone.vocab
    shape.tie_word_embeddings = shape.tie_word_embeddings and not config.untie
    return smaller.allocate(shape)
