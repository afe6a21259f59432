"""The drafter contract: one module that is trained on known text and drafts unknown text.

Alignment, used everywhere. The backbone has read ``x_0 .. x_t``; its own output layer gives the root ``x_{t+1}``. Depth ``k``
(from 0) drafts ``x_{t+2+k}`` from the features up to ``t``, the root, and the ``k`` tokens drafted in between.

Shape suffixes: B batch, T positions, D width, V vocabulary, N tree nodes, K depth, M anchors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor, nn

from headstart.heads.anchors import Anchors, gather_anchors
from headstart.heads.backbone.features import Features
from headstart.heads.layers.row_state import RowState
from headstart.support.config import StrictModel
from headstart.support.errors import UserError
from headstart.support.pytree import list_tensors, map_tensors

if TYPE_CHECKING:
    from headstart.heads.backbone.backbone import Backbone


class DrafterConfig(StrictModel):
    """Arguments that every drafter takes; a drafter's own ``Config`` adds to them."""

    depth: Annotated[int, Ge(1)]
    """Tokens beyond the root that it is trained to draft."""
    draft_depth: Annotated[int, Ge(1)] | None = None
    """Tokens beyond the root that it drafts when decoding (null: as many as it is trained for)."""


class Drafter(nn.Module, ABC):
    """A new method is a subclass in ``heads/<kind>.py``.

    The constructor takes ``(backbone, config)`` and builds shapes only; start values are set by `init_from`, trained ones by
    `load_tensors`. The class attributes below declare what the method can do; tests/test_contract.py holds each drafter to them.
    """

    Config: ClassVar[type[DrafterConfig]] = DrafterConfig
    sequential: ClassVar[bool] = True
    """The draft of depth k depends on the tokens drafted before it."""
    reads_hidden: ClassVar[bool] = True
    """It uses ``features.hidden_BTD``, not only tokens and taps."""
    own_readout: ClassVar[bool] = True
    """It has an output layer of its own; False: its hidden states are read out by the backbone's, as EAGLE-1's are."""
    all_depths_at_once: ClassVar[bool] = False
    """`step` is called once per draft, with the roots, and returns hidden states ``[B, K, D]`` of all depths."""
    capturable: ClassVar[bool] = False
    """`begin` and `step` are functions of tensors alone: no host reads, no branching on values. They may then be traced once and
    replayed. The state is a `RowState`, a tensor, or a (nested) dataclass or tuple of tensors."""
    uses_backbone_cache: ClassVar[bool] = False
    """It drafts on the backbone's KV cache, which `prepare_draft` gives it, and has none of its own."""
    anchor_share: ClassVar[float] = 1.0
    """Share of the label positions that a training step drafts from; below 1, `forward` is always called with anchors."""
    file_name: ClassVar[str] = "model.safetensors"
    """File name of the weights that serving engines expect."""

    backbone: Backbone
    """Not a submodule: its weights are not the drafter's to train or save."""
    taps: tuple[int, ...] = ()
    """Backbone layers whose residual stream it reads."""
    vocabulary: Tensor | None
    """int64 [DV]: the backbone's token for each token of the draft vocabulary, ascending; None: the whole vocabulary."""

    def __init__(self, backbone: Backbone, config: DrafterConfig) -> None:
        super().__init__()
        object.__setattr__(self, "backbone", backbone)   # past nn.Module, which would register a module
        self.config = config
        self.trained_depth = config.depth
        self.set_depth(config.draft_depth)
        self.register_buffer("vocabulary", None, persistent=False)   # a buffer, so that it follows the drafter to its device

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments that build this drafter again, as a checkpoint stores them."""
        return self.config.model_dump(mode="json", exclude={"draft_depth"} if self.config.draft_depth is None else None)

    @property
    def max_depth(self) -> int | None:
        """The most tokens it can draft beyond the root; None: any number."""
        return None

    def set_depth(self, depth: int | None) -> None:
        """Draft ``depth`` tokens beyond the root when decoding; None: the trained depth. Raises UserError above `max_depth`."""
        depth = self.trained_depth if depth is None else depth
        self.require_depth(depth)
        self.depth = depth

    def require_depth(self, depth: int) -> None:
        """Raise UserError unless ``depth`` tokens can be drafted."""
        require_count("depth", depth)
        if self.max_depth is not None and depth > self.max_depth:
            raise UserError(
                f"{type(self).__name__} cannot draft deeper than the {self.max_depth} tokens it is trained for; got depth {depth}: "
                f"use at most {self.max_depth}, or train with drafter.depth={depth}"
            )

    def init_from(self, backbone: Backbone) -> None:
        """Set the start values of a fresh drafter; by default torch's own for every layer."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()

    # Training.

    def forward(self, features: Features, at: Anchors | None = None) -> list[Tensor]:
        """Hidden states of the `trained_depth` depths, drafted from the true tokens.

        Without anchors, depth k is ``[B, max(T-2-k, 0), D]`` and its position t drafts ``x_{t+2+k}``. With anchors it is ``[M, D]``,
        one row per anchor. This default suits heads that compute all positions; a head with ``anchor_share < 1`` overrides it.
        """
        dense = self.forward_dense(features)
        return dense if at is None else gather_anchors(dense, at)

    def forward_dense(self, features: Features) -> list[Tensor]:
        """`forward` at all positions. Raises UserError for a drafter that is not trained, such as a draft model."""
        from headstart.heads.methods import methods

        raise UserError(f"{type(self).__name__} drafts without training; train one of {', '.join(methods())}")

    def recompute(self) -> None:
        """Turn gradient checkpointing on. Raises UserError if the drafter has none."""
        raise UserError(f"train.gradient_checkpointing is not available for {type(self).__name__}; set it to false")

    @abstractmethod
    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        """Hidden states ``[..., D]`` of one depth -> logits ``[..., DV]`` over the draft vocabulary.

        ``parent_tokens [...]`` are the tokens the hidden states were stepped with, for heads that correct by them.
        """

    def use_vocabulary(self, tokens: Tensor) -> None:
        """Restrict a fresh drafter to these backbone tokens (int64 ``[DV]``); called before training if there is a draft vocabulary."""
        raise UserError(f"{type(self).__name__} drafts the backbone's whole vocabulary; leave the draft vocabulary out")

    # Decoding.

    @abstractmethod
    def begin(self, features: Features, state: Any = None) -> Any:
        """Extend the state (None: of a new sequence) with features of accepted tokens; rows are right-padded, document -1."""

    @abstractmethod
    def step(self, state: Any, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, Any]:
        """Hidden states ``[B, N, D]`` of N nodes of one depth, and the state with these nodes in it.

        ``tokens_BN`` are the nodes' tokens (depth 0: the roots), ``parents_BN`` the indices of their parents among the nodes of the
        depth before. A drafter that ignores the tokens may return ``[B, 1, D]``, one that gives `all_depths_at_once` ``[B, K, D]``.
        """

    def reserve(self, state: Any, length: int) -> Any:
        """The state with room for ``length`` positions per row, drafted nodes included; called before `begin` extends it."""
        return state.reserve(length) if isinstance(state, RowState) else state

    def select(self, state: Any, rows_B: Tensor) -> Any:
        """The state of the rows ``rows_B`` (int64), in that order; a row may be left out or come twice."""
        if isinstance(state, RowState):
            return state.select(rows_B)
        return map_tensors(lambda tensor: tensor[rows_B], state)

    def join(self, state: Any, other: Any) -> Any:
        """The state of the rows of both; neither has drafted nodes that are still needed."""
        if isinstance(state, RowState):
            return state.join(other)
        theirs = iter(list_tensors(other))
        return map_tensors(lambda mine: torch.cat([mine, next(theirs)]), state)

    def prepare_draft(self, state: Any, cache: Any, nodes: int) -> Any:
        """The state with room for ``nodes`` drafted nodes per row; called before every draft.

        ``cache`` is the backbone's `RaggedCache`, for a drafter that drafts on it.
        """
        return self.reserve(state, cache.longest + nodes)

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        """Attend only to the first ``sink`` and the last ``window`` positions (None: to all) and drop the keys of others; with
        ``offload`` keep them in host memory between drafts. Holds for sequences begun later. Raises UserError if it cannot.
        """
        raise UserError(f"{type(self).__name__} has no KV cache of its own to bound or offload; leave out draft windows and offloading")

    # On disk.

    def engine_config(self) -> dict[str, Any]:
        """The ``config.json`` that serving engines read. Raises UserError for a drafter that is not saved."""
        raise UserError(f"{type(self).__name__} drafts without training: it has nothing to save")

    def tensors(self) -> dict[str, Tensor]:
        """The weights under the names that serving engines expect."""
        return self.state_dict()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`; strict."""
        self.load_state_dict(dict(tensors), strict=True)

    def save_pretrained(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write the checkpoint, with ``extra`` as its provenance. `headstart.load` and serving engines read it."""
        from headstart.heads.checkpoint import save_drafter

        save_drafter(self, Path(folder), dict(extra or {}))

    def push_to_hub(self, repo_id: str, *, private: bool = False) -> None:
        """Save to that repository of the hub, which is created if need be."""
        from headstart.heads.checkpoint import push_drafter

        push_drafter(self, repo_id, private)


def require_count(name: str, value: Any, least: int = 1, of: str = "drafter") -> None:
    """Raise UserError unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{of}.{name} is a whole number of at least {least}; got {value!r}")
