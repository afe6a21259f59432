"""Parts that layouts share: the decoder layer that a foreign ``config.json`` states, and draft vocabularies.

Of foreign heads ``d2t`` and ``t2d`` are checked and brought to ascending tokens. ``d2t`` holds offsets, token minus draft token; some
files hold the tokens themselves, which is recognised.

Shape suffixes: V backbone vocabulary, DV draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.smaller import FAULTS
from headstart.heads.layers.start_values import LayerShape, llama_like
from headstart.serving.layouts.layout import Checkpoint, Heads
from headstart.support.errors import UserError, cause

IDS = "eagle_aux_hidden_state_layer_ids"
DECODERS = ("llama", "qwen2", "qwen3", "mistral")
"""Model types whose layers are a Llama's, but for defaults, biases and norms of queries and keys; others are read as Llama."""
NOT_SHAPES = ("architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "quantization_config", "model_type")


def layer_arguments(stated: Mapping[str, Any], backbone: Backbone, path: str) -> dict[str, Any]:
    """Return ``intermediate_size`` and ``layer`` where the stated layer differs from the backbone's. Raises UserError."""
    config = _full_config(stated, path)
    if config["hidden_act"] != "silu":
        raise UserError(f"{path}: hidden_act {config['hidden_act']!r} in config.json; heads here compute silu alone")
    ours = llama_like(backbone, None).to_dict()
    bias = bool(stated.get("qkv_bias", stated.get("attention_bias", False)))  # qkv_bias: SafeAILab
    theirs = {**config, "attention_bias": bias, "rope_parameters": _rope(config)}
    mine = {**ours, "attention_bias": False, "rope_parameters": _rope(ours)}
    shape = {key: theirs[key] for key in LayerShape.model_fields if theirs[key] is not None and theirs[key] != mine[key]}
    arguments: dict[str, Any] = {"layer": shape} if shape else {}
    if config["intermediate_size"] != ours["intermediate_size"]:
        arguments["intermediate_size"] = config["intermediate_size"]
    return arguments


def _full_config(stated: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the configuration with transformers' values for what is not stated. Raises UserError."""
    kind = stated.get("model_type") if stated.get("model_type") in DECODERS else "llama"
    known = {key: value for key, value in stated.items() if key not in NOT_SHAPES}
    try:
        config: dict[str, Any] = AutoConfig.for_model(kind, **known).to_dict()
    except FAULTS as error:
        raise UserError(f"{path}: config.json is no configuration of a decoder layer: {cause(error, 200)}") from None
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (config.get("rope_parameters") or {}).items() if value is not None}


def sliding_window(stated: Mapping[str, Any], positions: int, path: str) -> int | None:
    """Return the window that all layers attend in; None if it holds all positions of the backbone. Raises UserError."""
    kinds, window = set(stated.get("layer_types") or []), stated.get("sliding_window")
    used = "sliding_attention" in kinds if kinds else bool(stated.get("use_sliding_window"))
    if not used or not isinstance(window, int) or 0 < positions <= window:
        return None
    if "full_attention" in kinds:
        raise UserError(f"{path}: some layers attend to {window} positions and some to all; heads here have one window for all layers")
    return window


def layer_ids_disagree(top: list[int] | None, named: list[int] | None, key: str) -> list[str]:
    """Return a remark if layer ids in both countings contradict each other."""
    if not top or not named or sorted(top) == sorted(tap + 1 for tap in named):
        return []
    return [
        f"layer ids disagree: {IDS} {top} counts layers passed, {key} {named} names layers from 0, so it should be "
        f"{[tap - 1 for tap in top]}; vLLM reads the former, SGLang the latter"
    ]


def with_vocabulary(heads: Heads, output_layers: Sequence[str], vocab: int, path: str) -> Heads:
    """Return the heads with ``d2t`` and ``t2d`` that agree, and the size of the draft vocabulary (None: the whole one).

    Rows of the output layers follow the tokens if these are not ascending. Raises UserError for maps that contradict each other.
    """
    tensors = heads.tensors
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    rows = {len(tensors[name]) for name in output_layers if name in tensors}
    if len(rows) > 1:
        raise UserError(f"{path}: the output layers have different numbers of rows ({', '.join(map(str, sorted(rows)))})")
    DV = rows.pop() if rows else vocab
    heads = heads.without(("d2t", "t2d")).plus({"draft_vocab_size": None if DV == vocab else DV})
    if d2t is not None:
        tokens_DV, remarks = _tokens(d2t, t2d, vocab, DV, path)
        heads = heads.plus(remarks=remarks)
    elif t2d is not None and (t2d.ndim != 1 or len(t2d) != vocab or int(t2d.sum()) != DV):
        raise UserError(f"{path}: t2d {list(t2d.shape)} marks {int(t2d.sum())} tokens of {DV} in the output layer: fetch it again")
    elif DV == vocab:
        return heads
    elif t2d is None:
        raise UserError(f"{path} drafts {DV} of the backbone's {vocab} tokens and has no d2t, which says which: fetch it with d2t")
    else:
        tokens_DV = t2d.nonzero().flatten()
        made = "d2t is missing and was made from t2d: engines draft the first tokens of the vocabulary, or load zeros"
        heads = heads.plus(remarks=[made])
    order_DV = tokens_DV.argsort()
    if not torch.equal(order_DV, torch.arange(DV)):
        reordered = "draft tokens are in another order than the backbone's: the rows of the output layer follow them"
        heads = heads.plus(tensors={name: tensors[name][order_DV] for name in output_layers if name in tensors}, notes=[reordered])
        tokens_DV = tokens_DV[order_DV]
    if DV == vocab:
        return heads
    marked = torch.zeros(vocab, dtype=torch.bool).index_fill(0, tokens_DV, True)
    return heads.plus(tensors={"d2t": tokens_DV - torch.arange(DV), "t2d": marked})


def _tokens(d2t: Tensor, t2d: Tensor | None, vocab: int, DV: int, path: str) -> tuple[Tensor, list[str]]:
    """Return the backbone token of each draft token (int64 ``[DV]``), and what contradicts that in the files."""
    if d2t.ndim != 1 or len(d2t) != DV or d2t.is_floating_point():
        raise UserError(f"{path}: d2t is {str(d2t.dtype).removeprefix('torch.')} {list(d2t.shape)}; expected are {DV} whole numbers")
    if t2d is not None and (t2d.ndim != 1 or len(t2d) != vocab):
        raise UserError(f"{path}: t2d is {list(t2d.shape)}; the backbone's vocabulary has [{vocab}]")
    marked = None if t2d is None else t2d.bool().nonzero().flatten()
    as_tokens = d2t.long()
    as_offsets = as_tokens + torch.arange(DV)
    if _fits(as_offsets, marked, vocab):
        return as_offsets, []
    if _fits(as_tokens, marked, vocab):
        converted = "d2t holds tokens instead of offsets (token minus draft token) and was converted: engines read it as offsets, wrongly"
        return as_tokens, [converted]
    if marked is not None:
        raise UserError(f"{path}: d2t and t2d disagree, whether d2t holds offsets or tokens: the file is damaged, fetch it again")
    raise UserError(f"{path}: d2t names tokens twice or beyond the vocabulary of {vocab}, as offsets and as tokens: fetch it again")


def _fits(tokens_DV: Tensor, marked: Tensor | None, vocab: int) -> bool:
    """Return whether these are different tokens of the vocabulary, and the marked ones if any are."""
    ascending = tokens_DV.sort().values
    if bool((ascending[:1] < 0).any() or (ascending[-1:] >= vocab).any() or (ascending[1:] == ascending[:-1]).any()):
        return False
    return marked is None or torch.equal(ascending, marked)


WHOLE = (
    "output layers are written over the whole vocabulary, since no engine reads truncated ones (vLLM's are broken in 0.32): the rows of "
    "tokens that are not drafted are the mean of the others, so that these tokens are never the likeliest draft"
)


def over_whole_vocabulary(heads: Checkpoint, output_layers: str) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Return the configuration and the tensors with output layers ``[V, D]`` in place of ``[DV, D]``, and a note if there were such.

    ``output_layers`` is a part of their names. The rows of all other tokens are the mean of the drafted ones, so that their logit is the
    mean of the drafted logits and never the largest: the layers draft what the small ones do.
    """
    config = {key: value for key, value in heads.config.items() if key != "draft_vocab_size"} | {"base_model_name_or_path": heads.served}
    if "t2d" not in heads.tensors:
        return config, heads.tensors, []
    tokens_DV = heads.tensors["t2d"].nonzero().flatten()
    found = {name: tensor for name, tensor in heads.tensors.items() if name not in ("d2t", "t2d")}
    for name, rows_DVD in found.items():
        if output_layers in name:
            found[name] = rows_DVD.float().mean(0).to(rows_DVD.dtype).repeat(config["vocab_size"], 1)
            found[name][tokens_DV] = rows_DVD
    return config, found, [WHOLE]
