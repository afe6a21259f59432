"""Features as bytes: how much of what the backbone knew of a sample is kept, and in how many bits.

A state is kept as it is, rounded to bf16, or in int8. For int8 each channel is first divided by its usual share of a token's
size (mean of fourth powers, of tokens brought to unit size: single huge tokens, which language models have, do not count),
then each token by its largest entry over 127. Half a step, ``token * channel / 2``, bounds the error of every entry.

The final hidden state is what the backbone's distribution is read from. Where no drafter reads it, its ``top`` likeliest
tokens and the mass of the rest can stand for it, at the learned positions alone: the rest is then spread over the other tokens as
it is on average over the first samples (``tail_V``). How far that is from the truth is measured when a cache is written.

Shape suffixes: B batch, T positions, P positions of several samples in one line, L learned of them, S samples, D width,
V vocabulary, M likeliest tokens kept, C positions of a chunk.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.support.errors import UserError
from headstart.support.nest import map_tensors
from headstart.training.data.packing import Batch

Encoded = dict[str, Tensor]
"""What is kept of one sample, or of several behind each other, by name."""
CHUNK = 256
"""Positions whose logits are held at a time."""
LEAST = -100.0
"""Log of the mass of nothing."""


@dataclass(frozen=True)
class CacheFormat:
    """What is kept, and how."""

    taps: tuple[int, ...]
    dim: int
    vocab: int
    dtype: torch.dtype
    """The backbone's own."""
    store: Literal["int8", "bf16", "exact"] = "int8"
    top: int | None = None
    """How many likeliest tokens stand for the final hidden state; None: it is kept itself."""

    @property
    def states(self) -> dict[str, int | None]:
        """Name -> tap, of every state kept; the final one has no tap."""
        final: dict[str, int | None] = {} if self.top else {"hidden": None}
        return final | {f"tap.{tap}": tap for tap in self.taps}

    @property
    def ids(self) -> torch.dtype:
        return torch.int16 if self.vocab <= 2**15 else torch.int32

    def size(self, tokens: int, learned: int) -> int:
        """Bytes of a sample, of which so many positions are followed by a learned token."""
        wide = {"int8": 1, "bf16": 2, "exact": self.dtype.itemsize}[self.store]
        scales = 2 * (tokens + self.dim) if self.store == "int8" else 0
        teacher = learned * (self.top * (self.ids.itemsize + 2) + 8) if self.top else 0
        return len(self.states) * (tokens * self.dim * wide + scales) + teacher + 8   # two counts

    def encode(self, features: Features, readout: Callable[[Tensor], Tensor]) -> Encoded:
        """Of one sample, a batch of one row with ``loss_mask_BT``; on the CPU."""
        taps, kept = features.taps or {}, Encoded()
        for name, tap in self.states.items():
            kept |= self._pack(name, (features.hidden_BTD if tap is None else taps[tap])[0])
        assert features.loss_mask_BT is not None
        place_L = taught(features.loss_mask_BT[0])
        if self.top:
            kept |= self._likeliest(features.hidden_BTD[0, place_L], readout) | {"top.place": place_L.to(torch.int32)}
        counts = {"tokens": features.tokens_BT.shape[1], "learned": len(place_L)}
        return {name: tensor.cpu() for name, tensor in kept.items()} | {
            name: torch.tensor([count], dtype=torch.int32) for name, count in counts.items()
        }

    def _pack(self, name: str, x_TD: Tensor) -> Encoded:
        if not x_TD.isfinite().all():
            raise UserError(f"the backbone's states ({name}) are not finite in {x_TD.dtype}; set backbone.dtype to bf16 or fp32")
        if self.store != "int8":
            return {name: x_TD.to(torch.bfloat16) if self.store == "bf16" else x_TD}
        x_TD = x_TD.float()
        unit_TD = x_TD / x_TD.square().mean(1, keepdim=True).sqrt().clamp(min=1e-20)
        channel_1D = unit_TD.pow(4).mean(0, keepdim=True).pow(0.25).clamp(min=1e-6).to(torch.bfloat16)
        even_TD = x_TD / channel_1D
        token_T = (even_TD.abs().amax(1) / 127).clamp(min=1e-20).to(torch.bfloat16)
        steps_TD = (even_TD / token_T[:, None]).round().clamp(-127, 127).to(torch.int8)
        return {name: steps_TD, f"{name}.token": token_T, f"{name}.channel": channel_1D}

    def _likeliest(self, hidden_LD: Tensor, readout: Callable[[Tensor], Tensor]) -> Encoded:
        assert self.top is not None
        tokens, logs, rests = [], [], []
        for hidden_CD in hidden_LD.split(CHUNK) if len(hidden_LD) else [hidden_LD]:
            log_p_CV = readout(hidden_CD).float().log_softmax(-1)
            log_CM, token_CM = log_p_CV.topk(self.top, -1)
            rests.append(log_p_CV.scatter(-1, token_CM, -torch.inf).logsumexp(-1).clamp(min=LEAST))
            tokens.append(token_CM.to(self.ids))
            logs.append(log_CM.to(torch.float16))
        return {"top.token": torch.cat(tokens), "top.log": torch.cat(logs), "top.rest": torch.cat(rests)}

    def decode(self, kept: Encoded, batch: Batch, taps: tuple[int, ...]) -> Features:
        """The features of a batch, whose members ``kept`` holds one behind the other; on the batch's device, in the backbone's dtype."""
        B, T = batch.tokens_BT.shape
        device = batch.tokens_BT.device
        lengths = kept["tokens"].tolist()
        samples = iter(lengths)
        rows = [sum(next(samples) for _ in row) for row in batch.members]
        place_P = torch.cat([torch.arange(b * T, b * T + count) for b, count in enumerate(rows)]).to(device)
        there = {name: tensor.to(device) for name, tensor in kept.items()}

        def spread(x_PD: Tensor, at_P: Tensor) -> Tensor:
            return x_PD.new_zeros(B * T, x_PD.shape[-1]).index_copy_(0, at_P, x_PD).view(B, T, -1)

        sample_P = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        states = {
            tap: spread(self._unpack(there, name, sample_P), place_P)
            for name, tap in self.states.items()
            if tap is None or tap in taps
        }
        if self.top:
            states[None] = spread(_row(there), place_P[_in_line(kept).to(device)])
        hidden_BTD = states.pop(None)
        found = {tap: states[tap] for tap in taps} or None
        return Features(batch.tokens_BT, hidden_BTD, found, batch.loss_mask_BT, batch.document_BT)

    def _unpack(self, kept: Encoded, name: str, sample_P: Tensor) -> Tensor:
        if self.store != "int8":
            return kept[name].to(self.dtype)
        scale_PD = kept[f"{name}.token"].float()[:, None] * kept[f"{name}.channel"].float()[sample_P]
        return (kept[name] * scale_PD).to(self.dtype)


def row_of(features: Features, row: int, length: int) -> Features:
    """One row of a batch without its padding."""
    return map_tensors(lambda x: x[row : row + 1, :length], features)


def taught(learn_T: Tensor) -> Tensor:
    """Positions of one sample whose next token is to be learned: there the backbone's distribution is asked for."""
    return learn_T[1:].nonzero().flatten()


def join(parts: Sequence[Encoded]) -> Encoded:
    """Samples one behind the other."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _row(kept: Encoded) -> Tensor:
    """The likeliest tokens, their logs and the log of the rest, side by side: ``[L, 2M + 1]``. Numbers of tokens are exact in fp32."""
    return torch.cat([kept["top.token"].float(), kept["top.log"].float(), kept["top.rest"][:, None]], -1)


def _in_line(kept: Encoded) -> Tensor:
    """Where the learned positions stand in the line of all samples, ``[L]``."""
    start_S = kept["tokens"].cumsum(0) - kept["tokens"]
    return (kept["top.place"] + start_S.repeat_interleave(kept["learned"])).long()


class TopTeacher:
    """Stands in for the backbone where the objective asks it to read out: from the likeliest tokens to logits over all."""

    def __init__(self, tail_V: Tensor) -> None:
        self.log_tail_V = tail_V.clamp(min=1e-30).log()
        self.vocab, self.device = len(tail_V), tail_V.device

    def readout(self, hidden: Tensor) -> Tensor:
        """What `_row` put side by side ``[..., 2M + 1]`` -> log-probabilities ``[..., V]``."""
        top = hidden.shape[-1] // 2
        tokens, logs, rest = hidden[..., :top].long(), hidden[..., top : 2 * top], hidden[..., 2 * top :]
        spread = self.log_tail_V.expand(*hidden.shape[:-1], -1).scatter(-1, tokens, -torch.inf)
        scale = (rest - spread.logsumexp(-1, keepdim=True)).nan_to_num(posinf=LEAST)   # nothing is left where all tokens are kept
        return (spread + scale).scatter(-1, tokens, logs)
