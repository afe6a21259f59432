"""What a call to generate returns: transformers' output with statistics of the decoding steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from headstart.heads.backbone.model_config import CACHE
from headstart.inference.decode import Decoder
from headstart.inference.engine.drafter_source import DrafterSource
from headstart.inference.engine.request import Request
from headstart.inference.engine.tree import VerifiedTree
from headstart.inference.steps import Step, Tally, cut

if TYPE_CHECKING:
    from headstart.inference.beam.beam import BeamDecoder


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """The output with ``return_dict_in_generate=True``: transformers' fields and statistics of the decoding steps."""

    steps: list[Step] = None  # type: ignore[assignment]  # transformers allows no other default
    """The forward passes of the backbone after prefill."""
    tally: Tally = None  # type: ignore[assignment]
    """The sums over them."""
    capture: str | None = None
    """How its last passes ran: ``compile``, ``trace``, ``cuda-graph`` or ``off``."""
    sequences_scores: Tensor | None = None
    """With ``num_beams`` and ``output_scores=True``: the score of each sequence."""
    beam_indices: Tensor | None = None
    """With ``num_beams``: the beam that each token continued, int32 ``[B * num_return_sequences, T]``; -1 after the end."""

    @property
    def passes(self) -> int:
        """Forward passes of the backbone after prefill."""
        return len(self.steps)

    @property
    def tau(self) -> float:
        """Mean acceptance length: tokens per row and pass, the backbone's own token included; 1 for autoregressive decoding."""
        return self.tally.tau

    @property
    def rested(self) -> int:
        """Passes in which drafts rested: they would have cost more than they save, or such a pass was to be timed. Where drafts rest in
        most passes, tau is near 1 whatever they are worth."""
        return self.tally.rested

    @property
    def acceptance_per_depth(self) -> list[float]:
        """Acceptance rate at each depth, as a fraction of passes; tau is 1 + their sum."""
        return self.tally.acceptance_per_depth

    @property
    def seconds(self) -> dict[str, float]:
        """Total seconds spent on ``draft``, ``verify`` and ``host`` (on an accelerator, exact only with ``timed=True``)."""
        return self.tally.seconds

    @property
    def nodes(self) -> list[int]:
        """For each pass, the nodes of a row's tree, root included: 1 for an autoregressive step; with beams, each beam has a root."""
        return [step.nodes for step in self.steps]

    @property
    def accept_lengths(self) -> list[list[int]]:
        """For each row, the number of tokens that each pass wrote."""
        return [[step.written[row] for step in self.steps if row in step.written] for row in range(self.tally.texts)]

    @property
    def trees(self) -> list[list[VerifiedTree]] | None:
        """For each row, the verified tree of each of its passes; None with beams."""
        if self.beam_indices is not None:
            return None
        return [[step.trees[row] for step in self.steps if row in step.written] for row in range(self.tally.texts)]

    @property
    def kept(self) -> list[list[int]] | None:
        """For each row, the number of drafts that each pass accepted, those past the end of the text included; None with beams."""
        return None if self.trees is None else [[tree.kept for tree in row] for row in self.trees]

    @property
    def drafted(self) -> list[list[int]] | None:
        """For each row, the number of tokens drafted for each pass; None with beams."""
        return None if self.trees is None else [[tree.drafted for tree in row] for row in self.trees]


def output_of(decoder: Decoder | BeamDecoder, steps: list[Step], request: Request) -> GenerateOutput:
    """``steps``: those of the call."""
    if isinstance(decoder, Decoder):
        beams, steps = None, cut(steps, {number: len(text.written) - 1 for number, text in decoder.texts.of.items()})
    else:
        beams = decoder.best()
    scores, logits = decoder.kept()
    cache: dict[str, Any] = {CACHE: decoder.prompts.continued.cache}
    return GenerateOutput(
        sequences=decoder.sequences(),
        scores=_by_step(scores) if request.scores else None,
        logits=_by_step(logits) if request.logits else None,
        **cache,
        steps=steps,
        tally=Tally.of(steps, len(request.ids_BT), max([0, *(source.depth for source in decoder.policy.of_kind(DrafterSource))])),
        capture=decoder.reader.read.captured_by,
        sequences_scores=beams.scores_BK if beams is not None and request.scores else None,
        beam_indices=beams.origins_BKP if beams is not None else None,
    )


def _by_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Turn lists by row and token into tensors ``[B, V]`` by step; zeros after the end of a row."""
    longest = max(len(row) for row in rows)
    return tuple(torch.stack([row[i] if i < len(row) else torch.zeros_like(rows[0][0]) for row in rows]) for i in range(longest))
