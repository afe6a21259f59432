"""The arguments of one call of transformers' ``generate`` as the decoding loop needs them; unsupported ones are rejected here.

So is, before anything is computed, what the device's memory or the backbone's context cannot hold.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Images
from headstart.heads.backbone.model_config import CACHE
from headstart.inference.capture.captured import warn_once
from headstart.inference.engine.known_processors import is_by_row, name_of
from headstart.inference.engine.processing import Processing
from headstart.support.errors import UserError
from headstart.support.text import gigabytes


def device_memory(device: torch.device) -> int:
    """Return the bytes of an accelerator's memory, or of this machine's for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total


def require_memory(backbone: Backbone, rows: int, positions: int, nodes: int) -> None:
    """Raise UserError if ``rows`` sequences of ``positions`` tokens with trees of ``nodes`` nodes cannot fit the device.

    Counted are one hidden state of every token and the logits of the trees, without which no forward pass ends; a call that passes may
    still need more.
    """
    needed = rows * (positions * backbone.dim * backbone.dtype.itemsize + nodes * backbone.vocab * 4)
    if needed > (there := device_memory(backbone.device)):
        raise UserError(
            f"{rows} sequences of {positions} tokens with trees of {nodes} nodes need at least {gigabytes(needed)}, and the device has "
            f"{gigabytes(there)}; lower the batch size (--batch-size), the prompts or the nodes (--nodes)"
        )


def context_of(backbone: Backbone) -> int | None:
    """Return how long decoded texts may become (None: no limit): the context, or up to where rotary frequencies change with every token."""
    once = backbone.rope_switches_once and backbone.recurrent is None
    return backbone.max_positions if once else min(backbone.max_positions or sys.maxsize, backbone.rope_limit or sys.maxsize)


def require_room(what: str, prompt_tokens: int, max_new_tokens: int, backbone: Backbone) -> None:
    """Raise UserError unless the prompt and its answer fit into the backbone's context."""
    context = context_of(backbone)
    if context is not None and prompt_tokens + max_new_tokens > context:
        raise UserError(
            f"{what} has {prompt_tokens} tokens, which with max_new_tokens {max_new_tokens} exceeds the backbone's context of {context};"
            " shorten the prompt or lower --max-new-tokens"
        )


def unknown_token(ids: Tensor, backbone: Backbone) -> str:
    """Say which token the backbone does not embed, as of a tokenizer with more tokens than it; empty if it embeds all."""
    known = getattr(backbone.embed, "num_embeddings", backbone.vocab)
    for token in (int(ids.min()), int(ids.max())) if ids.numel() else ():
        if not 0 <= token < known:
            return f"a prompt has token {token}, the backbone embeds 0 to {known - 1} alone; leave its text out, or resize the embedding"
    return ""


@dataclass(frozen=True)
class BeamRules:
    """The beam search settings of one call. Lengths include left padding, as in transformers."""

    beams: int
    returned: int
    """The number of best sequences returned per row."""
    length_penalty: float
    early_stopping: bool | str
    longest: int
    """The maximum length, which ``early_stopping="never"`` assumes for the length penalty."""
    candidates: int
    """The number of continuations that a step considers over all beams: enough that at least ``beams`` of them do not end."""
    fill: int
    """The padding token after the end of a sequence."""


def read_beam_rules(config: GenerationConfig) -> BeamRules | None:
    """Read the beam search settings of a call; None if it is not a beam search."""
    if not config.num_beams or config.num_beams == 1:
        return None
    if config.low_memory:
        raise UserError("low_memory=True is not supported, by transformers' beam search neither; leave it out")
    eos = [] if config._eos_token_tensor is None else config._eos_token_tensor.flatten().tolist()
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    return BeamRules(
        beams=config.num_beams,
        returned=config.num_return_sequences,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        longest=config.max_length,
        candidates=max(2, 1 + len(eos)) * config.num_beams,
        fill=(pad or eos[0]) if eos else -1,  # as in transformers, a padding token of 0 counts as none
    )


OTHER_MODES = (
    "is_assistant", "use_mtp", "prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha", "dola_layers", "num_beam_groups",
    "diversity_penalty", "constraints", "force_words_ids", "num_beams", "do_sample",
)  # fmt: skip
"""Fields of the generation config that ask for another way of decoding."""
CACHES = (None, "dynamic", "static", "sliding_window", "hybrid", "hybrid_chunked")
"""Kinds of KV cache that give the same text as the one that decoding has of its own; the others quantize it or move it to the host."""


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
    sample: bool = False
    pad_token: int = 0
    padded: bool = True
    """Rows that have ended are padded until all have; False: they go on, as in transformers where no end token stops a row."""
    streamer: BaseStreamer | None = None
    scores: bool = False
    logits: bool = False
    dictionary: bool = False
    beams: BeamRules | None = None
    """None: no beam search."""
    cache: DynamicCache | None = None
    """The caller's, which holds the text read so far or is to hold it, or that of an output, made by transformers."""
    images: tuple[Images | None, ...] = ()
    """Those of each row's prompt; empty if none has any."""

    @cached_property
    def in_steps(self) -> bool:
        """True if a token counts once every row has its token of that step: what the user gave is asked about all rows together."""
        alone = self.padded and len(self.ids_BT) > 1 and all(map(is_by_row, self.criteria))
        return self.streamer is not None or bool(self.processing.unknown) or bool(self.criteria) and not alone

    @cached_property
    def in_order(self) -> bool:
        """True if every row goes on until all have ended, a token at a time: as transformers decodes."""
        return bool(self.processing.unknown) or (self.beams is not None and self.in_steps and len(self.ids_BT) > 1)

    @staticmethod
    def plain(ids_BT: Tensor, limit: int, ends: Iterable[int], processors: LogitsProcessorList, sample: bool) -> Request:
        """A call with unpadded prompts and none of transformers' further objects and outputs. ``ends``: tokens that end a text."""
        return Request(
            ids_BT=ids_BT,
            pads_B=[0] * len(ids_BT),
            limit=limit,
            eos=frozenset(ends),
            criteria=StoppingCriteriaList(),
            processing=Processing(processors, len(ids_BT)),
            sample=sample,
        )


def read_request(
    ids_BT: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: Mapping[str, Any],
) -> Request:
    """Read the arguments of a call but images. Raises UserError naming an argument that is not supported."""
    _refuse(config, model_kwargs, streamer)
    ids_BT, mask, beams = ids_BT.long(), model_kwargs.get("attention_mask"), read_beam_rules(config)
    if beams is not None:
        ids_BT, mask = ids_BT[:: beams.beams], None if mask is None else mask[:: beams.beams]
    pads = [0] * len(ids_BT) if mask is None else (mask == 0).sum(1).tolist()
    if mask is not None and any(bool((mask[b, :pad] != 0).any()) for b, pad in enumerate(pads)):
        raise UserError("attention_mask hides positions that are not at a row's left end; pad on the left (tokenizer.padding_side='left')")
    if (empty := [b for b, pad in enumerate(pads) if pad == ids_BT.shape[1]]) and ids_BT.shape[1]:
        raise UserError(f"the prompt of row {empty[0]} has no token (attention_mask is 0); give it a first token, or leave the row out")
    lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    if not lengths and not any(True for c in criteria if type(c) is not EosTokenCriteria):
        raise UserError("no stopping criterion; give max_new_tokens or max_length")
    pad, past = config._pad_token_tensor, model_kwargs.get(CACHE)
    return Request(
        ids_BT=ids_BT,
        pads_B=pads,
        limit=int(min(lengths)) if lengths else 1 << 31,
        eos=frozenset(int(t) for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.flatten().tolist()),
        criteria=StoppingCriteriaList(c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)),
        processing=Processing(processors, len(ids_BT), 1 if beams is None else beams.beams),
        sample=bool(config.do_sample),
        pad_token=int(pad) if pad is not None else 0,
        padded=any(hasattr(c, "eos_token_id") for c in criteria),
        streamer=streamer,
        scores=bool(config.return_dict_in_generate and config.output_scores),
        logits=bool(config.return_dict_in_generate and config.output_logits),
        dictionary=bool(config.return_dict_in_generate),
        beams=beams,
        cache=past if type(past) is DynamicCache and (config.return_dict_in_generate or user_defined(past)) else None,
    )


def user_defined(cache: Any) -> bool:
    """Whether a cache is the caller's; transformers makes one where none is given."""
    return bool(getattr(cache, "_is_user_defined", False))


def _refuse(config: GenerationConfig, model_kwargs: Mapping[str, Any], streamer: BaseStreamer | None) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH) or config.is_assistant:
        usual = GenerationConfig._get_default_generation_params()
        asked = [f"{name}={getattr(config, name)}" for name in OTHER_MODES if getattr(config, name) not in (None, False, usual.get(name))]
        raise UserError(
            f"{', '.join(asked)} is not supported ({mode.value}); heads decode greedily, by sampling, or by beam search (num_beams with "
            "do_sample=False)"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise UserError(f"{name}=True is not supported: a pass verifies a tree; run the model once over the finished sequence instead")
    if model_kwargs.get("inputs_embeds") is not None:
        raise UserError("inputs_embeds is not supported: drafters read tokens; give input_ids")
    if config.cache_implementation not in CACHES:
        raise UserError(f"cache_implementation={config.cache_implementation!r} is not supported; allowed: {', '.join(map(str, CACHES))}")
    past = model_kwargs.get(CACHE)
    own = type(past) not in (DynamicCache, StaticCache) and user_defined(past)
    if own or (past is not None and type(past) is not DynamicCache and past.get_seq_length() > 0):
        holds = "" if own else " that holds tokens"
        raise UserError(f"{CACHE} is a {type(past).__name__}{holds}; give a DynamicCache, or an empty StaticCache")
    if streamer is not None and mode == GenerationMode.BEAM_SEARCH:
        raise UserError("a streamer cannot be used with beam search, whose tokens are known at its end; leave it out, or set num_beams=1")


def require_side(backbone: Backbone, length: int, turning: bool = False) -> None:
    """Raise UserError if a text of ``length`` tokens, begun before the change if ``turning``, is beyond `context_of`.

    LongRoPE's frequencies change once: transformers then reads Phi's texts again, and `Prompts.turns` any.
    """
    limit = backbone.rope_limit
    if limit is not None and length > limit and not (backbone.rope_switches_once and (backbone.recurrent is None or not turning)):
        raise UserError(
            f"{backbone.name} changes its rotary frequencies beyond {limit} positions, where a text of {length} tokens cannot be decoded; "
            "allowed: texts that end before (max_new_tokens)"
        )
    prepares = getattr(backbone.model.prepare_inputs_for_generation, "__code__", None)
    if turning and "original_max_position_embeddings" not in getattr(prepares, "co_names", ()):
        warn_once(f"after {limit} tokens transformers keeps {backbone.config.model_type}'s old keys: texts read again, as here, may differ")


def require_sides(request: Request, backbone: Backbone) -> None:
    """Raise UserError if a prompt is beyond `require_side`, or if rows that go on together, or beams, are to change sides."""
    limit, lengths = backbone.rope_limit, [request.ids_BT.shape[1] - pad for pad in request.pads_B]
    for length in lengths:
        require_side(backbone, length)
    together = request.beams is not None or (request.in_order and len(lengths) > 1)
    if limit is not None and together and min(lengths) <= limit < request.limit - min(request.pads_B) - 1:
        raise UserError(
            f"{backbone.name} changes its rotary frequencies beyond {limit} positions, which beams or rows that go on together may reach; "
            "allowed: texts that end before (max_new_tokens), prompts of more than that, one row, or no beams"
        )


def require_all_rows(request: Request, batch_size: int) -> None:
    """Raise UserError if rows are to be decoded one after another, and something of the user's own is asked about all of them together."""
    rows = len(request.ids_BT)
    if request.in_steps and rows > batch_size:
        given = [*request.processing.unknown, *(rule for rule in request.criteria if not is_by_row(rule) or not request.padded)]
        names = ", ".join(dict.fromkeys(map(name_of, given))) or type(request.streamer).__name__
        raise UserError(
            f"{names} is asked about all {rows} rows together, and batch_size={batch_size} decodes them one after another; leave one out"
        )
