"""Which positions the backbone's attention layers may attend to: their windows, masks in the form that models take, and rotary ranges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads.backbone.recurrent import KIND
from headstart.support.errors import UserError

KINDS_OF_LAYER = ("full_attention", "sliding_attention")
ALIBI = ("bloom", "mpt")
"""Types of models that add the distance of positions to a mask of their own."""
REASONS = {
    "recurrent": "their state has read every drafted token, so that it can neither branch along a tree nor be taken back",
    "conv": "their window holds the last tokens read, so that it can neither branch along a tree nor be taken back",
    "chunked_attention": "they attend within chunks of the text, which the masks of a tree do not follow",
}
"""Why trees cannot be verified by layers of a kind; any other kind chooses its keys in a way that masks do not govern."""


def attention_windows(config: dict[str, Any], model: PreTrainedModel) -> dict[str, int | None]:
    """Map each kind of attention layer to its window size (None: unlimited). Raises UserError for layers of an unknown kind."""
    if config.get("model_type") in ALIBI:
        raise UserError(follows_no_mask(model))
    if config.get("cross_attention_layers"):
        raise UserError(f"{type(model).__name__} has layers of cross-attention to images, which keep no keys of a text")
    # Without layer_types all layers share one window (Mistral, Mixtral, Phi-3, StarCoder2); GPT-Neo has attention_layers instead.
    alike = "sliding_attention" if config.get("sliding_window") else "full_attention"
    kinds = sorted(set(config.get("layer_types") or config.get("attention_layers") or [alike]))
    unknown = [kind for kind in kinds if kind not in (*KINDS_OF_LAYER, KIND)]
    if unknown or (model._is_stateful and KIND not in kinds):
        kind = (unknown or ["recurrent"])[0]
        reason = REASONS.get(kind, "they choose what they attend to in a way that the masks of a tree do not govern")
        raise UserError(f"{type(model).__name__} has layers of kind {kind!r}: {reason}")
    return {kind: config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds if kind != KIND}


def follows_no_mask(model: PreTrainedModel) -> str:
    """Return what is wrong with a model that reads no trees."""
    return f"{type(model).__name__} does not follow a 4-D attention mask and explicit positions, so it can't read trees"


def reads_ahead(model: PreTrainedModel) -> str:
    """Return what is wrong with a model whose hidden states depend on tokens after them in a pass."""
    fault = (
        f"{type(model).__name__} computes other hidden states where more tokens follow in a pass, as with one dynamic scale for all of them"
    )
    return f"{fault}, so trees change its tokens; use another quantization, or none"


def additive_mask(allowed_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a mask of allowed positions, ``[B, T, S]``, into what is added to the scores, ``[B, 1, T, S]``."""
    mask_BTS = torch.zeros(allowed_BTS.shape, dtype=dtype, device=allowed_BTS.device)
    return mask_BTS.masked_fill_(~allowed_BTS, torch.finfo(dtype).min)[:, None]


def rope_switch(config: Any) -> tuple[int | None, bool]:
    """Return the sequence length beyond which the rotary frequencies change (None: never), and whether they change only once.

    LongRoPE (2402.13753) has one set of frequencies for short and one for long sequences; dynamic NTK scaling has one per length.
    """
    stated = config.to_dict()
    rope = stated.get("rope_parameters") or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict)]  # one for the model, or one per kind of layer
    names = [str(one.get("rope_type")) for one in kinds]
    if not any(name == "longrope" or "dynamic" in name for name in names):
        return None, True
    first = [one["original_max_position_embeddings"] for one in kinds if one.get("original_max_position_embeddings")]
    return min([*first, stated.get("original_max_position_embeddings") or stated["max_position_embeddings"]]), "longrope" in names
