"""DFlash and DFlash2 as a GGUF file for llama.cpp's ``draft-dflash`` (run in xllamacpp 2026.10.11549), read back as `Block` reads a folder.

Channels of queries and keys are in the order of Qwen3's files here, and the base kernels of convolutions in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from headstart.heads.backbone.backbone import Backbone
from headstart.serving.layouts.block import Block, odd_parts
from headstart.serving.layouts.checkpoint import Checkpoint
from headstart.serving.layouts.files import Files, require_finite
from headstart.serving.layouts.layout import Choice, Counting, Heads, Layout
from headstart.serving.layouts.llamacpp import KEYS, NO_LAYERS, TARGETS, notes_of, read_config, renamed, write_gguf
from headstart.serving.layouts.parts import IDS

FILE, MASK = "dflash.gguf", "tokenizer.ggml.mask_token_id"
NAMES = {
    "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight",
    **{f"candidate_selector.{x}_codebook": f"selector_{x}.weight" for x in ("predecessor", "successor")},
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}  # fmt: skip
LAYER = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{x}_proj.weight": f"attn_{x}.weight" for x in "qkv"}, "self_attn.o_proj.weight": "attn_output.weight",
    **{f"self_attn.{x}_norm.weight": f"attn_{x}_norm.weight" for x in "qk"},
    **{f"mlp.{x}_proj.weight": f"ffn_{x}.weight" for x in ("gate", "up", "down")},
    **{f"{ours}_conv.{x}": f"{theirs}_conv_{y}" for ours, theirs in (("attention", "attn"), ("mlp", "ffn"))
       for x, y in (("base_kernel", "base"), ("kernel_projection.weight", "proj.weight"))},
}  # fmt: skip
"""Names of a layer's tensors, ours and llama.cpp's."""
STATED = {key: ours for key, ours in KEYS.items() if not key.startswith(("norm_", "target_"))} | {"block_size": "block_size"}
SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "final_logit_softcapping")


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
        names = _names(config["num_hidden_layers"])
        tensors = {names[name]: tensor for name, tensor in heads.tensors.items()}
        write_gguf(folder / FILE, "dflash", values | {MASK: nested["mask_token_id"]}, tensors)
        return notes_of(heads, FILE)

    def recognises(self, files: Files) -> bool:
        return files.config.get("general.architecture") == "dflash"

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        config = read_config(files, {**STATED, MASK: "mask_token_id", "attention.causal": "causal"}) | {"hidden_act": "silu"}
        config |= {key: files.config[key] for key in (*SECOND, "sample_from_anchor") if key in files.config}
        ours = {theirs: ours for ours, theirs in _names(config["num_hidden_layers"]).items()}
        tensors, taps = renamed(files.read(), ours), tuple(files.config["target_layers"])
        shapes = {name: tuple(x.shape) for name, x in tensors.items()}
        read = replace(files, config=config, shapes=shapes, homes={}, loaded=tensors)
        return Block().of(read, config, backbone, [Choice(f"target_layers {list(taps)}", {"taps": taps})])


def _names(layers: int) -> Mapping[str, str]:
    """Return the names of all tensors, ours and llama.cpp's."""
    return NAMES | {f"layers.{i}.{ours}": f"blk.{i}.{theirs}" for i in range(layers) for ours, theirs in LAYER.items()}
