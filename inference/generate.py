"""Heads on their backbone: what a user loads, and the callable that transformers' ``generate`` takes.

    heads = headstart.load("out/qwen3-8b-eagle3", backbone=model)
    model.generate(**inputs, custom_generate=heads.generate, do_sample=True, temperature=0.7)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter, require_count
from headstart.heads.checkpoint import load_drafter
from headstart.inference.beam.beam import BeamDecoder, Beams
from headstart.inference.capture.capture import BackendName, Capturer
from headstart.inference.decode import Decoder, Pass
from headstart.inference.engine.noise import row_seeds
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request, read_request, require_one_side
from headstart.inference.engine.sequence import sequences
from headstart.inference.engine.tree import TreeShape
from headstart.inference.sources.proposer import Proposer
from headstart.inference.speculation.speculation import Speculation
from headstart.inference.speculation.tuned import Tuned, read_tuned
from headstart.support.errors import UserError


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """What ``return_dict_in_generate=True`` gives: transformers' own fields, and how the text came about."""

    passes: int | None = None
    """Backbone passes after the one over the prompt."""
    tau: float | None = None
    """Tokens a row wrote per pass, the backbone's own included: 1 is plain decoding."""
    acceptance_per_depth: list[float] | None = None
    """Share of passes in which the draft of each depth was accepted; tau is 1 + their sum."""
    seconds: dict[str, float] | None = None
    """Seconds spent drafting, verifying and on the host, over all passes (on an accelerator exact only with ``timed=True``)."""
    runs: list[list[int]] | None = None
    """For each row, how many tokens each pass wrote."""
    nodes: list[int] | None = None
    """For each pass, how many nodes the tree of a row had, its root included: 1 is a plain step; of a beam search, its beams' roots."""
    sequences_scores: Tensor | None = None
    """Of a beam search, with ``output_scores=True``: the score of each sequence."""
    beam_indices: Tensor | None = None
    """Of a beam search: for each token which beam it continued, int32 ``[B * num_return_sequences, T]``; -1 behind the end."""


class SpeculativeModel:
    """A backbone, the drafter trained on it, and proposers that need no training; with none of them, plain decoding by the same rule.

    ``capture``: the backend that captures forward passes to replay them without Python's overhead (see `capture`): "auto", "trace",
    "cuda-graph", "compile" or "off". A capture is of the model as it is at that time: after adding or removing adapters, load the
    heads again.
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: Drafter | None = None,
        *,
        proposers: Sequence[Proposer | Drafter] = (),
        capture: BackendName = "auto",
    ) -> None:
        self.backbone, self.drafter, self.capture = backbone, drafter, capture
        self.tuned: Tuned | None = None
        """What `headstart tune` measured of them on this machine."""
        self.drafters = [one for one in (drafter, *proposers) if isinstance(one, Drafter)]
        self.proposers = [one for one in proposers if isinstance(one, Proposer)]
        self.limits: dict[str, Any] | None = None
        """What `limit` was last told, by the names of its arguments."""
        self._engines: dict[bool, Engine] = {}
        self._weights: list[int] = []
        _hand_over(backbone.model)

    def limit(self, *, window: int | None = None, sink: int = 4, offload: bool = False) -> None:
        """Bound what the trained head keeps of a text, for long ones: ``window`` lets it look at the first ``sink`` and the last
        ``window`` positions alone (None: at all), and ``offload`` keeps its keys and values in host memory between drafts.

        No token changes, only how many are accepted. Holds for texts prefill_at from now on; without arguments there is no limit.
        Raises UserError where there is no such head.
        """
        if window is not None:
            require_count("window", window, of="limit")
        require_count("sink", sink, least=0, of="limit")
        if self.drafter is None:
            raise UserError("draft windows and offloading are for trained heads, and there are none; load heads, or leave them out")
        self.drafter.limit(window, sink, offload)
        self.limits = {"window": window, "sink": sink, "offload": offload}

    @property
    def disturbed(self) -> int:
        """Steps so far that took longer than the next ones will: something was recorded for replay."""
        return sum(engine.disturbed for engine in self._engines.values())

    def engine(self, speculate: bool) -> Engine:
        """What decodes, with what it has learned and recorded; made anew if the weights have been moved or converted."""
        weights = [weight.data_ptr() for module in (self.backbone.model, *self.drafters) for weight in module.parameters()]
        if weights != self._weights:
            self._engines, self._weights = {}, weights
        if speculate not in self._engines:
            self._engines[speculate] = Engine(self, speculate)
        return self._engines[speculate]

    @torch.no_grad()
    def generate(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        seed: int | list[int] | None = None,
        tree: TreeShape | None = None,
        speculate: bool = True,
        batch: int | None = None,
        timed: bool = False,
        **model_kwargs: Any,
    ) -> GenerateOutput | Tensor:
        """For ``model.generate(..., custom_generate=heads.generate)``; the keyword arguments from ``seed`` on are its own.

        ``seed``: an int (row i has seed + i), a list with one a row, or None for torch's default generator. ``tree``: how large
        the candidate trees are; None: each as large as pays, by measured cost. ``speculate=False``: plain decoding by the same rule.
        ``batch``: decode at most so many rows at once, the others as rows end. ``timed``: exact times on an accelerator. With
        ``num_beams`` it is transformers' beam search, several steps a pass; a ``tree`` then has the nodes of all beams of a row.
        Raises UserError (a ValueError) for what is not supported.
        """
        if model is not self.backbone.model:
            raise UserError(f"these heads are on another model object ({self.backbone.name}); load them with backbone=this model")
        request = read_request(input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
        require_one_side(request, self.backbone)
        seeds_B = row_seeds(seed, len(input_ids), input_ids.device) if request.sample else None
        if batch is not None:
            require_count("batch", batch, of="generate")
        engine = self.engine(speculate and bool(self.drafters or self.proposers))
        decoder: Decoder | BeamDecoder
        if request.beams is not None:
            decoder = BeamDecoder(engine.beams, request, request.beams, tree, batch or len(request.ids_BT))
        else:
            decoder = Decoder(engine.reader, engine.speculation, request, tree, seeds_B, batch or len(input_ids))
        passes = list(decoder.run(timed))
        if streamer is not None:
            streamer.end()
        return _output(decoder, passes, request) if request.dictionary else _sequences(decoder, request)


class Engine:
    """What a call to generate decodes with: the reader, and what is drafted."""

    def __init__(self, heads: SpeculativeModel, speculate: bool) -> None:
        drafters = heads.drafters if speculate else []
        self.capturer = Capturer(heads.capture, heads.backbone.device)
        self.speculation = Speculation(drafters, heads.proposers, self.capturer) if speculate else None
        if self.speculation is not None and heads.tuned is not None:
            self.speculation.by_length = heads.tuned.costs()
            for sampled, calibration in heads.tuned.chances().items():
                self.speculation.attend(sampled)
                self.speculation.learned.calibration = calibration
        self.reader = Reader(heads.backbone, tuple(sorted({tap for drafter in drafters for tap in drafter.taps})), self.capturer)
        self.beams = Beams(self.reader, self.speculation, self.capturer)

    @property
    def disturbed(self) -> int:
        """See `SpeculativeModel.disturbed`."""
        drafting = self.speculation.disturbed if self.speculation is not None else 0
        return self.reader.read.disturbed + self.beams.tries.read.disturbed + drafting


def load(
    path: str | Path | None,
    backbone: PreTrainedModel | Backbone,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    allow_finetuned: bool = False,
    depth: int | None = None,
    proposers: Sequence[Proposer | Drafter] = (),
    capture: BackendName = "auto",
) -> SpeculativeModel:
    """Heads from a folder or hub id onto a loaded model; None: no drafter, plain decoding by the same rule, or ``proposers`` alone.

    ``depth``: tokens beyond the root that the drafter drafts, also more than it was trained for where its kind allows that (None: as
    the recipe says). Raises UserError when the checkpoint is missing, damaged, or was trained on another backbone (see `load_drafter`).
    """
    on = backbone if isinstance(backbone, Backbone) else Backbone(backbone)
    drafter = None if path is None else load_drafter(path, on, tokenizer=tokenizer, allow_finetuned=allow_finetuned)
    if drafter is not None and depth is not None:
        drafter.set_depth(depth)
    heads = SpeculativeModel(on, drafter, proposers=proposers, capture=capture)
    heads.tuned = read_tuned(path, on)
    return heads


def _sequences(decoder: Decoder | BeamDecoder, request: Request) -> Tensor:
    return decoder.sequences() if isinstance(decoder, BeamDecoder) else sequences(decoder.texts, request)


def _output(decoder: Decoder | BeamDecoder, passes: list[Pass], request: Request) -> GenerateOutput:
    runs = [written for one in passes for written in one.written if written]
    drafters = decoder.speculation.drafters if decoder.speculation is not None else []
    depth = max([0, *(drafter.depth for drafter in drafters), *(run - 1 for run in runs)])
    beams = decoder if isinstance(decoder, BeamDecoder) else None
    return GenerateOutput(
        sequences=_sequences(decoder, request),
        scores=_by_step(decoder.scores) if request.scores else None,
        logits=_by_step(decoder.logits) if request.logits else None,
        passes=len(passes),
        tau=sum(runs) / len(runs) if runs else 1.0,
        acceptance_per_depth=[sum(run > k + 1 for run in runs) / max(len(runs), 1) for k in range(depth)],
        seconds={part: sum(getattr(one, part) for one in passes) for part in ("draft", "verify", "host")},
        runs=[[one.written[row] for one in passes if one.written[row]] for row in range(len(request.ids_BT))],
        nodes=[one.nodes for one in passes],
        sequences_scores=beams.sequences_scores() if beams is not None and request.scores else None,
        beam_indices=beams.beam_indices() if beams is not None else None,
    )


def _by_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Per row and token -> per step ``[B, V]``; a row that has ended has zeros."""
    longest = max(len(row) for row in rows)
    return tuple(torch.stack([row[i] if i < len(row) else torch.zeros_like(rows[0][0]) for row in rows]) for i in range(longest))


def _hand_over(model: PreTrainedModel) -> None:
    """Let ``streamer`` and ``tokenizer`` (for stop strings) reach our callable.

    transformers 5.23 drops both on the way to any ``custom_generate`` callable, and refuses stop strings for want of the tokenizer.
    """
    if "_extract_generation_mode_kwargs" in vars(model):
        return
    original = model._extract_generation_mode_kwargs

    def extract(
        self: PreTrainedModel,
        custom_generate: str | Callable | None,
        kwargs: dict[str, Any],
        synced_gpus: bool | None,
        assistant_model: PreTrainedModel | None,
        streamer: BaseStreamer | None,
    ) -> dict[str, Any]:
        tokenizer = kwargs.get("tokenizer")
        found = original(custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        if isinstance(custom_generate, MethodType) and isinstance(custom_generate.__self__, SpeculativeModel):
            if assistant_model is not None:
                raise UserError("assistant_model and heads both draft; leave assistant_model out")
            given = {"streamer": streamer, "tokenizer": tokenizer}   # a streamer that is None counts as one with beams
            found |= {name: value for name, value in given.items() if value is not None}
        return found

    model._extract_generation_mode_kwargs = MethodType(extract, model)
