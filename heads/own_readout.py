"""Drafters with output layers of their own, over the backbone's whole vocabulary or a draft vocabulary of its most frequent tokens.

Shape suffixes: D width, V backbone vocabulary, DV draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter, DrafterConfig
from headstart.support.errors import UserError


class OwnReadoutConfig(DrafterConfig):
    """Arguments of a drafter with output layers of its own."""

    draft_vocab_size: Annotated[int, Ge(1)] | None = None
    """How many of the most frequent tokens are drafted (null: all)."""
    freeze_readout: bool = False
    """Keep the output layers as the backbone's instead of training them."""


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

    @abstractmethod
    def output_layers(self) -> Sequence[nn.Linear]:
        """Return the layers ``[DV, D]`` that start as the backbone's output layer."""

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
