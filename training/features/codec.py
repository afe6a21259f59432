"""The format of cached features: which hidden states are stored, and how they are quantized.

States are stored in the backbone's dtype (``exact``), bf16 or int8. For int8, each channel is divided by its scale and then each token by
its largest entry over 127. The scale of a channel is the fourth root of the mean fourth power over tokens scaled to unit RMS, so that
the few tokens with huge states, common in language models, do not dominate. The error of an entry is at most ``token * channel / 2``.

The final hidden state is stored to compute the teacher's distribution. If no drafter uses it, the ``top_k`` most likely tokens and the
total mass of all others can be stored instead, at label positions only. That mass is then distributed over the other tokens by their
average in the first samples (``tail_V``); the resulting error is measured when a cache is written.

Shape suffixes: B batch, T positions, P positions of several samples concatenated, L label positions among them, S samples, D width,
V vocabulary, M kept tokens, C positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.support.errors import UserError
from headstart.support.pytree import map_tensors
from headstart.training.data.packing import Batch

Record = dict[str, Tensor]
"""Stored tensors of one sample, or of several concatenated, by name."""
CHUNK = 256
"""Positions whose logits are in memory at a time."""
LOG_ZERO = -100.0
"""Substitute for the logarithm of 0."""


@dataclass(frozen=True)
class CacheFormat:
    """The states stored per sample, and their encoding."""

    taps: tuple[int, ...]
    dim: int
    vocab: int
    backbone_dtype: torch.dtype
    dtype: Literal["int8", "bf16", "exact"] = "int8"
    top_k: int | None = None
    """Number of most likely tokens stored instead of the final hidden state; None: store the state."""

    @property
    def states(self) -> dict[str, int | None]:
        """Name of each stored state -> its tap (None: the final hidden state)."""
        final: dict[str, int | None] = {} if self.top_k else {"hidden": None}
        return final | {f"tap.{tap}": tap for tap in self.taps}

    @property
    def token_dtype(self) -> torch.dtype:
        return torch.int16 if self.vocab <= 2**15 else torch.int32

    def size(self, tokens: int, labels: int) -> int:
        """Return the bytes of a sample with ``tokens`` tokens and ``labels`` label positions."""
        entry = {"int8": 1, "bf16": 2, "exact": self.backbone_dtype.itemsize}[self.dtype]
        scales = 2 * (tokens + self.dim) if self.dtype == "int8" else 0
        teacher = labels * (self.top_k * (self.token_dtype.itemsize + 2) + 8) if self.top_k else 0
        return len(self.states) * (tokens * self.dim * entry + scales) + teacher + 8  # two counts

    def encode(self, features: Features, readout: Callable[[Tensor], Tensor]) -> Record:
        """Encode one sample (a batch of one row with ``loss_mask_BT``); the record is on the CPU."""
        taps, record = features.taps or {}, Record()
        for name, tap in self.states.items():
            record |= self._quantize(name, (features.hidden_BTD if tap is None else taps[tap])[0])
        assert features.loss_mask_BT is not None
        position_L = label_positions(features.loss_mask_BT[0])
        if self.top_k:
            record |= self._most_likely(features.hidden_BTD[0, position_L], readout) | {"top.position": position_L.to(torch.int32)}
        counts = {"tokens": features.tokens_BT.shape[1], "labels": len(position_L)}
        return {name: tensor.cpu() for name, tensor in record.items()} | {
            name: torch.tensor([count], dtype=torch.int32) for name, count in counts.items()
        }

    def _quantize(self, name: str, x_TD: Tensor) -> Record:
        if not x_TD.isfinite().all():
            raise UserError(f"the backbone's states ({name}) are not finite in {x_TD.dtype}; set backbone.dtype to bf16 or fp32")
        if self.dtype != "int8":
            return {name: x_TD.to(torch.bfloat16) if self.dtype == "bf16" else x_TD}
        x_TD = x_TD.float()
        unit_TD = x_TD / x_TD.square().mean(1, keepdim=True).sqrt().clamp(min=1e-20)
        channel_1D = unit_TD.pow(4).mean(0, keepdim=True).pow(0.25).clamp(min=1e-6).to(torch.bfloat16)
        even_TD = x_TD / channel_1D
        token_T = (even_TD.abs().amax(1) / 127).clamp(min=1e-20).to(torch.bfloat16)
        steps_TD = (even_TD / token_T[:, None]).round().clamp(-127, 127).to(torch.int8)
        return {name: steps_TD, f"{name}.token": token_T, f"{name}.channel": channel_1D}

    def _most_likely(self, hidden_LD: Tensor, readout: Callable[[Tensor], Tensor]) -> Record:
        assert self.top_k is not None
        tokens, log_probs, others = [], [], []
        for hidden_CD in hidden_LD.split(CHUNK) if len(hidden_LD) else [hidden_LD]:
            log_p_CV = readout(hidden_CD).float().log_softmax(-1)
            log_CM, token_CM = log_p_CV.topk(self.top_k, -1)
            others.append(log_p_CV.scatter(-1, token_CM, -torch.inf).logsumexp(-1).clamp(min=LOG_ZERO))
            tokens.append(token_CM.to(self.token_dtype))
            log_probs.append(log_CM.to(torch.float16))
        return {"top.token": torch.cat(tokens), "top.log_prob": torch.cat(log_probs), "top.others": torch.cat(others)}

    def decode(self, record: Record, batch: Batch, taps: tuple[int, ...]) -> Features:
        """Decode the concatenated samples of a batch to features on its device, in the backbone's dtype."""
        B, T = batch.tokens_BT.shape
        device = batch.tokens_BT.device
        lengths = record["tokens"].tolist()
        sample_lengths = iter(lengths)
        row_lengths = [sum(next(sample_lengths) for _ in row) for row in batch.members]
        position_P = torch.cat([torch.arange(b * T, b * T + length) for b, length in enumerate(row_lengths)]).to(device)
        on_device = {name: tensor.to(device) for name, tensor in record.items()}

        def scatter(x_PD: Tensor, at_P: Tensor) -> Tensor:
            return x_PD.new_zeros(B * T, x_PD.shape[-1]).index_copy_(0, at_P, x_PD).view(B, T, -1)

        sample_P = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        states = {
            tap: scatter(self.dequantize(on_device, name, sample_P), position_P)
            for name, tap in self.states.items()
            if tap is None or tap in taps
        }
        if self.top_k:
            states[None] = scatter(_top_rows(on_device), position_P[_label_indices(record).to(device)])
        hidden_BTD = states.pop(None)
        return Features(batch.tokens_BT, hidden_BTD, {tap: states[tap] for tap in taps} or None, batch.loss_mask_BT, batch.document_BT)

    def dequantize(self, record: Record, name: str, sample_P: Tensor) -> Tensor:
        """Return a stored state of concatenated samples, ``[P, D]``; ``sample_P`` is the index of each position's sample."""
        if self.dtype != "int8":
            return record[name].to(self.backbone_dtype)
        scale_PD = record[f"{name}.token"].float()[:, None] * record[f"{name}.channel"].float()[sample_P]
        return (record[name] * scale_PD).to(self.backbone_dtype)


def single_row(features: Features, row: int, length: int) -> Features:
    """Select one row of a batch, without padding."""
    return map_tensors(lambda x: x[row : row + 1, :length], features)


def label_positions(loss_mask_T: Tensor) -> Tensor:
    """Return the positions of a sample whose next token is a label; the teacher's distribution is needed there."""
    return loss_mask_T[1:].nonzero().flatten()


def concatenate(records: Sequence[Record]) -> Record:
    """Concatenate the records of several samples."""
    return {name: torch.cat([record[name] for record in records]) for name in records[0]}


def _top_rows(record: Record) -> Tensor:
    """Concatenate stored tokens, their log-probabilities and the log mass of all others: ``[L, 2M + 1]``. Ids are exact in fp32."""
    return torch.cat([record["top.token"].float(), record["top.log_prob"].float(), record["top.others"][:, None]], -1)


def _label_indices(record: Record) -> Tensor:
    """Return the indices of the label positions among the concatenated positions, ``[L]``."""
    start_S = record["tokens"].cumsum(0) - record["tokens"]
    return (record["top.position"] + start_S.repeat_interleave(record["labels"])).long()


class TopKTeacher:
    """Teacher for caches of the most likely tokens: computes logits from rows of `_top_rows`."""

    def __init__(self, tail_V: Tensor) -> None:
        self.log_tail_V = tail_V.clamp(min=1e-30).log()
        self.vocab, self.device = len(tail_V), tail_V.device

    def readout(self, hidden: Tensor) -> Tensor:
        """Map ``[..., 2M + 1]`` to log-probabilities ``[..., V]``."""
        top_k = hidden.shape[-1] // 2
        tokens, log_probs, others = hidden[..., :top_k].long(), hidden[..., top_k : 2 * top_k], hidden[..., 2 * top_k :]
        tail = self.log_tail_V.expand(*hidden.shape[:-1], -1).scatter(-1, tokens, -torch.inf)
        scale = (others - tail.logsumexp(-1, keepdim=True)).nan_to_num(posinf=LOG_ZERO)  # infinite if all tokens are stored
        return (tail + scale).scatter(-1, tokens, log_probs)
