"""Heads as the candidate generator of transformers' own assisted decoding.

The loop, its verification and its sampling are the library's: one row, a chain of drafts in every round. What the model computed is read by
hooks, since the numbering of ``output_hidden_states`` differs between versions and its last entry is normed.

Shape suffixes: B batch, T positions, N = 1 node of a chain, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.streamers import BaseStreamer

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.backbone.hooks import Evaluation, tapped
from headstart.heads.backbone.probes import require_same_model
from headstart.heads.backbone.versions import CACHE, cache_argument
from headstart.heads.base import Drafter
from headstart.inference.engine.known_processors import name_of
from headstart.inference.engine.processing import Processing
from headstart.inference.generate import SpeculativeModel
from headstart.inference.handover import entry, handed_streamer, turn
from headstart.support.devices import without_autocast
from headstart.support.errors import UserError

OTHER = "decode with custom_generate=heads.generate"


def assisted(heads: SpeculativeModel, depth: int | None = None) -> Any:
    """Return a callable for ``model.generate(..., custom_generate=...)`` that decodes by transformers' assisted decoding with these heads.

    ``depth``: tokens drafted in a round; None: the drafter's depth. Greedy output is that of the model alone; sampled tokens are drawn by
    transformers' rejection sampling, which keeps the model's distribution. Raises UserError without trained heads, for heads that draft on
    the decoder's own KV cache, or for a depth that they cannot draft.
    """
    if heads.drafter is None:
        raise UserError("assisted decoding drafts with trained heads, and there are none; load heads, or use prompt_lookup_num_tokens")
    if heads.drafter.uses_backbone_cache:
        raise UserError(f"{type(heads.drafter).__name__} drafts on Headstart's KV cache; decode with custom_generate=heads.generate")
    if depth is not None:
        heads.drafter.require_depth(depth)
    return AssistedDecoding(heads.backbone, heads.drafter, depth or heads.drafter.depth).generate


class AssistedDecoding:
    """transformers' assisted decoding of one backbone with one drafter."""

    def __init__(self, backbone: Backbone, drafter: Drafter, depth: int) -> None:
        self.backbone, self.drafter, self.depth = backbone, drafter, depth

    @entry
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
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Generate; called by ``model.generate``. Raises UserError for arguments with which the output could differ from the model's."""
        require_same_model(self.backbone, model)
        if (name := cache_argument(model)) != CACHE:
            given = f"takes its KV cache as {name!r}, transformers {transformers.__version__} gives it as {CACHE!r}"
            raise UserError(f"{type(model).__name__}.forward {given}: rename the argument, or {OTHER}")
        streamer = handed_streamer(model) if streamer is None else streamer
        _refuse(input_ids, stopping_criteria, generation_config, model_kwargs)
        pads = _left_padding(model_kwargs.get("attention_mask"))
        processing = Processing(logits_processor, 1)
        for processor in processing.unknown:
            raise UserError(
                f"{name_of(processor)} may keep a state, and assisted decoding asks it about drafts that are rejected later: leave it out, "
                f"or {OTHER}"
            )
        modes = (self.backbone.evaluation(), Evaluation(self.drafter)(), without_autocast())
        with turn(model), modes[0], modes[1], modes[2], _reading(self.backbone, self.drafter.taps) as outputs:
            ends = [int(t) for c in stopping_criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id.flatten()]
            limits = Limits(self.depth, generation_config.max_length, frozenset(ends))
            candidates = HeadCandidates(self.drafter, outputs, limits, processing if generation_config.do_sample else None, pads)
            with _candidates_of(model, candidates):
                return model._assisted_decoding(
                    input_ids, logits_processor, stopping_criteria, generation_config, streamer=streamer, **model_kwargs
                )


@dataclass(frozen=True)
class Limits:
    """Where a chain of drafts ends."""

    depth: int
    length: int
    """The maximum length of the text, padding included."""
    ends: frozenset[int]
    """Tokens that end the text."""


class HeadCandidates(CandidateGenerator):
    """A drafter's chains for one text, greedy or (with ``sampled``) drawn at the temperature and with the filters of the call."""

    def __init__(self, drafter: Drafter, outputs: Outputs, limits: Limits, sampled: Processing | None, pads: int) -> None:
        self.drafter, self.outputs, self.limits, self.sampled = drafter, outputs, limits, sampled
        self.read = self.pads = pads
        """Number of positions that the state covers or skips, left padding included."""
        self.state: Any = None

    def get_candidates(self, input_ids: Tensor, **unused: Any) -> tuple[Tensor, Tensor | None]:
        """Return the text followed by drafts, ``[1, T + K]``, and when sampling the logits they were drawn from, ``[1, K, V]``."""
        depth = min(self.limits.depth, self.limits.length - input_ids.shape[1] - 1)
        if self.outputs.hidden_BTD is None or depth < 1:  # the model has not read the prompt yet, or one token is left
            return input_ids, None
        self._extend(input_ids)
        return self._chain(input_ids, depth)

    def _extend(self, input_ids: Tensor) -> None:
        """Extend the drafter's state by what the model has read and kept since the last call: all but the last token of the text."""
        hidden_BTD, taps = self.outputs.hidden_BTD, self.outputs.taps
        assert hidden_BTD is not None
        skipped = self.pads if self.state is None else 0
        rows = slice(skipped, skipped + input_ids.shape[1] - 1 - self.read)
        kept = {tap: taps[tap][:, rows] for tap in self.drafter.taps}
        device = self.drafter.backbone.device
        features = Features(input_ids[:, self.read : -1].to(device), hidden_BTD[:, rows], kept or None)
        length = input_ids.shape[1] + 2 * (self.limits.depth + 1)
        if self.state is None:
            self.state = self.drafter.reserve(self.drafter.begin(features), length)
        else:
            self.state = self.drafter.begin(features, self.drafter.reserve(self.state, length))
        self.read = input_ids.shape[1] - 1

    def _chain(self, input_ids: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        token_11 = input_ids[:, -1:].to(self.drafter.backbone.device)
        tokens, scores, hidden = [], [], None
        for k in range(depth):
            if k == 0 or not self.drafter.all_depths_at_once:
                hidden, self.state = self.drafter.step(self.state, token_11, torch.zeros_like(token_11), k)
            assert hidden is not None
            hidden_11D = hidden[:, k : k + 1] if self.drafter.all_depths_at_once else hidden
            scores_1V = self._scores(self.drafter.readout(hidden_11D, k, token_11)[:, 0].float())
            token_11 = scores_1V.argmax(-1, True) if self.sampled is None else scores_1V.softmax(-1).multinomial(1)
            tokens.append(token_11)
            scores.append(scores_1V)
            if int(token_11) in self.limits.ends:  # no version of the loop then accepts a token after the end
                break
        drafted = torch.cat([input_ids, *(token.to(input_ids.device) for token in tokens)], 1)
        return drafted, None if self.sampled is None else torch.stack(scores, 1).to(input_ids.device)

    def _scores(self, logits_1V: Tensor) -> Tensor:
        """Return scores over the backbone's vocabulary, -inf for tokens that are never drafted."""
        if self.drafter.vocabulary is not None:
            whole_1V = logits_1V.new_full((1, self.drafter.backbone.vocab), -math.inf)
            logits_1V = whole_1V.index_copy(1, self.drafter.vocabulary, logits_1V)
        if self.sampled is None:
            return logits_1V
        logits_1V, filters = logits_1V / self.sampled.temperature, self.sampled.filters(logits_1V.device)
        return logits_1V if filters is None else filters(logits_1V)


class Outputs:
    """What the last forward pass of the model computed."""

    def __init__(self, taps: dict[int, Tensor]) -> None:
        self.taps = taps
        self.hidden_BTD: Tensor | None = None

    def keep(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.hidden_BTD = output.last_hidden_state


@contextmanager
def _reading(backbone: Backbone, taps: tuple[int, ...]) -> Iterator[Outputs]:
    """Collect the features of the model's forward passes."""
    with tapped(backbone.layers, taps) as kept:
        outputs = Outputs(kept)
        handle = backbone.base.register_forward_hook(outputs.keep)
        try:
            yield outputs
        finally:
            handle.remove()


@contextmanager
def _candidates_of(model: PreTrainedModel, candidates: CandidateGenerator) -> Iterator[None]:
    """Let assisted decoding of this model object take these candidates."""
    model._get_candidate_generator = lambda **unused: candidates  # an attribute of the object hides the method of its class
    try:
        yield
    finally:
        del model._get_candidate_generator


def _refuse(input_ids: Tensor, criteria: StoppingCriteriaList, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    other = OTHER
    if len(input_ids) > 1:
        raise UserError(f"transformers' assisted decoding takes one row; got a batch of {len(input_ids)}: {other}")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UserError(f"assisted decoding is greedy or sampled; got generation mode {mode.value!r}: {other}")
    for criterion in criteria:
        if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria):
            name = type(criterion).__name__
            raise UserError(f"assisted decoding checks {name} once per round, not at each token: leave it out, or {other}")
    if config.assistant_ensemble_weight is not None:
        raise UserError("assistant_ensemble_weight changes the text that is written; leave it out")
    past = model_kwargs.get(CACHE)
    if past is not None and past.get_seq_length() > 0:
        raise UserError(f"{CACHE} already holds tokens, which the heads have not read; give the whole sequence as input_ids")


def _left_padding(mask_1T: Tensor | None) -> int:
    """Return the number of padding positions. Raises UserError unless they are at the left end."""
    pads = 0 if mask_1T is None else int((mask_1T == 0).sum())
    if mask_1T is not None and bool((mask_1T[:, :pads] != 0).any()):
        raise UserError("attention_mask hides positions not at the row's left end; pad on the left (tokenizer.padding_side='left')")
    return pads
