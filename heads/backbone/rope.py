"""Rotary embeddings whose frequencies depend on the sequence length."""

from __future__ import annotations

from typing import Any


def rope_switch(config: Any) -> tuple[int | None, bool]:
    """Return the sequence length beyond which the rotary frequencies change (None: never), and whether they change only once.

    LongRoPE (2402.13753) has one set of frequencies for short and one for long sequences; dynamic NTK scaling has one per length.
    """
    stated = config.to_dict()
    rope = stated.get("rope_parameters") or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict)]   # one for the model, or one per kind of layer
    names = [str(one.get("rope_type")) for one in kinds]
    if not any(name == "longrope" or "dynamic" in name for name in names):
        return None, True
    first = [one["original_max_position_embeddings"] for one in kinds if one.get("original_max_position_embeddings")]
    return min([*first, stated.get("original_max_position_embeddings") or stated["max_position_embeddings"]]), "longrope" in names
