"""The user's entry point: a model with its heads, and the callable to pass to transformers' ``generate``.

    heads = headstart.load("out/qwen3-8b-eagle3", backbone=model)
    model.generate(**inputs, custom_generate=heads.generate, do_sample=True, temperature=0.7)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter, require_count
from headstart.heads.checkpoint import chat_of, load_drafter
from headstart.inference.beam.beam import BeamDecoder, Beams
from headstart.inference.capture.capture import BackendName, Capturer
from headstart.inference.capture.packed import version
from headstart.inference.decode import Decoder
from headstart.inference.engine.memory import require_memory
from headstart.inference.engine.noise import row_seeds
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request, read_request, require_one_side
from headstart.inference.engine.sequence import output_ids
from headstart.inference.engine.timing import Pass
from headstart.inference.engine.tree import TreeShape, TreeSize, VerifiedTree
from headstart.inference.engine.turn import turn
from headstart.inference.handover import Decoding, hand_over
from headstart.inference.self_check.check import self_check
from headstart.inference.sources.drafter_source import DrafterSource
from headstart.inference.sources.proposer import Proposer
from headstart.inference.sources.proposer_source import ProposerSource
from headstart.inference.sources.source import Source
from headstart.inference.speculation.speculation import Speculation
from headstart.inference.speculation.tuned import Tuned, read_tuned
from headstart.inference.spot_check import SpotCheck
from headstart.support.chat.conversation import Chat
from headstart.support.errors import UserError


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """The output with ``return_dict_in_generate=True``: transformers' fields and statistics of the decoding steps."""

    passes: int | None = None
    """Forward passes of the backbone after prefill."""
    tau: float | None = None
    """Mean acceptance length: tokens per row and pass, the backbone's own token included; 1 for autoregressive decoding."""
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
    trees: list[list[VerifiedTree]] | None = None
    """For each row, the verified tree of each of its passes; None with beams."""
    sequences_scores: Tensor | None = None
    """With ``num_beams`` and ``output_scores=True``: the score of each sequence."""
    beam_indices: Tensor | None = None
    """With ``num_beams``: the beam that each token continued, int32 ``[B * num_return_sequences, T]``; -1 after the end."""


class SpeculativeModel(Decoding):
    """A backbone, a drafter trained on it, and proposers that need no training; without drafter and proposers, autoregressive decoding.

    ``capture``: the backend that captures forward passes and replays them without Python's overhead (see `capture`): "auto", "trace",
    "cuda-graph", "compile" or "off". A capture keeps the model as it was: after adding or removing adapters, or changing
    weights through ``.data``, load the heads again.
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
        """Results of `headstart tune` on this machine, if any."""
        self.drafters = [one for one in (drafter, *proposers) if isinstance(one, Drafter)]
        self.proposers = [one for one in proposers if isinstance(one, Proposer)]
        self.chat: Chat | None = None   # `load` sets it: makes prompts from conversations as the heads' training did
        self.limits: dict[str, Any] | None = None
        """The arguments of the last call to `limit`."""
        self._engines: dict[bool, Engine] = {}
        self._weights: list[int] = []
        hand_over(backbone.model)

    def limit(self, *, window: int | None = None, sink: int = 4, offload: bool = False) -> None:
        """Limit the drafter's KV cache for long sequences: it attends only to the first ``sink`` and the last ``window`` positions
        (None: to all), and with ``offload`` its keys and values stay in host memory between drafts.

        Tokens do not change, only how many drafts are accepted. Applies to later calls; without arguments, limits are removed.
        Raises UserError if there is no drafter or it does not support limits.
        """
        if window is not None:
            require_count("window", window, of="limit")
        require_count("sink", sink, least=0, of="limit")
        if self.drafter is None:
            raise UserError("draft windows and offloading are for trained heads, and there are none; load heads, or leave them out")
        self.drafter.limit(window, sink, offload)
        self.limits = {"window": window, "sink": sink, "offload": offload}

    def engine(self, speculate: bool) -> Engine:
        """The `Engine`, which holds captures and statistics; rebuilt after weights were changed or moved or a drafter's depth was set."""
        parameters = [weight for module in (self.backbone.model, *self.drafters) for weight in module.parameters()]
        weights = [number for weight in parameters for number in (weight.data_ptr(), version(weight))]
        weights += [depth for drafter in self.drafters for depth in (drafter.depth, drafter.deepest)]
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
        tree: TreeSize = "auto",
        speculate: bool = True,
        batch_size: int | None = None,
        timed: bool = False,
        **model_kwargs: Any,
    ) -> GenerateOutput | Tensor:
        """Generate; called by ``model.generate(..., custom_generate=heads.generate)`` with the keyword arguments from ``seed`` on.

        ``seed``: an int (row i has seed + i), a list with one per row, or None for torch's default generator. ``tree``: "auto" adapts the
        size of the candidate trees to acceptance rates and measured latency; a `TreeShape` fixes it. ``speculate=False``: autoregressive
        decoding. ``batch_size``: the most rows decoded at once; others start as rows end. ``timed``: exact times on an accelerator.
        ``num_beams``: transformers' beam search, several steps per pass; a `TreeShape` then counts the nodes of all beams of a row.
        Calls of several threads on one model take turns (see `turn`).
        Raises UserError (a ValueError) for arguments that are not supported.
        """
        self.require_model(model)
        request = read_request(input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
        require_one_side(request, self.backbone)
        seeds_B = row_seeds(seed, len(input_ids), input_ids.device) if request.sample else None
        if batch_size is not None:
            require_count("batch_size", batch_size, of="generate")
        if tree != "auto" and not isinstance(tree, TreeShape):
            raise UserError(f"tree is 'auto' or a TreeShape; got {tree!r}")
        shape = tree if isinstance(tree, TreeShape) else None
        if speculate and shape is not None and shape.depth is not None:
            for drafter in self.drafters:
                drafter.require_depth(shape.depth)
        rows = min(batch_size or len(input_ids), len(input_ids))
        require_memory(self.backbone, rows, input_ids.shape[1], shape.nodes if shape is not None else 1)
        with turn(model):
            engine = self.engine(speculate and bool(self.drafters or self.proposers))
            if engine.capturer.unchecked:
                engine.reader.start(request.limit)
                self_check(engine.reader, engine.speculation.of_kind(DrafterSource), engine.capturer)
            decoder: Decoder | BeamDecoder
            if request.beams is not None:
                decoder = BeamDecoder(engine.beams, request, request.beams, shape, batch_size or len(request.ids_BT))
            else:
                decoder = Decoder(engine.reader, engine.speculation, request, shape, seeds_B, batch_size or len(input_ids))
            passes = list(decoder.run(timed))
            if isinstance(decoder, Decoder):
                engine.spot_check.after(decoder)
        if streamer is not None:
            streamer.end()
        return _output(decoder, passes, request) if request.dictionary else _sequences(decoder, request)


class Engine:
    """The reader and the draft sources, kept from call to call."""

    def __init__(self, heads: SpeculativeModel, speculate: bool) -> None:
        drafters, proposers = (heads.drafters, heads.proposers) if speculate else ([], [])
        self.capturer = Capturer(heads.capture, heads.backbone.device)
        sources: list[Source] = [ProposerSource(proposer) for proposer in proposers]   # first: a drafter may rest where they are sure
        sources += [DrafterSource(f"{i} {type(one).__name__}", one, self.capturer) for i, one in enumerate(drafters)]
        self.speculation = Speculation(sources, self.capturer.slow, self.capturer.fixed)
        if heads.tuned is not None:
            self.speculation.cost_model = heads.tuned.cost_model()
            for source in sources:
                for sampled, learned in source.by_mode.items():
                    learned.calibration = heads.tuned.calibration_of(source.name, sampled)
        self.spot_check = SpotCheck(heads.backbone, self.capturer)
        self.reader = Reader(heads.backbone, tuple(sorted({tap for drafter in drafters for tap in drafter.taps})), self.capturer)
        self.beams = Beams(self.reader, self.speculation)


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
    """Load heads from a folder or hub id onto a loaded model. ``path`` None: no drafter, only ``proposers`` or autoregressive decoding.
    ``tokenizer``: the backbone's; ``heads.chat`` then makes prompts with the chat template that the heads were trained with.

    ``depth``: the number of depths to draft, which may exceed the trained depth where the drafter allows it. None: as in its recipe, and in
    adaptive trees up to twice as many where that pays, unless the recipe sets ``draft_depth``.
    Raises UserError if the checkpoint is missing, damaged, or of another backbone (see `load_drafter`).
    """
    on = backbone if isinstance(backbone, Backbone) else Backbone(backbone)
    drafter = None if path is None else load_drafter(path, on, tokenizer=tokenizer, allow_finetuned=allow_finetuned)
    if drafter is not None and depth is not None:
        drafter.set_depth(depth)
    heads = SpeculativeModel(on, drafter, proposers=proposers, capture=capture)
    heads.tuned = read_tuned(path, on)
    heads.chat = chat_of(path, tokenizer, on)
    return heads


def _sequences(decoder: Decoder | BeamDecoder, request: Request) -> Tensor:
    return decoder.sequences() if isinstance(decoder, BeamDecoder) else output_ids([*decoder.sequences.values()], request)


def _output(decoder: Decoder | BeamDecoder, passes: list[Pass], request: Request) -> GenerateOutput:
    own: list[list[tuple[int, Pass]]] = [[] for _ in request.ids_BT]
    for one in passes:
        for number, written in one.written.items():
            own[number] += [(written, one)] if written else []
    lengths = [written for row in own for written, _ in row]
    depth = max([0, *(source.depth for source in decoder.speculation.of_kind(DrafterSource)), *(length - 1 for length in lengths)])
    beams = decoder if isinstance(decoder, BeamDecoder) else None
    return GenerateOutput(
        sequences=_sequences(decoder, request),
        scores=_by_step(decoder.scores) if request.scores else None,
        logits=_by_step(decoder.logits) if request.logits else None,
        passes=len(passes),
        tau=sum(lengths) / len(lengths) if lengths else 1.0,
        acceptance_per_depth=[sum(length > k + 1 for length in lengths) / max(len(lengths), 1) for k in range(depth)],
        seconds={part: sum(getattr(one, part) for one in passes) for part in ("draft", "verify", "host")},
        accept_lengths=[[written for written, _ in its] for its in own],
        kept=None if beams else [[one.kept[row] for _, one in its] for row, its in enumerate(own)],
        drafted=None if beams else [[one.drafted[row] for _, one in its] for row, its in enumerate(own)],
        nodes=[one.nodes for one in passes],
        pass_seconds=[one.seconds for one in passes],
        trees=None if beams else [[one.trees[row] for _, one in its] for row, its in enumerate(own)],
        sequences_scores=beams.sequences_scores() if beams is not None and request.scores else None,
        beam_indices=beams.beam_indices() if beams is not None else None,
    )


def _by_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Turn lists by row and token into tensors ``[B, V]`` by step; zeros after the end of a row."""
    longest = max(len(row) for row in rows)
    return tuple(torch.stack([row[i] if i < len(row) else torch.zeros_like(rows[0][0]) for row in rows]) for i in range(longest))
