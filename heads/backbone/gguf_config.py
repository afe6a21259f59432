"""What the header of a GGUF file says, compared with the configuration and the model that transformers makes of it.

transformers reads some of the keys of each architecture and leaves the others at its defaults, without a word. Here every key is compared:
what it means is put right, and what is not known is said. A key that is left out has the format's default, not transformers'. MEANINGS,
NEEDED, `_defaults` and LARGE are facts of llama.cpp (src/llama-arch.cpp, `load_hparams` in src/llama-model.cpp and src/models/ in
llama-cpp-python 0.3.36), beside the names that transformers' configurations give to the same.
"""

import copy
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from headstart.heads.backbone.gguf_file import GgufFile, find_gguf, quick_reader
from headstart.heads.backbone.gguf_header import special_tokens
from headstart.support.errors import UserError, cause, notice, one_line, waiting

ROPE_FACTORS = "rope_freqs.weight"
MEANINGS: dict[str, str] = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size ffn_hidden_size n_inner", "vocab_size": "vocab_size",
    "use_parallel_residual": "use_parallel_residual",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input", "expert_count": "num_local_experts num_experts",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size", "logit_scale": "logit_scale",
    "expert_weights_norm": "norm_topk_prob",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_kv_heads num_key_value_heads",
    "attention.key_length": "global_head_dim head_dim", "attention.key_length_swa": "head_dim",
    "attention.shared_kv_layers": "num_kv_shared_layers", "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps", "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "conv_kernel linear_conv_kernel_dim", "ssm.state_size": "state_size linear_key_head_dim",
    "ssm.time_step_rank": "time_step_rank linear_num_value_heads", "ssm.group_count": "linear_num_key_heads",
}  # fmt: skip
"""Keys, after the architecture, and the attributes that mean the same; of several the first that a configuration has."""
RMS, NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
NEEDED = {
    "context_length": "max_position_embeddings", "attention.head_count": "num_attention_heads", RMS: "rms_norm_eps",
    NORM: "layer_norm_eps norm_epsilon norm_eps layer_norm_epsilon", "expert_used_count": "num_experts_per_tok",
    "attention.sliding_window": "global_head_dim", "attention.sliding_window_pattern": "global_head_dim",
}  # fmt: skip
"""Keys that llama.cpp has no default for, if a configuration has one of the attributes (that of the last two is Gemma 4's)."""
GATING = {"minimax-m2": 2}
"""The only function of the experts' scores that transformers has, by llama.cpp's number: sigmoids, and a softmax (1) elsewhere."""
BIASES = {"attn_q.bias": "attention_bias", "ffn_up.bias": "mlp_bias"}
"""Tensors that a configuration allows for."""
ROPE = {"freq_base": "rope_theta", "scaling.yarn_beta_fast": "beta_fast", "scaling.yarn_beta_slow": "beta_slow"}
ELSEWHERE = {
    "attention.value_length", "attention.value_length_swa", "nextn_predict_layers",
    "rope.dimension_sections", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "ssm.inner_size", "tensor_data_layout",
}  # fmt: skip
"""Keys that `_set_rope` reads, that transformers reads in its own way, or that change nothing of the models that it reads."""
EXPERTS = {
    "experts.gate_up_proj": "ffn_gate_exps.weight ffn_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
    "e_score_correction_bias": "exp_probs_b.bias",
}  # fmt: skip
"""Weights of a layer's experts, and the tensors that they are joined from, which go by no name of gguf's table."""
PATTERNS = {"attention.sliding_window_pattern": "sliding_attention", "full_attention_interval": "linear_attention",
            "attention.recurrent_layers": "linear_attention"}  # fmt: skip
"""Kinds of layers of which a key says where they are."""
UNUSED = {"context_length", "attention.layer_norm_epsilon"}
"""Keys that llama.cpp needs or writes for models without a table of positions, or with another norm (src/models/gemma3.cpp)."""
TOKENIZER = re.compile(r"chat_template|huggingface|\.(model|pre|tokens|token_type.*|scores|merges|add_(bos|eos)_token|add_space_prefix)$")
"""What is read of the tokenizer (gguf_header.py), or says nothing of its ids."""
TRUE = ("ggml.escape_whitespaces",)
"""What is true of a tokenizer where it is not stated."""
LARGE = {"gemma2": 46, "gemma3": 62}
"""Layers of the sizes of Gemma whose queries are scaled by the share of a head, not by its width."""


def read_gguf_config(file: GgufFile) -> PretrainedConfig:
    """Return the configuration that the header states. Raises UserError if transformers reads no such model from GGUF."""
    return copy.deepcopy(_config(file.path, file.size, file.path.stat().st_mtime_ns))


@lru_cache(maxsize=8)
def _config(path: Path, size: int, changed: int) -> PretrainedConfig:
    """The same, read once: transformers' reader takes seconds."""
    file = find_gguf(str(path))
    assert file is not None
    try:
        with quick_reader(), waiting(f"reading {path.name}"):
            config: PretrainedConfig = AutoConfig.from_pretrained(**file.arguments)
        _set_rope(config, file)
        lacking, unread = [*_lacking(config.get_text_config(), file)], [*_compared(config.get_text_config(), file)]
        _set_implied(config.get_text_config(), file)
    except MemoryError:
        raise
    except Exception as error:  # what transformers raises depends on what a header lacks
        known = f"transformers {transformers.__version__} cannot read this {file.architecture!r} model from GGUF"
        raise UserError(f"{path}: {known} ({cause(error, 200)}); give its folder of safetensors or its hub id") from None
    if lacking:
        notice(f"{path.name} lacks {', '.join(lacking)}, for which GGUF has no default: the model may compute otherwise; convert it again")
    if unread:
        notice(f"{path.name} states {', '.join(unread)}, which is not read: the model may compute otherwise")
    _set_tokens(config, special_tokens(file.header.metadata))
    config.dtype = file.dtype
    return config


def _set_tokens(config: PretrainedConfig, special: dict[str, int]) -> None:
    """Set the tokens that the file has, and none for those that it does not have. What transformers adds to its ends (Gemma 4) stays."""
    usual, ends = config.eos_token_id, [*dict.fromkeys(special[end] for end in ("eos", "eot", "eom") if end in special)]
    if isinstance(usual, list) and ends and {*ends} <= {*usual}:
        ends = [*dict.fromkeys([*ends, *usual])]
    config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    config.bos_token_id, config.pad_token_id = special.get("bos"), special.get("padding")


def _known(config: PretrainedConfig) -> dict[str, Any]:
    """The attributes, by all of their names."""
    values = config.to_dict()
    return values | {name: values.get(own) for name, own in config.attribute_map.items()}


def _lacking(config: PretrainedConfig, file: GgufFile) -> Iterator[str]:
    """The keys that the model needs and the header does not have."""
    known, stated = _known(config), {key.partition(".")[2] for key, value in file.header.metadata.items() if value}
    needed = [key for key, names in NEEDED.items() if any(name in known for name in names.split()) and not (key == NORM and RMS in stated)]
    for key in [*needed, *(["expert_gating_func"] if file.architecture in GATING else [])]:
        if key not in stated:
            yield f"{file.architecture}.{key}"


def _defaults(config: PretrainedConfig, file: GgufFile) -> dict[str, Any]:
    """What llama.cpp takes for keys that the header leaves out."""
    known, stated, own = _known(config), file.header.metadata, file.architecture
    heads = known.get("num_attention_heads") or 1
    width = known["hidden_size"] // heads
    found: dict[str, Any] = {"attention.key_length": width, "attention.head_count_kv": heads}
    if known.get("rope_parameters"):
        found |= {"rope.freq_base": 1e4, "rope.dimension_count": stated.get(f"{own}.attention.key_length") or width}
    if own == "gemma4":
        found["final_logit_softcapping"] = 30.0
    return found


def _compared(config: PretrainedConfig, file: GgufFile) -> Iterator[str]:
    """Set what the header says, or implies, and the configuration lacks; yield the keys, with their values, of which nothing is known."""
    known, defaults, stated = _known(config), _defaults(config, file), file.header.metadata
    implied = defaults | {"feed_forward_length": 4 * known["hidden_size"], "attention.causal": True}
    implied["expert_gating_func"] = GATING.get(file.architecture, 1)
    metadata = {f"{file.architecture}.{name}": value for name, value in defaults.items()} | stated
    for key in sorted(metadata, key=lambda key: ".rope." in key):  # shares of a head's width, after the width
        owner, _, name = key.partition(".")
        value = metadata[key] - metadata.get(f"{owner}.nextn_predict_layers", 0) if name == "block_count" else metadata[key]
        if owner == "tokenizer" and (value or name in TRUE) and not name.endswith("_token_id") and not TOKENIZER.search(name):
            yield f"{key} = {one_line(str(value), 60)}"
        if owner != file.architecture or name in ELSEWHERE or (not value and value is not False):
            continue
        attribute = next((known_name for known_name in MEANINGS.get(name, "").split() if known_name in known), None)
        if name.startswith("rope."):
            read = _set_rotary(config, name.removeprefix("rope."), value)
        elif name in PATTERNS:
            read = _pattern(value, config, PATTERNS[name]) == known.get("layer_types")
        elif attribute is None or (name == "attention.sliding_window" and known.get("use_sliding_window") is False):
            read = name in UNUSED or value == implied.get(name, False)
        elif isinstance(value, list):  # for each layer
            read = known[attribute] == value or {*value} - {0} == {known[attribute]}
        else:
            read = True
            if not isinstance(known[attribute], (int, float)) or not math.isclose(known[attribute], value, rel_tol=1e-6):
                setattr(config, attribute, value)
        if not read and key in stated:
            yield f"{key} = {one_line(f'{value:.6g}' if isinstance(value, float) else str(value), 60)}"


def _set_implied(config: PretrainedConfig, file: GgufFile) -> None:
    """Set what follows from the tensors, from keys that are left out and from the size of the model."""
    known = _known(config)
    for suffix, attribute in BIASES.items():
        if attribute in known and any(tensor.endswith(suffix) for tensor in file.header.tensors):
            setattr(config, attribute, True)
    windowed, gemma = file.header.metadata.get(f"{file.architecture}.attention.sliding_window"), file.architecture.startswith("gemma")
    if not windowed and file.architecture == "gemma3":
        config.layer_types, config.sliding_window = ["full_attention"] * config.num_hidden_layers, config.max_position_embeddings
    elif known.get("sliding_window") is not None and (windowed == 0 or not (windowed or gemma)):
        config.sliding_window = config.max_position_embeddings if gemma else None  # Mistral's default, which llama.cpp does not have
    if file.architecture in LARGE:
        share = known["hidden_size"] // known["num_attention_heads"]
        config.query_pre_attn_scalar = share if config.num_hidden_layers == LARGE[file.architecture] else config.head_dim


def _pattern(value: Any, config: PretrainedConfig, kind: str) -> list[str]:
    """Return the kind of each layer: this one where the list says so, or in all but the last of each group of so many."""
    layers = value if isinstance(value, list) else [(layer + 1) % value != 0 for layer in range(config.num_hidden_layers)]
    return [kind if of_the_kind else "full_attention" for of_the_kind in layers[: config.num_hidden_layers]]


def _set_rotary(config: PretrainedConfig, name: str, value: Any) -> bool:
    """Set what the header says of rotary frequencies; return whether it is known."""
    known: Any = config.to_dict()
    rope, part = known.get("rope_parameters") or {}, "sliding_attention" if name.endswith("_swa") else "full_attention"
    section, name = rope.get(part, {}) if "full_attention" in rope else rope, name.removesuffix("_swa")
    if part == "sliding_attention" and section is rope:  # one set for all layers
        return bool(value in (rope.get("rope_theta"), known.get("head_dim")))
    if name == "dimension_count":
        share = value / (known.get("head_dim") or config.hidden_size // config.num_attention_heads)
        if "rotary_dim" in known:
            config.rotary_dim, section["partial_rotary_factor"] = value, share
        elif "partial_rotary_factor" not in section:
            return bool(share == 1)
        elif section.get("rope_type") != "proportional":  # whose factor is no share
            section["partial_rotary_factor"] = share
    elif name in ROPE and (name == "freq_base" or section.get("rope_type") == "yarn"):
        section[ROPE[name]] = value
    else:
        return isinstance(value, (int, float)) and value == 1
    if section:
        config.rope_parameters = rope
    return bool(section)


@contextmanager
def reading(file: GgufFile, dtype: torch.dtype | str, empty: PreTrainedModel) -> Iterator[None]:
    """Say first what the weights take in memory, and which the model, ``empty``, lacks."""
    notice(f"backbone {file.described(dtype if isinstance(dtype, torch.dtype) else file.dtype)}")
    with quick_reader():
        say_unread(file, empty)
        yield


def say_unread(file: GgufFile, model: PreTrainedModel) -> None:
    """Say which tensors of the file no parameter of this model takes, if it has fewer weights than the file: some have other names."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture, metadata = next(number for number, name in MODEL_ARCH_NAMES.items() if name == file.architecture), file.header.metadata
    layers, names = metadata[f"{file.architecture}.block_count"], dict[str, list[str]]()
    drafting = range(layers - metadata.get(f"{file.architecture}.nextn_predict_layers", 0), layers)  # no part of the model (MTP)
    apart = ("rope_f", *(f"blk.{layer}." for layer in drafting))
    table = get_tensor_name_map(architecture, layers)
    for name, _ in chain(model.named_parameters(remove_duplicate=False), model.named_buffers()):
        parts = name.split(".")
        ends = (table.get_name(".".join(parts[start:]), (".weight", ".bias")) for start in range(len(parts)))
        layer, part = name.rpartition(".mlp.")[0].rpartition(".")[2], name.rpartition(".mlp.")[2]
        joined = [f"blk.{layer}.{stored}" for stored in EXPERTS.get(part, "").split()]
        names[name] = joined or [next((found for found in ends if found is not None), "")]
    read = {*chain.from_iterable(names.values())}
    left = {name: raw.elements for name, raw in file.header.tensors.items() if name not in read and not name.startswith(apart)}
    others = sum(weight.numel() for name, weight in model.named_parameters() if not file.header.tensors.keys() & {*names[name]})
    if sum(left.values()) > others:
        shown = ", ".join([*left][:4]) + (", ..." if len(left) > 4 else "")
        notice(f"{file.path.name} holds {len(left)} tensors that transformers does not read ({shown}): the model computes without them")


def _set_rope(config: PretrainedConfig, file: GgufFile) -> None:
    """Add the scaling of rotary frequencies, which transformers leaves out for most architectures. Raises UserError for an unknown one."""
    stated = {name.partition(".rope.scaling.")[2]: value for name, value in file.header.metadata.items() if ".rope.scaling." in name}
    rope: Any = config.get_text_config().to_dict().get("rope_parameters") or {}
    section = rope.get("full_attention", rope)  # with one set for each kind of layer, llama.cpp scales that of full attention
    kind, factor = stated.get("type", "linear" if "factor" in stated else None), stated.get("factor") or 1.0
    if section.get("rope_type", "default") != "default":
        return
    if (tensor := file.header.tensors.get(ROPE_FACTORS)) is not None:
        section |= _llama3(section["rope_theta"], np.fromfile(file.path, np.float32, tensor.elements, offset=tensor.place))
    elif kind in ("linear", "yarn"):
        length = stated.get("original_context_length") or file.header.metadata.get(f"{file.architecture}.context_length")
        original = {"original_max_position_embeddings": length} if kind == "yarn" else {}
        section |= {"rope_type": kind, "factor": float(factor), **original} if factor != 1 else {}
    elif kind not in (None, "none") or any(name.startswith("rope_factors_") for name in file.header.tensors):
        raise ValueError(f"its rotary frequencies are scaled by {kind or 'longrope'}")
    if rope:
        config.get_text_config().rope_parameters = rope


def _llama3(theta: float, factors: np.ndarray) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling that divides the frequencies by these factors. Raises ValueError if there are none."""
    frequencies = theta ** -(np.arange(len(factors)) / len(factors))
    for original in (8192, 4096, 16384, 32768, 2048):
        smooth = np.clip((original * frequencies / (2 * math.pi) - 1) / 3, 0, 1)
        if np.allclose(1 / factors, (1 - smooth) / factors.max() + smooth, rtol=1e-3):
            found = {"factor": float(f"{factors.max():.5g}"), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rope_type": "llama3", **found, "original_max_position_embeddings": original}
    raise ValueError("its rotary frequencies are divided by factors that are not those of Llama 3")
