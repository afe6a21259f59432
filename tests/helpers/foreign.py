"""Folders as other trainers write them: names, shapes and configurations by hand, weights at random.

D 32, 61 tokens and 6 layers are those of the tiny backbones.
"""

import json
from pathlib import Path
from typing import Any

import torch
from families import VOCAB
from safetensors.torch import save_file
from torch import Tensor

D, INNER, DV = 32, 40, 23
LAYER: dict[str, Any] = {
    "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 256, "model_type": "llama",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""A layer otherwise than the backbone's: 8 heads of 4, another width, and, as SafeAILab's configurations, no rotary base."""
Tensors = dict[str, Tensor]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5


def near_one(width: int) -> Tensor:
    return 1 + 0.2 * torch.randn(width)


def layer(start: str, width: int = D, heads: int = 8, kv: int = 2, size: int = 4, inner: int = INNER) -> Tensors:
    """A Llama layer without the norms of its input."""
    return {
        f"{start}self_attn.q_proj.weight": normal(heads * size, width),
        f"{start}self_attn.k_proj.weight": normal(kv * size, width),
        f"{start}self_attn.v_proj.weight": normal(kv * size, width),
        f"{start}self_attn.o_proj.weight": normal(D, heads * size),
        f"{start}mlp.gate_proj.weight": normal(inner, D),
        f"{start}mlp.up_proj.weight": normal(inner, D),
        f"{start}mlp.down_proj.weight": normal(D, inner),
        f"{start}post_attention_layernorm.weight": near_one(D),
    }


def safeailab_eagle1() -> tuple[dict[str, Any], Tensors]:
    config = {**LAYER, "architectures": ["LlamaForCausalLM"], "bias": True, "qkv_bias": True}
    bias = {f"layers.0.self_attn.{name}_proj.bias": normal(width) for name, width in (("q", 32), ("k", 8), ("v", 8))}
    return config, {"fc.weight": normal(D, 2 * D), "fc.bias": normal(D), **layer("layers.0."), **bias}


def safeailab_eagle3(ids: bool = True) -> tuple[dict[str, Any], Tensors]:
    """With a draft vocabulary, and the ids of layers in both countings as engines take them."""
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DV}
    if ids:
        config |= {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}}
    tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:DV].sort().values
    tensors = {
        "fc.weight": normal(D, 3 * D), **layer("midlayer.", 2 * D), "midlayer.hidden_norm.weight": near_one(D),
        "midlayer.input_layernorm.weight": near_one(D), "norm.weight": near_one(D), "lm_head.weight": normal(DV, D),
        "d2t": tokens - torch.arange(DV), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, tokens, True),
    }  # fmt: skip
    return config, tensors


def speculators_eagle3(**changes: Any) -> tuple[dict[str, Any], Tensors]:
    """As speculators trains by default, with Qwen3's layer."""
    flat, tensors = safeailab_eagle3()
    stated = {**LAYER, "model_type": "qwen3", "head_dim": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    tensors |= {f"layers.0.self_attn.{name}_norm.weight": near_one(4) for name in "qk"} | {"input_norm.weight": near_one(3 * D)}
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "draft_vocab_size": DV,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6], "norm_before_residual": True, "norm_before_fc": True, "fc_norm": False,
        "norm_output": True, "target_hidden_size": None, "transformer_layer_config": stated,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
                               "verifier": {"name_or_path": "org/target"}},
    }  # fmt: skip
    return {**config, **changes}, tensors


def vllm_peagle() -> tuple[dict[str, Any], Tensors]:
    """P-EAGLE as vLLM's configurations have it: EAGLE-3's tensors and ``mask_hidden``, here without the first two dimensions of 1."""
    config, tensors = safeailab_eagle3()
    return {**config, "parallel_drafting": True, "ptd_token_id": 60}, tensors | {"mask_hidden": torch.randn(3 * D)}


def speculators_peagle() -> tuple[dict[str, Any], Tensors]:
    """As speculators trains it: two layers, an embedding of its own, and no word of norm_before_residual, which is false."""
    config, tensors = speculators_eagle3(speculators_model_type="peagle", architectures=["PEagleDraftModel"], mask_token_id=59)
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    later = layer("layers.1.") | {f"layers.1.self_attn.{name}_norm.weight": near_one(4) for name in "qk"}
    tensors |= later | {"layers.1.input_layernorm.weight": near_one(D), "embed_tokens.weight": normal(VOCAB, D)}
    del config["norm_before_residual"]
    return config, tensors | {"mask_hidden": torch.randn(1, 1, 3 * D)}


def medusa(heads: int = 3, layers: int = 1, own_output: bool = True) -> tuple[dict[str, Any], Tensors]:
    """FasterDecoding's, whose published configurations may state fewer heads than the file holds."""
    tensors: Tensors = {}
    for k in range(heads):
        for i in range(layers):
            tensors |= {f"{k}.{i}.linear.weight": normal(D, D), f"{k}.{i}.linear.bias": normal(D)}
        if own_output:
            tensors[f"{k}.{layers}.weight"] = normal(VOCAB, D)
    return {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "org/target"}, tensors


def hydra(prefix: bool, heads: int = 2) -> tuple[dict[str, Any], Tensors]:
    """Two blocks a head; dropout layers are counted where there is a prefix layer, a whole Llama model."""
    step, first, output = (2, 1, "1.") if prefix else (1, 0, "")
    tensors: Tensors = {}
    for k in range(heads):
        wide = (k + 2) * D
        start = f"hydra_mlp.{k}.{first}."
        tensors |= {f"{start}{part}.{name}": normal(D, wide) if name == "weight" else normal(D)
                    for part in ("linear", "res_connection") for name in ("weight", "bias")}  # fmt: skip
        start = f"hydra_mlp.{k}.{first + step}.linear."
        tensors |= {f"{start}weight": normal(D, D), f"{start}bias": normal(D)}
        tensors |= {f"hydra_lm_head.{k}.{output}weight": normal(VOCAB, D), f"hydra_lm_head.{k}.{output}bias": normal(VOCAB)}
    if prefix:  # the backbone's own shape
        start = "prefix_embeding_layer."
        tensors |= layer(f"{start}layers.0.", heads=4, kv=2, size=8, inner=48)
        tensors |= {f"{start}{name}.weight": near_one(D) for name in ("layers.0.input_layernorm", "norm")}
        tensors |= {f"{start}embed_tokens.weight": normal(VOCAB, D), f"{start}layers.0.self_attn.rotary_emb.inv_freq": normal(4)}
    kind = "prefix-mlp" if prefix else "mlp"
    config = {"hydra_num_heads": heads, "hydra_num_layers": 2, "hydra_head_arch": kind, "grounded_heads": True, "hidden_state_offset": 0}
    return config, tensors


def accelerator(tied: bool) -> tuple[dict[str, Any], Tensors]:
    """IBM's, three tokens; the file of a tied one holds the shared weights for every depth."""
    inner, tensors, shared = 20, {}, {}
    for k in range(3):
        new = {
            f"emb.{k}.weight": normal(VOCAB, inner), f"head.{k}.weight": normal(VOCAB, inner),
            f"proj.{k}.weight": normal(inner, inner if k else D), f"ln.{k}.weight": near_one(inner), f"ln.{k}.bias": normal(inner),
        }  # fmt: skip
        for name, tensor in new.items():
            module, number, part = name.split(".")
            key = (module, part, tensor.shape if module == "proj" else None) if tied else name
            tensors[f"speculator.{name}"] = shared.setdefault(key, tensor).clone()
    config = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "n_predict": 3, "emb_dim": D,
              "inner_dim": inner, "vocab_size": VOCAB, "tie_weights": tied, "scale_input": True}  # fmt: skip
    return config, tensors


def block(kind: str, **stated: Any) -> tuple[dict[str, Any], Tensors]:
    """z-lab's DFlash or DFlash2, DSpark with a confidence head, or Domino: two layers over two taps, ids counted as outputs of layers."""
    tensors = {"fc.weight": normal(D, 2 * D), "hidden_norm.weight": near_one(D), "norm.weight": near_one(D)}
    for i in range(2):
        tensors |= layer(f"layers.{i}.") | {f"layers.{i}.input_layernorm.weight": near_one(D)}
        tensors |= {f"layers.{i}.self_attn.{name}_norm.weight": near_one(4) for name in "qk"}
    nested: dict[str, Any] = {"target_layer_ids": [1, 4], "mask_token_id": 60, **stated}
    config = {**LAYER, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "head_dim": 4, "num_hidden_layers": 2, "block_size": 4,
              "num_target_layers": 6, "layer_types": ["full_attention"] * 2, "rope_theta": 1000.0, "dflash_config": nested}  # fmt: skip
    if kind == "dspark":
        tensors |= {"markov_head.markov_w1.weight": normal(VOCAB, 6), "markov_head.markov_w2.weight": normal(VOCAB, 6),
                    "confidence_head.proj.weight": normal(1, D), "confidence_head.proj.bias": normal(1)}  # fmt: skip
        config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": 6, "enable_confidence_head": True, "sample_from_anchor": True}
    elif kind == "dflash2":
        tensors |= {f"candidate_selector.{name}_codebook": normal(VOCAB, 6) for name in ("predecessor", "successor")}
        tensors |= {"candidate_selector.hidden_projection.weight": normal(6, D)}
        for name in (f"layers.{i}.{part}_conv." for i in range(2) for part in ("attention", "mlp")):
            tensors |= {f"{name}base_kernel": torch.randn(2, 2, D), f"{name}kernel_projection.weight": normal(8, D)}
        config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
        nested |= {
            "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 4, "block_size": config.pop("block_size"),
        }  # fmt: skip
    elif kind == "domino":
        tensors |= {"prefix_gru.weight_ih_l0": normal(24, D), "prefix_gru.weight_hh_l0": normal(24, 8),
                    "embed_proj.0.weight": normal(6, D + 8), "embed_proj.2.weight": normal(VOCAB, 6)}  # fmt: skip
        nested |= {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1, "emb_dim": 6, "gru_hidden_dim": 8}
    return config, tensors


def speculators_block(kind: str) -> tuple[dict[str, Any], Tensors]:
    """DFlash, DFlash2 or DSpark as speculators 0.9 trains by default: layers with a window, which are causal inside a block."""
    flat, tensors = block(kind)
    own = ("block_size", "markov_rank", "enable_confidence_head", "sample_from_anchor")
    other = (*own, "architectures", "dflash_config", "num_target_layers", "is_causal")
    stated = {key: value for key, value in flat.items() if key not in other}
    stated |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2048, "use_sliding_window": True}
    nested = {key: value for key, value in flat["dflash_config"].items() if key not in ("target_layer_ids", "mask_token_id")}
    config = {key: flat[key] for key in own if key in flat} | nested | {
        "speculators_model_type": kind, "aux_hidden_state_layer_ids": [2, 5], "mask_token_id": 60, "draft_vocab_size": VOCAB,
        "sliding_window_non_causal": False, "transformer_layer_config": stated,
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"speculative_tokens": 3}]},
    }  # fmt: skip
    return config, tensors


def write(folder: Path, config: dict[str, Any], tensors: Tensors, name: str = "model.safetensors") -> Path:
    """Write a folder; a name that ends in ``.pt`` or ``.bin`` is pickled."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder
