"""The format of cached features: which hidden states are stored, and how they are quantized.

States are stored in the backbone's dtype (``exact``), bf16 or int8. For int8, each channel is divided by its scale and then each token by
its largest entry over 127. The scale of a channel is the fourth root of the mean fourth power over tokens scaled to unit RMS, so that
the few tokens with huge states, common in language models, do not dominate. The error of an entry is at most ``token * channel / 2``.

The final hidden state is stored to compute the teacher's distribution, over the draft vocabulary alone: with it the normaliser of all
logits and their largest are stored.

Shape suffixes: B batch, T positions, P positions of several samples concatenated, or before labels, S samples, D width, V vocabulary, C
positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.support.errors import UserError
from headstart.support.files import atomic
from headstart.support.pytree import map_tensors
from headstart.training.data.batches import Batch

Record = dict[str, Tensor]
"""Stored tensors of one sample, or of several concatenated, by name."""
CHUNK = 256
"""Positions whose logits are in memory at a time."""


@dataclass(frozen=True)
class CacheFormat:
    """The states stored per sample, and their encoding."""

    taps: tuple[int, ...]
    dim: int
    backbone_dtype: torch.dtype
    dtype: Literal["int8", "bf16", "exact"] = "int8"

    @classmethod
    def of(cls, backbone: Backbone, taps: tuple[int, ...], dtype: Literal["int8", "bf16", "exact"] = "exact") -> CacheFormat:
        """Return the format for the final hidden state and these taps of a backbone."""
        return cls(tuple(sorted(taps)), backbone.dim, backbone.dtype, dtype)

    @property
    def states(self) -> dict[str, int | None]:
        """Name of each stored state -> its tap (None: the final hidden state)."""
        return {"hidden": None, **{f"tap.{tap}": tap for tap in self.taps}}

    def size(self, tokens: int) -> int:
        """Return the bytes of a sample with ``tokens`` tokens."""
        entry = {"int8": 1, "bf16": 2, "exact": self.backbone_dtype.itemsize}[self.dtype]
        scales = 2 * (tokens + self.dim) if self.dtype == "int8" else 0
        return len(self.states) * (tokens * self.dim * entry + scales) + 8 * tokens + 4  # normaliser and choice, the count

    def encode(self, features: Features) -> Record:
        """Encode one sample (a batch of one row); the record is on the CPU."""
        taps, record = features.taps or {}, Record()
        for name, tap in self.states.items():
            record |= self._quantize(name, (features.hidden_BTD if tap is None else taps[tap])[0])
        if features.norm_BT is not None and features.choice_BT is not None:
            record |= {"norm": features.norm_BT[0].float(), "choice": features.choice_BT[0].int()}
        count = torch.tensor([features.tokens_BT.shape[1]], dtype=torch.int32)
        return {name: tensor.cpu() for name, tensor in record.items()} | {"tokens": count}

    def _quantize(self, name: str, x_TD: Tensor) -> Record:
        if not x_TD.isfinite().all():
            raise UserError(f"the backbone's states ({name}) are not finite in {x_TD.dtype}; set backbone.dtype to bf16 or fp32")
        if self.dtype != "int8":
            return {name: x_TD.to(torch.bfloat16 if self.dtype == "bf16" else x_TD.dtype, copy=True)}  # the last tap may be the final state
        x_TD = x_TD.float()
        unit_TD = x_TD / x_TD.square().mean(1, keepdim=True).sqrt().clamp(min=1e-20)
        channel_1D = unit_TD.pow(4).mean(0, keepdim=True).pow(0.25).clamp(min=1e-6).to(torch.bfloat16)
        even_TD = x_TD / channel_1D
        token_T = (even_TD.abs().amax(1) / 127).clamp(min=1e-20).to(torch.bfloat16)
        steps_TD = (even_TD / token_T[:, None]).round().clamp(-127, 127).to(torch.int8)
        return {name: steps_TD, f"{name}.token": token_T, f"{name}.channel": channel_1D}

    def decode(self, record: Record, batch: Batch, taps: tuple[int, ...]) -> Features:
        """Decode the concatenated samples of a batch to features on its device, in the backbone's dtype."""
        B, T = batch.tokens_BT.shape
        device = batch.tokens_BT.device
        lengths = record["tokens"].tolist()
        sample_lengths = iter(lengths)
        row_lengths = [sum(next(sample_lengths) for _ in row) for row in batch.members]
        position_P = torch.cat([torch.arange(b * T, b * T + length) for b, length in enumerate(row_lengths)]).to(device)
        placed = {name: tensor.to(device) for name, tensor in record.items()}

        def scatter(x_PD: Tensor) -> Tensor:
            return x_PD.new_zeros(B * T, *x_PD.shape[1:]).index_copy_(0, position_P, x_PD).view(B, T, *x_PD.shape[1:])

        sample_P = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        states = {tap: scatter(self.dequantize(placed, name, sample_P)) for name, tap in self.states.items() if tap is None or tap in taps}
        hidden_BTD = states.pop(None)
        read = {tap: states[tap] for tap in taps} or None
        teacher = (scatter(placed["norm"]), scatter(placed["choice"].long())) if "norm" in record else ()
        return Features(batch.tokens_BT, hidden_BTD, read, batch.loss_mask_BT, batch.document_BT, *teacher)

    def dequantize(self, record: Record, name: str, sample_P: Tensor) -> Tensor:
        """Return a stored state of concatenated samples, ``[P, D]``; ``sample_P`` is the index of each position's sample."""
        if self.dtype != "int8":
            return record[name].to(self.backbone_dtype)
        scale_PD = record[f"{name}.token"].float()[:, None] * record[f"{name}.channel"].float()[sample_P]
        return (record[name] * scale_PD).to(self.backbone_dtype)


def with_teacher(features: Features, backbone: Backbone) -> Features:
    """Return the features with the normaliser of the backbone's logits and their largest, where the next token is a label."""
    assert features.loss_mask_BT is not None
    norm_BT = torch.zeros_like(features.tokens_BT, dtype=torch.promote_types(features.hidden_BTD.dtype, torch.float32))
    choice_BT = torch.zeros_like(features.tokens_BT)
    at_PN = features.loss_mask_BT[:, 1:].nonzero()
    for row_C, place_C in (at_CN.unbind(1) for at_CN in at_PN.split(CHUNK)):
        logits_CV = backbone.readout(features.hidden_BTD[row_C, place_C]).to(norm_BT.dtype)
        norm_BT[row_C, place_C], choice_BT[row_C, place_C] = logits_CV.logsumexp(-1), logits_CV.argmax(-1)
    return replace(features, norm_BT=norm_BT, choice_BT=choice_BT)


def single_row(features: Features, row: int, length: int) -> Features:
    """Select one row of a batch, without padding."""
    return map_tensors(lambda x: x[row : row + 1, :length], features)


def save_tensors(tensors: Record, path: Path, header: dict[str, str]) -> None:
    """Write a file of a cache atomically. Raises UserError on disk errors."""
    try:
        with atomic(path) as temporary:
            save_file(tensors, temporary, metadata=header)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}") from None


def without_prefix(tensors: Record, prefix: str) -> Record:
    """Select the tensors whose names begin with ``prefix``, and remove it from the names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def concatenate(records: Sequence[Record]) -> Record:
    return {name: torch.cat([record[name] for record in records]) for name in records[0]}
