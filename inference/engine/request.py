"""The arguments of one call of transformers' ``generate`` as the decoding loop needs them; unsupported ones are rejected here.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.engine.beam_rules import BeamRules, beam_processors, read_beam_rules
from headstart.inference.engine.processing import Processing
from headstart.support.errors import UserError

TENSORS = ("attention_mask", "position_ids", "cache_position")
"""Tensors that transformers itself prepares in addition to the ids; any other tensor, such as images, comes from the user."""


@dataclass(frozen=True)
class Request:
    """The arguments of one call to generate. Lengths include left padding, as in transformers."""

    ids_BT: Tensor
    """One row per prompt, regardless of the number of beams."""
    pads_B: list[int]
    """The number of padding positions at the left of each row."""
    limit: int
    """The maximum length, padding included."""
    eos: frozenset[int]
    criteria: StoppingCriteriaList
    """All other stopping criteria."""
    processing: Processing
    sample: bool
    pad_token: int
    streamer: BaseStreamer | None
    scores: bool
    logits: bool
    dictionary: bool
    beams: BeamRules | None
    """None: no beam search."""

    @staticmethod
    def plain(ids_BT: Tensor, limit: int, ends: Iterable[int], processors: LogitsProcessorList, sample: bool) -> Request:
        """A call with unpadded prompts and none of transformers' further objects and outputs. ``ends``: tokens that end a text."""
        pads = [0] * len(ids_BT)
        return Request(
            ids_BT=ids_BT,
            pads_B=pads,
            limit=limit,
            eos=frozenset(ends),
            criteria=StoppingCriteriaList(),
            processing=Processing(processors, pads),
            sample=sample,
            pad_token=0,
            streamer=None,
            scores=False,
            logits=False,
            dictionary=False,
            beams=None,
        )


def read_request(
    ids_BT: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: Mapping[str, Any],
) -> Request:
    """Read the arguments of a call. Raises UserError naming an argument that is not supported."""
    _refuse(config, model_kwargs, len(ids_BT), streamer)
    mask, beams = model_kwargs.get("attention_mask"), read_beam_rules(config)
    if beams is not None:
        ids_BT, mask = ids_BT[:: beams.beams], None if mask is None else mask[:: beams.beams]
        processors = beam_processors(processors, beams.beams)
    pads = [0] * len(ids_BT) if mask is None else (mask == 0).sum(1).tolist()
    if mask is not None and any(bool((mask[b, :pad] != 0).any()) for b, pad in enumerate(pads)):
        raise UserError("attention_mask hides positions that are not at a row's left end; pad on the left (tokenizer.padding_side='left')")
    lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    if not lengths and not any(True for c in criteria if not isinstance(c, EosTokenCriteria)):
        raise UserError("no stopping criterion; give max_new_tokens or max_length")
    eos = frozenset(int(t) for c in criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id.flatten().tolist())
    others = StoppingCriteriaList(c for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria))
    pad = config._pad_token_tensor
    return Request(
        ids_BT=ids_BT,
        pads_B=pads,
        limit=min(lengths) if lengths else 1 << 31,
        eos=eos,
        criteria=others,
        processing=Processing(processors, pads),
        sample=bool(config.do_sample),
        pad_token=int(pad) if pad is not None else 0,
        streamer=streamer,
        scores=bool(config.return_dict_in_generate and config.output_scores),
        logits=bool(config.return_dict_in_generate and config.output_logits),
        dictionary=bool(config.return_dict_in_generate),
        beams=beams,
    )


def _refuse(config: GenerationConfig, model_kwargs: Mapping[str, Any], rows: int, streamer: BaseStreamer | None) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH):
        raise UserError(
            f"generation mode {mode.value!r} is not supported; heads decode greedily, by sampling, or by beam search "
            "(num_beams with do_sample=False, no num_beam_groups, no constraints, no force_words_ids; "
            "no penalty_alpha, no dola_layers, no prompt_lookup_num_tokens, no assistant_model)"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise UserError(f"{name}=True is not supported: a pass verifies a tree; run the model once over the finished sequence instead")
    if model_kwargs.get("inputs_embeds") is not None:
        raise UserError("inputs_embeds is not supported: drafters read tokens; give input_ids")
    for name, value in model_kwargs.items():
        if isinstance(value, Tensor) and name not in TENSORS:
            raise UserError(f"{name} is not supported: heads decode from input_ids and attention_mask alone; leave it out")
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise UserError("past_key_values already holds tokens, which the drafter has not read; give the whole sequence as input_ids")
    if streamer is not None and rows > 1:
        raise UserError(f"a streamer writes one sequence; got a batch of {rows}: decode one row at a time")


def rope_side(backbone: Backbone, length: int, limit: int) -> bool:
    """Return the side of the change of rotary frequencies that a sequence is on, from ``length`` to ``limit`` tokens: True if after it.

    transformers derives the frequencies of a pass from its largest position, so all rows of a pass are on one side. Raises UserError if
    they would change while decoding, since the tokens in the cache would have to be recomputed.
    """
    if backbone.rope_limit is None or limit <= backbone.rope_limit:
        return False
    if backbone.rope_switches_once and length > backbone.rope_limit:
        return True
    raise _across(backbone, length, limit)


def require_one_side(request: Request, backbone: Backbone) -> None:
    """Raise UserError unless all rows are on one `rope_side`."""
    T = request.ids_BT.shape[1]
    if len({rope_side(backbone, T - pad, request.limit - pad) for pad in request.pads_B}) > 1:
        raise _across(backbone, T, request.limit)


def _across(backbone: Backbone, length: int, limit: int) -> UserError:
    longer = ", or prompts of more than that" if backbone.rope_switches_once else ""
    return UserError(
        f"{backbone.name} changes its rotary frequencies beyond {backbone.rope_limit} positions, which these may reach (prompts up to "
        f"{length} tokens, {limit} in all); allowed: sequences that end before (max_new_tokens){longer}"
    )
