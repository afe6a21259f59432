"""EAGLE-4 as NeMo Automodel exports it: EAGLE-3.1 over the whole vocabulary, and an output layer of low rank (``efficient_lm_head``).

By that layer the best tokens are chosen, whose exact logits are then computed, as with ``drafter.shortlist``. Its loaders refuse keys and
tensors that they do not know. The layout is that of Automodel's documentation; no engine that reads it was at hand.

Shape suffixes: R rank, D width, V vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.own_readout import SHORTLIST, SUBSPACE
from headstart.serving.layouts.eagle3 import Eagle3, has_qk_norm, tap_choices
from headstart.serving.layouts.files import Files, write_folder
from headstart.serving.layouts.layout import Checkpoint, Choice, Counting, Heads
from headstart.serving.layouts.parts import IDS
from headstart.support.errors import UserError

LOW_RANK = ("efficient_lm_head.weight", "efficient_lm_head_down_proj.weight")
KEPT = (
    "model_type", "num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling", "tie_word_embeddings", "torch_dtype",
    "fc_norm", "norm_output", "sliding_window", "layer_types", "eagle_config",
)  # fmt: skip
"""Keys that describe the heads, as far as they are stated."""


class Eagle4(Eagle3):
    """Architecture ``LlamaForCausalLMEagle4``."""

    name, title, engines = "eagle4", "EAGLE-4", ()

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        return {}

    def recognises(self, files: Files) -> bool:
        return "Eagle4" in " ".join(files.config.get("architectures") or []) or LOW_RANK[0] in files.shapes

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        return self.of(files, files.config, backbone, tap_choices(files.config, backbone.num_layers, counting or "layer", files.path))

    def of(self, files: Files, config: Mapping[str, Any], backbone: Backbone, taps: list[Choice]) -> Heads:
        left_out = "the output layer of low rank is left out: drafts use exact logits until training finds one (drafter.shortlist)"
        return super().of(files, config, backbone, taps).without(LOW_RANK).plus(notes=[left_out] if LOW_RANK[0] in files.shapes else [])

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        if reason := next((reason for reason, holds in self._lacking(heads).items() if holds), None):
            raise UserError(f"the layout eagle4 does not hold {heads.path}: {reason}, or export --to {Eagle3.name}")
        weight_VD, dtype = heads.tensors["lm_head.weight"].float(), heads.tensors["lm_head.weight"].dtype
        with np.load(heads.folder / SHORTLIST, allow_pickle=False) as arrays:
            down_RD, basis_DR = (torch.from_numpy(arrays[f"{name}_0"]) for name in SUBSPACE)
        factors = (weight_VD - weight_VD.mean(0)) @ basis_DR, down_RD  # the mean adds the same to all logits
        tensors: dict[str, Tensor] = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in heads.tensors.items()}
        tensors |= {name: factor.to(dtype).contiguous() for name, factor in zip(LOW_RANK, factors, strict=True)}
        tensors["embed_tokens.weight"] = heads.ends.embed.weight.detach().to(dtype)
        shortlist = heads.card["arguments"]["shortlist"]
        head = {"type": "low_rank", "rank": shortlist["rank"], "num_candidates": shortlist["candidates"]}
        config = {key: heads.config[key] for key in KEPT if key in heads.config}
        window = {"use_sliding_window": True} if "sliding_window" in config else {}
        write_folder(folder, {"architectures": ["LlamaForCausalLMEagle4"], **config, **window, "efficient_lm_head_config": head}, tensors)
        return ["written as NeMo Automodel's documentation describes EAGLE-4; it was not tried in an engine"]

    def _lacking(self, heads: Checkpoint) -> dict[str, Any]:
        """Return what of the layout heads may lack, in words, and whether these do."""
        config, file = heads.config, heads.folder / SHORTLIST
        return {
            "it drafts from the normed state: train with drafter.norm_output=true": not config.get("norm_output"),
            "it norms each tap: train with drafter.fc_norm=true": not config.get("fc_norm"),
            "it has no norm before the residual stream: train with drafter.norm_before_residual=false": config["norm_before_residual"],
            "it has no norms of queries and keys: train with drafter.qk_norm=false": has_qk_norm(config),
            "it reads three layers: train with three drafter.taps": len(config[IDS]) != 3,
            "it has one decoder layer: train with drafter.layers=1": config["num_hidden_layers"] != 1,
            "it has no biases: train with drafter.layer.attention_bias=false": config.get("attention_bias"),
            "it has no draft vocabulary: train with drafter.draft_vocab_size=null": "d2t" in heads.tensors,
            "it has a shortlist: train with drafter.shortlist='{rank: 128, candidates: 128}'": not _found(file),
        }


def _found(file: Path) -> bool:
    """Return whether a checkpoint has subspaces: its file is empty before the end of the training."""
    if not file.is_file():
        return False
    with np.load(file, allow_pickle=False) as arrays:
        return bool(arrays.files)
