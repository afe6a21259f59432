"""GGUF files of small models, as llama.cpp's converter and quantizer write them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from chat_templates import CHATML, make_tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}
CONTROL, NORMAL = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL


def chat_model(seed: int = 0, **changes: Any) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """A random Llama with grouped queries, and a tokenizer with a chat template whose turns end in <|im_end|>, as texts do."""
    tokenizer = make_tokenizer(CHATML, add_bos=False)
    tokenizer.chat_template, tokenizer.eos_token = CHATML, "<|im_end|>"
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    stated = {"vocab_size": len(tokenizer), "initializer_range": 0.2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6}
    ends = dict.fromkeys(("eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    config = LlamaConfig(**{**sizes, **stated, **ends, "bos_token_id": tokenizer.bos_token_id, **changes})
    return LlamaForCausalLM(config).eval(), tokenizer


def write_gguf(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kind: str = "Q8_0", **metadata: Any) -> Path:
    """Write a Llama with its tokenizer; matrices are stored as ``kind``. ``metadata``: further keys, dots as ``__``."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, config.num_hidden_layers), (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size), (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads), (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps), (writer.add_vocab_size, config.vocab_size),
        (writer.add_rope_dimension_count, config.head_dim), (writer.add_rope_freq_base, config.rope_parameters["rope_theta"]),
    ):  # fmt: skip
        add(value)
    _add_tokenizer(writer, tokenizer)
    for key, value in metadata.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string if isinstance(value, str) else writer.add_float32)(
            key.replace("__", "."), value
        )
    for name, tensor in model.state_dict().items():
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            _add_tensor(writer, name, tensor, config, kind)
    if (factors := rope_factors(model)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_as(weight: Tensor, kind: str) -> Tensor:
    """A weight as it is after it was stored as ``kind``."""
    quantized = gguf.GGMLQuantizationType[kind]
    values = gguf.quants.dequantize(gguf.quants.quantize(weight.float().numpy(), quantized), quantized)
    return torch.from_numpy(np.array(values)).view(weight.shape).to(weight.dtype)


def rope_factors(model: PreTrainedModel) -> np.ndarray | None:
    """What Llama 3's scaling divides the frequencies by; None without it."""
    rope = model.config.rope_parameters
    if rope["rope_type"] != "llama3":
        return None
    width = model.config.head_dim
    plain = rope["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    return (plain / model.get_submodule("model.rotary_emb").inv_freq).numpy()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, config: Any, kind: str) -> None:
    stem, _, end = name.rpartition(".")
    if stem in WHOLE:
        new = WHOLE[stem]
    else:
        _, _, number, rest = stem.split(".", 3)
        new = f"blk.{number}.{NAMES[rest]}"
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(new.rpartition(".")[2])
    values = tensor.float()
    if heads is not None:  # llama.cpp rotates neighbouring channels
        values = values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(f"{new}.{end}", values.numpy())
    else:
        quantized = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{new}.{end}", gguf.quants.quantize(values.contiguous().numpy(), quantized), raw_dtype=quantized)
