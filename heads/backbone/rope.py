"""Rotary embeddings whose frequencies depend on the length of the text."""

from __future__ import annotations

from typing import Any


def rope_switch(config: Any) -> tuple[int | None, bool]:
    """How many positions a text may have before its rotary frequencies change (None: they never do), and whether but once.

    LongRoPE (2402.13753) has frequencies for short texts and others for long ones; dynamic NTK scaling, new ones for each length.
    """
    stated = config.to_dict()
    rope = stated.get("rope_parameters") or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict)]   # the whole model's, or each kind of layer's own
    names = [str(one.get("rope_type")) for one in kinds]
    if not any(name == "longrope" or "dynamic" in name for name in names):
        return None, True
    first = [one["original_max_position_embeddings"] for one in kinds if one.get("original_max_position_embeddings")]
    return min([*first, stated.get("original_max_position_embeddings") or stated["max_position_embeddings"]]), "longrope" in names
