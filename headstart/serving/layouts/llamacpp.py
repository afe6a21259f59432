"""EAGLE-3 as a GGUF file for llama.cpp's ``draft-eagle3`` (read in the source of build 11434, run in xllamacpp 2026.10.11549).

llama.cpp drafts token ids and embeds them with the target's embedding. The draft model's tokenizer names tokens in its debug log alone, and
without one that log aborts it: the file names them by number. ``d2t`` holds tokens, not offsets, and channels of queries and keys are in
the order in which llama.cpp rotates a Llama's. The file is read back as the checkpoint that it stands for.

So are DFlash and DFlash2 for its ``draft-dflash``, read back as `Block` reads a folder. Channels of queries and keys are in the order of
Qwen3's files there, and the base kernels of convolutions in fp32.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headstart.chat.template import Template, TemplateRefusal
from headstart.heads.backbone.backbone import Backbone, load_tokenizer
from headstart.heads.backbone.gguf_file import require_package
from headstart.heads.checkpoint import chat_settings
from headstart.heads.layers.start_values import llama_like
from headstart.serving.layouts.block import SECOND, Block, odd_parts
from headstart.serving.layouts.eagle3 import Eagle3, beyond_the_original
from headstart.serving.layouts.files import DamagedError, Files, require_finite
from headstart.serving.layouts.layout import Checkpoint, Choice, Counting, Heads, Layout
from headstart.serving.layouts.parts import IDS
from headstart.support.errors import UserError

FILE = "eagle3.gguf"
NAMES = {
    "fc": "fc", "input_norm": "enc.output_norm", "norm": "output_norm", "lm_head": "output", "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2", "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    **{f"midlayer.self_attn.{x}_proj": f"blk.0.attn_{x}" for x in "qkv"}, "midlayer.self_attn.o_proj": "blk.0.attn_output",
    **{f"midlayer.mlp.{x}_proj": f"blk.0.ffn_{x}" for x in ("gate", "up", "down")},
}  # fmt: skip
ROTATED = {"blk.0.attn_q.weight": "num_attention_heads", "blk.0.attn_k.weight": "num_key_value_heads"}
KEYS = {
    "vocab_size": "vocab_size", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim", "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim", "target_hidden_size": "hidden_size", "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "norm_before_residual": "norm_before_residual", "norm_before_fc": "norm_before_fc",
}  # fmt: skip
"""Keys after ``eagle3.``, and what they hold of ``config.json``."""
REAL = ("rope_theta", "rms_norm_eps")
TARGETS = (
    "llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "gemma4", "gemma4_text",
    "gpt_oss", "minimax_m2", "nemotron_h", "lfm2",
)  # fmt: skip
"""Model types of backbones whose layers llama.cpp lets heads read."""
NO_LAYERS = f"it cannot give heads the layers of a {{}} backbone; it can of {', '.join(TARGETS)}"
THINKING = "enable_thinking"


class LlamaCpp(Layout):
    """Heads with one layer and three taps, which feed back the state before the final norm."""

    name, title, methods, engines = "llama.cpp", "EAGLE-3 for llama.cpp", ("eagle3",), ("llama.cpp",)

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        config, kind = heads.config, str(heads.card["contract"]["model_type"])
        found = {
            NO_LAYERS.format(kind): kind not in TARGETS,
            **beyond_the_original(config),
            "it rotates as rope_type default or llama3 does: train with such drafter.layer.rope_parameters":
                config["rope_parameters"]["rope_type"] not in ("default", "llama3"),
        }  # fmt: skip
        reason = next((reason for reason, holds in found.items() if holds), None)
        return {} if reason is None else {self.name: reason}

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        require_finite(heads.tensors)
        tensors, config = heads.tensors, dict(heads.config)
        config["norm_before_fc"] = bool((config.get("eagle_config") or {}).get("norm_before_fc"))
        values = {key: config[ours] for key, ours in KEYS.items()} | {"target_layers": list(config[IDS])}
        named = {f"{theirs}.weight": tensors[f"{ours}.weight"] for ours, theirs in NAMES.items() if f"{ours}.weight" in tensors}
        for name, key in ROTATED.items():
            named[name] = _reordered(named[name], config[key], 2, -1)
        if config["rope_parameters"]["rope_type"] == "llama3":
            named["rope_freqs.weight"] = _rope_factors(config)
        if "d2t" in tensors:
            named["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        write_gguf(folder / FILE, "eagle3", values, named)
        return notes_of(heads, FILE)

    def recognises(self, files: Files) -> bool:
        return files.config.get("general.architecture") == "eagle3"

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        config = read_config(files, KEYS) | {IDS: files.config["target_layers"]}
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu"}
        found, theirs = files.read(), {f"{name}.weight": f"{ours}.weight" for ours, name in NAMES.items()}
        if (factors := found.pop("rope_freqs.weight", None)) is not None:
            ours = llama_like(backbone, None).to_dict()
            if ours["rope_parameters"]["rope_type"] != "llama3" or not torch.allclose(_rope_factors(ours), factors.float()):
                raise DamagedError(f"{files.path}: rope_freqs.weight is not the backbone's rope_parameters; give the backbone of the heads")
            config["rope_parameters"] = ours["rope_parameters"]
        for name, key in ROTATED.items():
            if name in found:
                found[name] = _reordered(found[name], config[key], -1, 2)
        if "d2t" in found:
            found["d2t"] = found["d2t"] - torch.arange(len(found["d2t"]))
        tensors = renamed(found, theirs)
        shapes = {name: tuple(x.shape) for name, x in tensors.items()}
        return Eagle3().parse(replace(files, config=config, shapes=shapes, homes={}, loaded=tensors), backbone, "stated")


def write_gguf(path: Path, architecture: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write the file of a draft model; keys follow the architecture's name, but for those of the tokenizer."""
    require_package(path.name)
    import gguf

    writer, vocab = gguf.GGUFWriter(path, architecture), int(values["vocab_size"])
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in values.items():
        value = float(value) if KEYS.get(key) in REAL else value
        add[type(value)](key if key.startswith("tokenizer.") else f"{architecture}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{token}>" for token in range(vocab)])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            writer.add_tensor(name, tensor.numpy())
            continue
        stored = {torch.float16: "F16", torch.bfloat16: "BF16"}.get(tensor.dtype, "F32") if tensor.ndim == 2 else "F32"
        kind = gguf.GGMLQuantizationType[stored]
        writer.add_tensor(name, gguf.quants.quantize(tensor.float().contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_config(files: Files, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return what a file's keys hold under their names in ``config.json``. Raises DamagedError for one that is missing."""
    if missing := [key for key in ("target_layers", *keys) if key not in files.config]:
        raise DamagedError(f"{files.path} has no key {missing[0]}, which Headstart writes; export the heads again")
    found = {ours: files.config[key] for key, ours in keys.items()}
    return found | {key: float(str(np.float32(found[key]))) for key in REAL if key in found}  # as before single precision


def renamed(found: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return a file's tensors by our names, all in one precision: some are stored in fp32 whatever the matrices are."""
    dtype = found["fc.weight"].dtype if "fc.weight" in found else torch.float32
    return {names.get(name, name): x.to(dtype) if x.ndim != 2 and x.is_floating_point() else x for name, x in found.items()}


def _reordered(weight: Tensor, heads: int, first: int, second: int) -> Tensor:
    """Return a projection with channels of each attention head transposed; (2, -1): those rotated together come side by side."""
    return weight.view(heads, first, second, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _rope_factors(config: Mapping[str, Any]) -> Tensor:
    """Return what Llama 3's scaling divides each frequency by."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig.from_dict(dict(config)), torch.device("cpu"))
    width = config["head_dim"]
    return config["rope_parameters"]["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float) / width) / scaled


def notes_of(heads: Checkpoint, file: str) -> list[str]:
    """Return what the user should know of heads in a file."""
    return [f"the heads are {file}; the target is a GGUF file of the backbone, whose tokenizer llama.cpp uses", *_requests(heads)]


def _requests(heads: Checkpoint) -> list[str]:
    """Return what goes with requests, since llama.cpp's server turns on a variable of the template that transformers leaves undefined."""
    settings = chat_settings(heads.card)
    ways = [replace(settings, variables={**given, **settings.variables}) for given in ({}, {THINKING: True}, {THINKING: False})]
    try:
        tokenizer = load_tokenizer(heads.backbone)
        trained, on, off = (Template(tokenizer, way).render([{"role": "user", "content": "a"}], ask=True).text for way in ways)
    except (UserError, TemplateRefusal):
        return []  # no template, or none for so short a conversation
    send = f'send chat_template_kwargs {{"{THINKING}": false}} with requests'
    advice = send if trained == off else f"no value writes that one; train with data.template_kwargs.{THINKING}"
    note = f"llama.cpp's server sets {THINKING}, with which this chat template writes another prompt than in training: {advice}"
    return [] if trained == on else [note]


def recipe_values(method: str, config: PretrainedConfig) -> dict[str, Any]:
    """Return the recipe's values for heads that llama.cpp reads. Raises UserError for a method or a backbone of which it reads none."""
    if method != "eagle3":
        blocks = "of block heads it reads drafter.correction none, or selector with drafter.convolution=true"
        raise UserError(f"--for llama.cpp is of --method eagle3; got {method}; {blocks}")
    stated = config.get_text_config()
    if stated.model_type not in TARGETS:
        raise UserError(f"--for llama.cpp: {NO_LAYERS.format(stated.model_type)}")
    rope = stated.to_dict().get("rope_parameters") or {}
    plain = {"layer": {"rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta")}}}
    return {"drafter": {"norm_output": False, **(plain if rope.get("rope_type") in ("yarn", "linear") else {})}}


# Blocks.

BLOCK_FILE, MASK = "dflash.gguf", "tokenizer.ggml.mask_token_id"
BLOCK_NAMES = {
    "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight",
    **{f"candidate_selector.{x}_codebook": f"selector_{x}.weight" for x in ("predecessor", "successor")},
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}  # fmt: skip
BLOCK_LAYER = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{x}_proj.weight": f"attn_{x}.weight" for x in "qkv"}, "self_attn.o_proj.weight": "attn_output.weight",
    **{f"self_attn.{x}_norm.weight": f"attn_{x}_norm.weight" for x in "qk"},
    **{f"mlp.{x}_proj.weight": f"ffn_{x}.weight" for x in ("gate", "up", "down")},
    **{f"{ours}_conv.{x}": f"{theirs}_conv_{y}" for ours, theirs in (("attention", "attn"), ("mlp", "ffn"))
       for x, y in (("base_kernel", "base"), ("kernel_projection.weight", "proj.weight"))},
}  # fmt: skip
"""Names of a layer's tensors, ours and llama.cpp's."""
STATED = {key: ours for key, ours in KEYS.items() if not key.startswith(("norm_", "target_"))} | {"block_size": "block_size"}


class LlamaCppBlock(Layout):
    """Heads that attend to all positions and, in a block, to all elements."""

    name, title, methods, engines = "llama.cpp", "DFlash for llama.cpp", ("dflash", "dflash2"), ("llama.cpp",)

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        config, kind = heads.config, str(heads.card["contract"]["model_type"])
        found = {
            NO_LAYERS.format(kind): kind not in TARGETS,
            "it attends to all positions: train with drafter.sliding_window=null": config.get("sliding_window"),
            "its blocks are not causal: train with drafter.causal=false": config["dflash_config"].get("causal"),
            "it has no biases of queries, keys and values: train with drafter.layer.attention_bias=false": config.get("attention_bias"),
            "it rotates as rope_type default does: train with such drafter.layer.rope_parameters":
                config["rope_parameters"]["rope_type"] != "default",
        }  # fmt: skip
        reason = next((reason for reason, holds in found.items() if holds), None)
        return odd_parts(heads, self.engines) if reason is None else {self.name: reason}

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        require_finite(heads.tensors)
        config, nested = heads.config, heads.config["dflash_config"]
        values = {key: config[ours] for key, ours in STATED.items()} | {key: nested[key] for key in SECOND if key in nested}
        values |= {"target_layers": list(config[IDS]), "sample_from_anchor": False, "attention.causal": bool(nested.get("causal"))}
        names = _block_names(config["num_hidden_layers"])
        tensors = {names[name]: tensor for name, tensor in heads.tensors.items()}
        write_gguf(folder / BLOCK_FILE, "dflash", values | {MASK: nested["mask_token_id"]}, tensors)
        return notes_of(heads, BLOCK_FILE)

    def recognises(self, files: Files) -> bool:
        return files.config.get("general.architecture") == "dflash"

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        config = read_config(files, {**STATED, MASK: "mask_token_id", "attention.causal": "causal"}) | {"hidden_act": "silu"}
        config |= {key: files.config[key] for key in (*SECOND, "sample_from_anchor") if key in files.config}
        ours = {theirs: ours for ours, theirs in _block_names(config["num_hidden_layers"]).items()}
        tensors, taps = renamed(files.read(), ours), tuple(files.config["target_layers"])
        shapes = {name: tuple(x.shape) for name, x in tensors.items()}
        read = replace(files, config=config, shapes=shapes, homes={}, loaded=tensors)
        return Block().of(read, config, backbone, [Choice(f"target_layers {list(taps)}", {"taps": taps})])


def _block_names(layers: int) -> Mapping[str, str]:
    """Return the names of all tensors, ours and llama.cpp's."""
    return BLOCK_NAMES | {f"layers.{i}.{ours}": f"blk.{i}.{theirs}" for i in range(layers) for ours, theirs in BLOCK_LAYER.items()}
