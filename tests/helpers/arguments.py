# ruff: noqa: E501
"""What heads make of every argument of transformers' ``generate`` and of every field of its generation config.

`test_arguments.py` holds it; ``python tests/helpers/tables.py docs/decode.md`` writes the table of that page.
"""

import string
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from families import ROWS, VOCAB, Noted, tiny
from tokenizers import Tokenizer, decoders, models
from transformers import DynamicCache, LogitsProcessorList, MinNewTokensLengthLogitsProcessor, PreTrainedTokenizerFast, StoppingCriteriaList

PAGE = Path(__file__).parents[2] / "docs" / "decode.md"
YES, SAME, NO = "as in transformers", "accepted, changes no text", "refused"
ENDS: dict[str, Any] = {"eos_token_id": [1, 9, 15, 20, 33], "pad_token_id": 60}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}
BEAMS: dict[str, Any] = {"num_beams": 3}
STOPS = list(string.ascii_lowercase[:20])


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each letter or digit."""
    letters = dict(zip(string.ascii_letters + string.digits, range(VOCAB), strict=False))
    made = Tokenizer(models.BPE(letters, []))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, pad_token="a", bos_token="9")


@dataclass(frozen=True)
class Case:
    """An argument, a call that gives it, and what becomes of it."""

    name: str
    verdict: str
    given: dict[str, Any] = field(default_factory=dict)
    """Made anew for each call where it is a function without arguments."""
    without: dict[str, Any] = field(default_factory=dict)
    """A call without it, whose text is another if the argument has an effect."""
    note: str = ""
    shows: bool = True
    """False: the argument has an effect that is not in the text."""


def case(name: str, verdict: str, value: Any, note: str = "", shows: bool = True, **others: Any) -> Case:
    return Case(name, verdict, {name: value, **others}, others, note, shows)


def fresh(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value() if name in MADE else value for name, value in given.items()}


NEGATIVE = (ROWS["input_ids"] + 3) % VOCAB
MADE = ("past_key_values", "logits_processor", "stopping_criteria", "streamer", "assistant_model", "tokenizer")
ALWAYS = "with trees where the object is known or declared to keep no state, else without drafts (see below)"
CACHES = "`static` and the like change no text; `offloaded` and `quantized` are refused"
TREES = "a pass verifies a tree: run the model once over the finished text"

CASES = [
    case("inputs", YES, ROWS["input_ids"][:1].int(), shows=False),
    case("generation_config", YES, None, shows=False),
    case("max_length", YES, 14),
    case("max_new_tokens", YES, 5.0),
    case("min_length", YES, 17, **ENDS),
    case("min_new_tokens", YES, 8, **ENDS),
    case("max_time", YES, 0.0),
    case("do_sample", YES, True, top_k=0),
    *(case(name, YES, value, **SAMPLED) for name, value in (
        ("temperature", 0.3), ("top_p", 0.4), ("min_p", 0.3), ("top_h", 0.4), ("typical_p", 0.3), ("epsilon_cutoff", 0.05), ("eta_cutoff", 0.2),
    )),
    case("top_k", YES, 2, do_sample=True),
    case("repetition_penalty", YES, 1.8),
    case("encoder_repetition_penalty", YES, 1.9),
    case("no_repeat_ngram_size", YES, 1),
    case("encoder_no_repeat_ngram_size", YES, 1),
    case("bad_words_ids", YES, [[token] for token in range(0, VOCAB, 2)] + [[3, 5]]),
    case("renormalize_logits", YES, True, shows=False),
    case("remove_invalid_values", YES, True, shows=False),
    case("suppress_tokens", YES, list(range(0, VOCAB, 2))),
    case("begin_suppress_tokens", YES, list(range(0, VOCAB, 2))),
    case("sequence_bias", YES, {(7,): 9.0, (7, 8): 9.0}),
    case("forced_bos_token_id", YES, 7, shows=False),
    case("forced_eos_token_id", YES, 7),
    case("exponential_decay_length_penalty", YES, (3, 2.0), **ENDS),
    case("watermarking_config", YES, transformers.WatermarkingConfig(bias=9.0)),
    case("eos_token_id", YES, ENDS["eos_token_id"], pad_token_id=60),
    case("pad_token_id", YES, 59, eos_token_id=ENDS["eos_token_id"]),
    case("bos_token_id", YES, 7, shows=False),
    case("num_beams", YES, 3),
    case("early_stopping", YES, True, **BEAMS, **ENDS),
    case("length_penalty", YES, -4.0, **BEAMS, **ENDS),
    case("num_return_sequences", YES, 2, **BEAMS),
    case("return_dict_in_generate", YES, True, shows=False),
    case("output_scores", YES, True, shows=False, return_dict_in_generate=True),
    case("output_logits", YES, True, shows=False, return_dict_in_generate=True),
    Case("stop_strings", YES, {"stop_strings": STOPS, "tokenizer": tokenizer}),
    Case("tokenizer", YES, {"stop_strings": STOPS, "tokenizer": tokenizer}),
    Case("token_healing", YES, {"inputs": ROWS["input_ids"][:1], "token_healing": True, "tokenizer": tokenizer}, note="of prompts of one length",
         shows=False),
    Case("attention_mask", YES, {}, note="padding on the left", shows=False),
    Case("past_key_values", YES, {"past_key_values": DynamicCache}, note="a `DynamicCache` of one row holds the conversation (see below); from transformers 5.24 on also by its new name, `cache`", shows=False),
    Case("logits_processor", YES, {"logits_processor": lambda: LogitsProcessorList([MinNewTokensLengthLogitsProcessor(9, 9, ENDS["eos_token_id"])]), **ENDS}, ENDS, ALWAYS),
    Case("stopping_criteria", YES, {"stopping_criteria": lambda: StoppingCriteriaList([transformers.StopStringCriteria(tokenizer(), STOPS)])},
         note="asked about all rows together after each token of the longest"),
    case("prefix_allowed_tokens_fn", YES, lambda row, ids: [(int(ids[-1]) + 7 * row + i) % VOCAB for i in range(3)], ALWAYS),
    case("guidance_scale", YES, 3.0, "without drafts"),
    case("negative_prompt_ids", YES, NEGATIVE, "without drafts", guidance_scale=3.0),
    case("negative_prompt_attention_mask", YES, (torch.arange(9) > 4).long().expand(3, -1), "without drafts", guidance_scale=3.0,
         negative_prompt_ids=NEGATIVE),
    Case("streamer", YES, {"streamer": Noted}, shows=False, note="tokens come in runs; not with beams, as in transformers"),
    Case("custom_generate", YES, {}, shows=False, note="`heads.generate`, or the folder of heads"),
    *(case(name, SAME, value) for name, value in (
        ("use_cache", False), ("cache_config", {"nbits": 2}), ("max_cache_len", 99), ("compile_config", transformers.CompileConfig()), ("disable_compile", True),
        ("prefill_chunk_size", 3), ("num_assistant_tokens", 3), ("num_assistant_tokens_schedule", "constant"), ("assistant_confidence_threshold", 0.5),
        ("max_matching_ngram_size", 3), ("assistant_lookbehind", 3), ("target_lookbehind", 3), ("assistant_ensemble_weight", 0.5),
        ("speculation_type", "vanilla"), ("decoder_start_token_id", 5), ("transformers_version", "5.0.0"), ("continuous_batching_config", None),
        ("logits_to_keep", 2),
    )),
    case("trust_remote_code", SAME, True),
    case("cache_implementation", SAME, "static", CACHES),
    case("position_ids", NO, torch.arange(9)[None].expand(3, -1) + 5, "the usual ones are accepted: drafts have positions of their own"),
    case("inputs_embeds", NO, torch.zeros(3, 9, 32), "drafters read tokens"),
    case("output_attentions", NO, True, TREES, return_dict_in_generate=True),
    case("output_hidden_states", NO, True, TREES, return_dict_in_generate=True),
    *(case(name, NO, value, "another way to draft", **others) for name, value, others in (
        ("assistant_model", lambda: tiny("llama", num_hidden_layers=1), {}), ("assistant_tokenizer", "x", {}), ("prompt_lookup_num_tokens", 3, {}),
        ("use_mtp", True, {}), ("assistant_early_exit", 2, {}), ("is_assistant", True, {}),
    )),
    *(case(name, NO, value, "another way to decode", **others) for name, value, others in (
        ("penalty_alpha", 0.6, {"top_k": 4}), ("dola_layers", "low", {}), ("num_beam_groups", 3, BEAMS | {"diversity_penalty": 0.5}),
        ("diversity_penalty", 0.5, BEAMS | {"num_beam_groups": 3}), ("constraints", [1], BEAMS), ("force_words_ids", [[4]], BEAMS),
    )),
    case("low_memory", NO, True, "by transformers too", **BEAMS),
    case("synced_gpus", NO, True, "rows take different numbers of passes in each process"),
]  # fmt: skip


def table() -> str:
    lines = ["| arguments | with heads |", "|---|---|"]
    order = {verdict: place for place, verdict in enumerate((YES, SAME, NO))}
    ordered = sorted(CASES, key=lambda one: (order[one.verdict], bool(one.note), one.note))
    for (verdict, note), group in groupby(ordered, lambda one: (one.verdict, one.note)):
        names = ", ".join(f"`{one.name}`" for one in group)
        lines.append(f"| {names} | {verdict}{': ' + note if note else ''} |")
    return "\n".join(lines)
