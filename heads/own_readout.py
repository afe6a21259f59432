"""Drafters with output layers of their own, over the backbone's whole vocabulary or a draft vocabulary of its most frequent tokens.

Drafts need few of these logits, so a `Shortlist` scores all tokens by an output layer of low rank and the best of them by their own rows,
as EAGLE-4 and SpecVocab (2602.13836) do. Its subspace is the one in
which the logits vary most over the states that the heads draft from, as found on training text when training ends. The truncated singular
value decomposition of the weights alone, as which EAGLE-4's starts, takes all directions to be as large as each other.

Shape suffixes: B batch, T positions, D width, V backbone vocabulary, DV draft vocabulary, R rank, C candidates.
"""

import io
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter, DrafterConfig
from headstart.support.config import Size, StrictModel
from headstart.support.errors import UserError

SHORTLIST = "shortlist.npz"
"""File of the shortlists' subspaces, apart from the weights, since engines refuse weights that they do not know."""
SUBSPACE = ("down_RD", "basis_DR")
GROUPED = 1 << 12
"""Candidates from which on `largest` compares groups first."""


class ShortlistConfig(StrictModel):
    """Exact logits of the best tokens by an output layer of low rank."""

    rank: Size = 64
    """Rank of that output layer."""
    candidates: Size = 64
    """Tokens whose logits are exact."""


class OwnReadoutConfig(DrafterConfig):
    """Arguments of a drafter with output layers of its own."""

    draft_vocab_size: Annotated[int, Ge(1)] | None = None
    """How many of the most frequent tokens are drafted (null: all)."""
    freeze_readout: bool = False
    """Keep the output layers as the backbone's instead of training them."""
    shortlist: ShortlistConfig | None = None
    """Draft from approximate logits of all tokens and the exact ones of the best (null: from exact ones of all)."""


class Shortlist(nn.Module):
    """Logits of an output layer: those of the best ``candidates`` exact, the others' of low rank."""

    subspace: tuple[Tensor, Tensor]
    down_SD: Tensor
    up_VS: Tensor

    def __init__(self, layer: nn.Linear, down_RD: Tensor, basis_DR: Tensor, candidates: int) -> None:
        """``down_RD``, ``basis_DR``: as of `find_subspace`, by which the layer differs from its mean row (S is R + 1)."""
        super().__init__()
        self.subspace, self.candidates = (down_RD, basis_DR), candidates
        weight_VD = layer.weight.detach()
        mean_1D = weight_VD.mean(0, keepdim=True)
        up_VR = (weight_VD - mean_1D) @ basis_DR
        self.register_buffer("down_SD", torch.cat([down_RD, mean_1D]), persistent=False)
        self.register_buffer("up_VS", torch.cat([up_VR, torch.ones_like(up_VR[:, :1])], 1), persistent=False)

    def forward(self, state: Tensor, layer: nn.Linear) -> Tensor:
        """Return the logits ``[..., DV]`` of the states ``[..., D]``."""
        logits = F.linear(F.linear(state, self.down_SD), self.up_VS, layer.bias)
        chosen = largest(logits, self.candidates)[1]
        exact = (F.embedding(chosen, layer.weight) @ state[..., None]).squeeze(-1)
        return logits.scatter(-1, chosen, exact if layer.bias is None else exact + layer.bias[chosen])


class OwnReadoutDrafter(Drafter):
    """Base class of drafters with output layers of their own.

    With a draft vocabulary, a checkpoint also holds ``d2t`` (int64 ``[DV]``: backbone token minus draft token) and ``t2d``
    (bool ``[V]``: True for tokens that are drafted), as serving engines expect for EAGLE-3.
    """

    own_readout = True
    config: OwnReadoutConfig
    draft_vocab: int
    """Size of the output layers: the draft vocabulary's, or the backbone's vocabulary."""
    d2t: Tensor
    t2d: Tensor

    def __init__(self, backbone: Backbone, config: OwnReadoutConfig) -> None:
        super().__init__(backbone, config)
        DV = config.draft_vocab_size
        if DV is not None and DV > backbone.vocab:
            raise UserError(f"drafter.draft_vocab_size is at most the backbone's vocabulary of {backbone.vocab}; got {DV}")
        self.draft_vocab = DV or backbone.vocab
        if DV is not None:
            self.register_buffer("d2t", torch.zeros(DV, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(backbone.vocab, dtype=torch.bool))
            self._set_vocabulary(torch.arange(DV))
        for name, most, of in (("rank", backbone.dim, "width of the backbone"), ("candidates", self.draft_vocab, "draft vocabulary")):
            if config.shortlist is not None and (found := getattr(config.shortlist, name)) > most:
                raise UserError(f"drafter.shortlist.{name} is at most {most}, the {of}; got {found}: lower it")
        self.shortlists = nn.ModuleList()
        """One for each of `readouts`; none before the end of training."""

    @abstractmethod
    def output_layers(self) -> Sequence[nn.Linear]:
        """Return the layers ``[DV, D]`` that start as the backbone's output layer."""

    def readouts(self) -> Sequence[nn.Linear]:
        """Return the output layers by depth; the last one is that of all later depths too."""
        return self.output_layers()

    def output_state(self, hidden: Tensor) -> Tensor:
        """Return what the output layers read of hidden states, both ``[..., D]``."""
        return hidden

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        logits: Tensor = at_depth(self.readouts(), depth)(self.output_state(hidden))
        return logits

    def draft_logits(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        if not self.shortlists:
            return self.readout(hidden, depth, parent_tokens)
        logits: Tensor = at_depth(self.shortlists, depth)(self.output_state(hidden), at_depth(self.readouts(), depth))
        return logits

    @property
    def shortlist_positions(self) -> int:
        """Number of positions of training text that `fit_shortlists` is to be given; 0: none."""
        return 0 if self.config.shortlist is None else 32 * self.config.shortlist.rank

    @torch.no_grad()
    def fit_shortlists(self, features: Iterator[Features]) -> None:
        """Find the subspaces from batches of features of training texts, whose label positions count."""
        assert self.config.shortlist is not None
        moments = [torch.zeros(2 * (layer.in_features,), device=layer.weight.device) for layer in self.readouts()]
        for batch in features:
            labels_BT = torch.ones_like(batch.tokens_BT, dtype=torch.bool) if batch.loss_mask_BT is None else batch.loss_mask_BT
            for depth, hidden_BTD in enumerate(self.forward_dense(batch)):
                states_MD = self.output_state(hidden_BTD)[labels_BT[:, 2 + depth :]].float()
                at_depth(moments, depth).addmm_(states_MD.T, states_MD)
        if not all(bool(moment.any()) for moment in moments):  # no text has labels
            return
        rank = self.config.shortlist.rank
        self._use([find_subspace(layer.weight, moment, rank) for layer, moment in zip(self.readouts(), moments, strict=True)])

    def _use(self, subspaces: Sequence[tuple[Tensor, Tensor]]) -> None:
        assert self.config.shortlist is not None
        pairs, candidates = zip(self.readouts(), subspaces, strict=True), self.config.shortlist.candidates
        self.shortlists = nn.ModuleList(Shortlist(layer, *found, candidates) for layer, found in pairs)

    def frozen(self) -> list[Tensor]:
        if not self.config.freeze_readout:
            return []
        if not (layers := self.output_layers()):
            raise UserError(f"drafter.freeze_readout needs output layers as wide as the backbone, {self.backbone.dim}; set it to false")
        return [layer.weight for layer in layers]

    def init_from(self, backbone: Backbone) -> None:
        """Initialise the output layers as the backbone's, the other layers with ``reset_parameters``."""
        super().init_from(backbone)
        self._init_output_layers()

    def use_vocabulary(self, tokens: Tensor) -> None:
        """Restrict drafts to these backbone tokens (int64 ``[DV]``) and copy their rows of the backbone's output layer."""
        tokens = tokens.sort().values.to(self.t2d.device)
        assert len(tokens) == self.draft_vocab and len(tokens.unique()) == len(tokens)
        self._set_vocabulary(tokens)
        self._init_output_layers()

    def engine_files(self) -> dict[str, bytes]:
        """Return the file of the subspaces, empty before they are found, so that none of other weights is left beside these."""
        if self.config.shortlist is None:
            return {}
        found: list[Any] = [shortlist.subspace for shortlist in self.shortlists]
        arrays = {f"{name}_{i}": part.numpy(force=True) for i, both in enumerate(found) for name, part in zip(SUBSPACE, both, strict=True)}
        np.savez(file := io.BytesIO(), **arrays)
        return {SHORTLIST: file.getvalue()}

    def load_files(self, folder: Path) -> None:
        if self.config.shortlist is None or not (file := folder / SHORTLIST).is_file():
            return
        R, device = self.config.shortlist.rank, self.readouts()[0].weight.device
        try:
            with np.load(file, allow_pickle=False) as arrays:
                if not arrays.files:  # saved before the end of the training
                    return
                found = [
                    tuple(torch.from_numpy(arrays[f"{name}_{i}"]).to(device) for name in SUBSPACE) for i in range(len(self.readouts()))
                ]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            found = []
        shapes = [(R, layer.in_features) for layer in self.readouts()]
        if [(down.shape, basis.T.shape) for down, basis in found if basis.ndim == 2] != [(shape, shape) for shape in shapes]:
            raise UserError(f"{file} is damaged: it does not hold a subspace of rank {R} for each output layer; delete it, or train again")
        self._use([(down, basis) for down, basis in found])

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors(tensors)
        if self.vocabulary is not None:
            self.vocabulary = self.t2d.nonzero().flatten()
            offsets = self.vocabulary - torch.arange(len(self.vocabulary), device=self.vocabulary.device)
            if not torch.equal(offsets, self.d2t):
                raise UserError("d2t and t2d disagree about the draft vocabulary: the checkpoint is damaged; train or fetch it again")

    def _set_vocabulary(self, tokens: Tensor) -> None:
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()
        self.t2d[tokens] = True
        self.vocabulary = tokens

    @torch.no_grad()
    def _init_output_layers(self) -> None:
        rows = slice(None) if self.vocabulary is None else self.vocabulary.to(self.backbone.device)
        for layer in self.output_layers():
            layer.weight.copy_(self.backbone.unembed.weight[rows])


def at_depth(of_depths: Any, depth: int) -> Any:
    """Return the one of that depth, in a sequence or module list; the last one stands for all later depths too."""
    return of_depths[min(depth, len(of_depths) - 1)]


def find_subspace(weight_VD: Tensor, moment_DD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return ``down_RD`` and ``basis_DR`` with ``weight @ basis @ down`` close to the logits ``weight`` of states with this second moment,
    but for what is added to all logits of a state alike: in the least squares of all states and tokens.
    """
    weight_VD, moment_DD = (weight_VD - weight_VD.mean(0)).double(), moment_DD.double()
    floor = 1e-3 * moment_DD.diagonal().mean() * torch.eye(len(moment_DD), dtype=moment_DD.dtype, device=moment_DD.device)
    sizes_D, axes_DD = torch.linalg.eigh(moment_DD + floor)
    root_DD, inverse_DD = ((axes_DD * sizes_D**power) @ axes_DD.T for power in (0.5, -0.5))
    largest_DR = torch.linalg.eigh(root_DD @ (weight_VD.T @ weight_VD) @ root_DD)[1][:, -rank:]
    return (largest_DR.T @ inverse_DD).float(), (root_DD @ largest_DR).float()


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest of the last dimension and their indices, in descending order, as `torch.topk`; of equal ones any.

    They lie in the ``count`` groups with the largest maxima, and maxima are found much faster than an order.
    """
    M = int(values.shape[-1])
    group = 1 << (max(M // count, 1).bit_length() // 2)
    if M < GROUPED or count >= M // group:
        best = values.topk(count)
        return best.values, best.indices
    groups = F.pad(values, (0, -M % group), value=-math.inf).unflatten(-1, (-1, group))
    chosen = groups.amax(-1).topk(count, sorted=False).indices
    best = groups.gather(-2, chosen[..., None].expand(*chosen.shape, group)).flatten(-2).topk(count)
    return best.values, chosen.gather(-1, best.indices // group) * group + best.indices % group
