"""What a call to generate returns: transformers' output with statistics of the decoding steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from headstart.heads.backbone.versions import CACHE
from headstart.inference.decode import Decoder
from headstart.inference.engine.request import Request
from headstart.inference.engine.tree import Pass, VerifiedTree
from headstart.inference.sources.drafter_source import DrafterSource

if TYPE_CHECKING:
    from headstart.inference.beam.beam import BeamDecoder


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """The output with ``return_dict_in_generate=True``: transformers' fields and statistics of the decoding steps."""

    passes: int | None = None
    """Forward passes of the backbone after prefill."""
    tau: float | None = None
    """Mean acceptance length: tokens per row and pass, the backbone's own token included; 1 for autoregressive decoding."""
    rested: int | None = None
    """Passes in which drafts rested: they would have cost more than they save, or such a pass was to be timed. Where drafts rest in most
    passes, tau is near 1 whatever they are worth."""
    acceptance_per_depth: list[float] | None = None
    """Acceptance rate at each depth, as a fraction of passes; tau is 1 + their sum."""
    seconds: dict[str, float] | None = None
    """Total seconds spent on ``draft``, ``verify`` and ``host`` (on an accelerator, exact only with ``timed=True``)."""
    accept_lengths: list[list[int]] | None = None
    """For each row, the number of tokens that each pass wrote."""
    kept: list[list[int]] | None = None
    """For each row, the number of drafts that each pass accepted, those past the end of the text included; None with beams."""
    drafted: list[list[int]] | None = None
    """For each row, the number of tokens drafted for each pass; None with beams."""
    nodes: list[int] | None = None
    """For each pass, the nodes of a row's tree, root included: 1 for an autoregressive step; with beams, each beam has a root."""
    pass_seconds: list[float] | None = None
    """The seconds of each pass; the prefill is not in them."""
    capture: str | None = None
    """How its last passes ran: ``compile``, ``trace``, ``cuda-graph`` or ``off``."""
    trees: list[list[VerifiedTree]] | None = None
    """For each row, the verified tree of each of its passes; None with beams."""
    sequences_scores: Tensor | None = None
    """With ``num_beams`` and ``output_scores=True``: the score of each sequence."""
    beam_indices: Tensor | None = None
    """With ``num_beams``: the beam that each token continued, int32 ``[B * num_return_sequences, T]``; -1 after the end."""


def output_of(decoder: Decoder | BeamDecoder, passes: list[Pass], request: Request) -> GenerateOutput:
    """``passes``: those of the call; what they wrote behind the end of a text is taken off."""
    if isinstance(decoder, Decoder):
        _cut(passes, {number: len(text.written) for number, text in decoder.texts.of.items()})
    own: list[list[tuple[int, Pass]]] = [[] for _ in request.ids_BT]
    for one in passes:
        for number, written in one.written.items():
            own[number] += [(written, one)] if written else []
    lengths = [written for row in own for written, _ in row]
    depth = max([0, *(source.depth for source in decoder.speculation.of_kind(DrafterSource)), *(length - 1 for length in lengths)])
    beams = None if isinstance(decoder, Decoder) else decoder.steps
    scores, logits = decoder.kept()
    cache: dict[str, Any] = {CACHE: decoder.prompts.continued.cache}
    return GenerateOutput(
        sequences=decoder.sequences(),
        scores=_by_step(scores) if request.scores else None,
        logits=_by_step(logits) if request.logits else None,
        **cache,
        passes=len(passes),
        tau=sum(lengths) / len(lengths) if lengths else 1.0,
        rested=sum(one.rested for one in passes),
        acceptance_per_depth=[sum(length > k + 1 for length in lengths) / max(len(lengths), 1) for k in range(depth)],
        seconds={part: sum(getattr(one, part) for one in passes) for part in ("draft", "verify", "host")},
        accept_lengths=[[written for written, _ in its] for its in own],
        kept=None if beams else [[one.kept[row] for _, one in its] for row, its in enumerate(own)],
        drafted=None if beams else [[one.drafted[row] for _, one in its] for row, its in enumerate(own)],
        nodes=[one.nodes for one in passes],
        pass_seconds=[one.seconds for one in passes],
        capture=decoder.reader.read.captured_by,
        trees=None if beams else [[one.trees[row] for _, one in its] for row, its in enumerate(own)],
        sequences_scores=beams.sequences_scores() if beams is not None and request.scores else None,
        beam_indices=beams.beam_indices() if beams is not None else None,
    )


def _cut(passes: list[Pass], lengths: dict[int, int]) -> None:
    """Take off what passes wrote behind the end of a text: tokens written before it was known that another row ends all."""
    for number, length in lengths.items():
        over = sum(one.written.get(number, 0) for one in passes) - max(length - 1, 0)
        for one in reversed(passes):
            taken = min(max(over, 0), one.written.get(number, 0))
            if taken:
                one.written[number] -= taken
                over -= taken


def _by_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Turn lists by row and token into tensors ``[B, V]`` by step; zeros after the end of a row."""
    longest = max(len(row) for row in rows)
    return tuple(torch.stack([row[i] if i < len(row) else torch.zeros_like(rows[0][0]) for row in rows]) for i in range(longest))
