"""The drafter interface: one module for training on known sequences and for drafting in decoding.

Alignment, used everywhere: the features cover ``x_0 .. x_t``, and the backbone's output layer gives the root (bonus token)
``x_{t+1}``. Depth ``k``, counted from 0, drafts ``x_{t+2+k}`` from the features up to ``t``, the root and the ``k`` tokens drafted
in between.

Shape suffixes: B batch, T positions, D width, V vocabulary, N tree nodes, K depth, M anchors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.backbone.features import Anchors, Features, gather_anchors
from headstart.heads.backbone.hooks import recomputed
from headstart.heads.card import Contents, write_checkpoint
from headstart.heads.layers.rows import RowState
from headstart.support.config import MAX_DEPTH, Depth, StrictModel
from headstart.support.errors import UserError
from headstart.support.pytree import list_tensors, map_tensors

if TYPE_CHECKING:
    from headstart.heads.backbone.backbone import Backbone


class DrafterConfig(StrictModel):
    """Arguments that every drafter takes; a drafter's own ``Config`` adds to them."""

    depth: Depth
    """Tokens beyond the root that it is trained to draft."""
    draft_depth: Depth | None = None
    """Tokens beyond the root that it drafts when decoding (null: as many as it is trained for; adaptive trees up to twice as many, where
    the method can)."""


class Drafter(nn.Module, ABC):
    """Base class of drafters; a new method is a subclass in ``heads/<kind>.py``.

    The constructor takes ``(backbone, config)`` and only allocates weights; `init_from` initialises them, `load_tensors` loads trained
    ones. The attributes below declare a method's capabilities, which test_capabilities.py checks; one that depends on an argument is
    set by the constructor.
    """

    Config: ClassVar[type[DrafterConfig]] = DrafterConfig
    sequential: bool = True
    """The draft of depth k depends on the tokens drafted before it."""
    reads_hidden: ClassVar[bool] = True
    """The drafter uses ``features.hidden_BTD``, not only tokens and taps."""
    own_readout: bool = True
    """The drafter has its own output layer; False: it uses the backbone's, as EAGLE-1 does."""
    all_depths_at_once: bool = False
    """`step` is called once per draft, with the roots, and returns the hidden states ``[B, K, D]`` of all depths."""
    capturable: ClassVar[bool] = False
    """`begin` and `step` depend on tensors only, without host reads or branches on values, so they can be traced and replayed.
    The state must be a `RowState`, a tensor, or a (nested) dataclass or tuple of tensors."""
    recomputable: ClassVar[bool] = False
    """`forward` calls its parts by `checkpointed`."""
    recomputing = False
    deepens: bool = True
    """Drafts can be longer than those of the training."""
    uses_backbone_cache: ClassVar[bool] = False
    """The drafter uses the backbone's KV cache, passed to `prepare_draft`, instead of its own."""
    anchor_share: float = 1.0
    """Share of the label positions that a training step uses as anchors; below 1, `forward` is always called with anchors."""
    deeper_share: float = 1.0
    """Share of the label positions at which a training step drafts beyond depth 0; below 1, it calls `forward_deeper`."""
    readout_lr_ratio: ClassVar[float] = 1.0
    """``train.readout_lr_ratio: auto`` under Muon: learning rate of the output layers, as a fraction of the other weights'."""
    pretrained: ClassVar[bool] = False
    """`init_from` gives it the weights of a whole language model, which ``train.lr=auto`` changes by smaller steps."""
    fixed_arguments: ClassVar[tuple[str, ...]] = ()
    """Arguments that change what the weights compute but no shape: a drafter that starts from trained heads must have theirs."""
    file_name: ClassVar[str] = "model.safetensors"
    """File name of the weights that serving engines expect."""

    backbone: Backbone
    """Not a submodule, so that its weights are neither trained nor saved with the drafter."""
    taps: tuple[int, ...] = ()
    """Backbone layers whose residual stream the drafter uses."""
    width: int
    """Width of the hidden states that it computes with."""
    vocabulary: Tensor | None
    """int64 [DV]: the backbone token of each draft vocabulary entry, ascending; None: the whole vocabulary."""

    def __init__(self, backbone: Backbone, config: DrafterConfig) -> None:
        super().__init__()
        object.__setattr__(self, "backbone", backbone)  # nn.Module.__setattr__ would register a submodule
        self.width, self.config = backbone.dim, config
        self.trained_depth = config.depth
        self.set_depth(config.draft_depth)
        self.register_buffer("vocabulary", None, persistent=False)  # a buffer, so that .to() moves it

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments to rebuild this drafter, as stored in checkpoints."""
        left_out = {name for name in ("draft_depth", "shortlist") if getattr(self.config, name, None) is None}
        return self.config.model_dump(mode="json", exclude=left_out)

    @property
    def max_depth(self) -> int | None:
        """Maximum number of tokens drafted beyond the root; None: unlimited."""
        return None if self.deepens else self.trained_depth

    @property
    def default_depth(self) -> int:
        """Number of tokens drafted beyond the root unless another is set."""
        return self.trained_depth

    def set_depth(self, depth: int | None) -> None:
        """Set the number of tokens drafted beyond the root; None: the default, beyond which adaptive trees may go (`deepest`).

        Raises UserError above `max_depth`.
        """
        chosen = self.default_depth if depth is None else depth
        self.require_depth(chosen)
        self.depth, self.depth_is_set = chosen, depth is not None

    @property
    def deepest(self) -> int:
        """Number of tokens that adaptive trees draft at most: twice `depth`, unless it is set or the drafter can draft no more."""
        further = not (self.depth_is_set or self.all_depths_at_once) and self.max_depth is None
        return min(2 * self.depth, MAX_DEPTH) if further else self.depth

    def require_depth(self, depth: int) -> None:
        """Raise UserError unless ``depth`` tokens can be drafted."""
        require_count("depth", depth, most=MAX_DEPTH)
        if self.max_depth is not None and depth > self.max_depth:
            raise UserError(
                f"{type(self).__name__} cannot draft deeper than the {self.max_depth} tokens it is trained for; got depth {depth}: "
                f"use at most {self.max_depth}, or train with drafter.depth={depth}"
            )

    def init_from(self, backbone: Backbone) -> None:
        """Initialise a new drafter's weights; by default with ``reset_parameters`` of every layer."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()

    @property
    def start_positions(self) -> int:
        """Number of positions of training text that `fit_start` is to be given; 0, the default: none."""
        return 0

    def fit_start(self, features: Iterator[Features]) -> str:
        """Fit a new drafter's start values to batches of features of training texts; called after `init_from`.

        Returns a line for the log, or "".
        """
        return ""

    # Training.

    def frozen(self) -> list[Tensor]:
        """Return the weights that training leaves as they are; by default none."""
        return []

    def input_sizes(self) -> dict[str, list[float]]:
        """Return the sizes of what matrices read, by the name of the weight: of each of the parts, equally wide, of its columns.

        Muon's steps are those for parts of unit size. Sizes are powers of two, and the same when a run goes on.
        """
        return {}

    def forward(self, features: Features, at: Anchors | None = None) -> list[Tensor]:
        """Return the hidden states of all `trained_depth` depths, teacher-forced.

        Without anchors, depth k is ``[B, max(T-2-k, 0), D]``, whose position t drafts ``x_{t+2+k}``. With anchors it is ``[M, D]``,
        one row per anchor. This default is for heads that compute all positions; heads with ``anchor_share < 1`` override it.
        """
        dense = self.forward_dense(features)
        return dense if at is None else gather_anchors(dense, at)

    def forward_dense(self, features: Features) -> list[Tensor]:
        """Compute `forward` at all positions. Raises UserError for a drafter that needs no training, such as early exit."""
        raise UserError(f"{type(self).__name__} drafts without training; train another method, such as eagle3 or medusa")

    def forward_deeper(self, features: Features, deeper: Anchors) -> list[Tensor]:
        """Compute depth 0 at all positions, ``[B, max(T-2, 0), D]``, and the others at the anchors ``deeper`` only, ``[M, D]``. Anchors
        ascend by row and position. This default computes all; heads with a ``deeper_share`` override it.
        """
        first_BTD, *later = self.forward_dense(features)
        return [first_BTD, *gather_anchors(later, deeper)]

    def recompute(self) -> None:
        """Enable gradient checkpointing. Raises UserError if the drafter does not support it."""
        if not self.recomputable:
            raise UserError(f"train.gradient_checkpointing is not available for {type(self).__name__}; set it to false")
        self.recomputing = True

    def checkpointed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A part of `forward`, which with gradient checkpointing is called again in the backward."""
        return partial(recomputed, function) if self.recomputing and torch.is_grad_enabled() else function

    @abstractmethod
    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        """Map hidden states ``[..., D]`` of one depth to logits ``[..., DV]`` over the draft vocabulary.

        ``parent_tokens [...]`` are the input tokens of these hidden states, for heads whose logits depend on them.
        """

    def draft_logits(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        """Return what drafts are chosen by: the logits of `readout`, or some of them approximate."""
        return self.readout(hidden, depth, parent_tokens)

    def confidence(self, hidden: Tensor, parent_tokens: Tensor) -> Tensor | None:
        """Return the log-odds ``[...]`` that drafts of these hidden states are accepted if those before them are; None: no estimate."""
        return None

    def use_vocabulary(self, tokens: Tensor) -> None:
        """Restrict a new drafter to these backbone tokens (int64 ``[DV]``); called before training with a draft vocabulary."""
        raise UserError(f"{type(self).__name__} drafts the backbone's whole vocabulary; leave the draft vocabulary out")

    # Decoding.

    @abstractmethod
    def begin(self, features: Features, state: Any = None) -> Any:
        """Extend the state (None: start new sequences) with the features of accepted tokens, right-padded with document -1."""

    @abstractmethod
    def step(self, state: Any, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, Any]:
        """Return the hidden states ``[B, N, D]`` of N nodes of one depth, and the state extended by these nodes.

        ``tokens_BN`` are the nodes' tokens (depth 0: the roots), ``parents_BN`` their parents' indices among the nodes of the previous
        depth. A drafter that ignores the tokens may return ``[B, 1, D]``; one with `all_depths_at_once` returns ``[B, K, D]``.
        """

    def reserve(self, state: Any, length: int) -> Any:
        """Return the state with capacity for ``length`` positions per row, drafted nodes included; called before `begin`."""
        return state.reserve(length) if isinstance(state, RowState) else state

    def select(self, state: Any, rows_B: Tensor) -> Any:
        """Return the state of the rows ``rows_B`` (int64), in that order; rows may be dropped or repeated."""
        if isinstance(state, RowState):
            return state.select(rows_B)
        return map_tensors(lambda tensor: tensor[rows_B], state)

    def join(self, state: Any, other: Any) -> Any:
        """Concatenate the rows of two states. Drafted nodes may be dropped."""
        if isinstance(state, RowState):
            return state.join(other)
        theirs = iter(list_tensors(other))
        return map_tensors(lambda mine: torch.cat([mine, next(theirs)]), state)

    def prepare_draft(self, state: Any, cache: Any, nodes: int) -> Any:
        """Return the state with capacity for ``nodes`` drafted nodes per row; called before every draft.

        ``cache`` is the backbone's `RaggedCache`, for drafters that use it.
        """
        return self.reserve(state, cache.longest + nodes)

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        """Attend to the first ``sink`` and the last ``window`` positions only (None: all) and drop other keys. ``offload`` keeps the
        KV cache in host memory between drafts. Applies to sequences started later. Raises UserError if the drafter has no KV cache.
        """
        raise UserError(f"{type(self).__name__} has no KV cache of its own to bound or offload; leave out draft windows and offloading")

    # On disk.

    def engine_config(self) -> dict[str, Any]:
        """Return the ``config.json`` for serving engines. Raises UserError for a drafter without a checkpoint format."""
        raise UserError(f"{type(self).__name__} drafts without training: it has nothing to save")

    def engine_files(self) -> dict[str, bytes]:
        """Return the contents of further files that serving engines expect, by name."""
        return {}

    def load_files(self, folder: Path) -> None:  # noqa: B027  (most have none)
        """Load what `engine_files` has written besides, if it is there; called after `load_tensors`. Raises UserError if it is damaged."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights under the names that serving engines expect."""
        return self.state_dict()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load weights in the format of `tensors`; missing and unknown names are errors."""
        self.load_state_dict(dict(tensors), strict=True)

    def save_pretrained(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint that `headstart.load` and serving engines load; ``extra`` is stored as its provenance."""
        kind = type(self).__module__.removeprefix("headstart.heads.")
        config, tensors, files = self.engine_config(), self.tensors(), self.engine_files()  # may raise: before anything is written
        contents = Contents(kind, self.arguments, self.taps, config, files, self.file_name, tensors)
        write_checkpoint(Path(folder), contents, self.backbone, dict(extra or {}))


def require_count(name: str, value: Any, least: int = 1, of: str = "drafter", most: int | None = None) -> None:
    """Raise UserError unless ``value`` is an integer of at least ``least`` and at most ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise UserError(f"{of}.{name} is a whole number of at least {least}{upper}; got {value!r}")
