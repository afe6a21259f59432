"""What EAGLE's layouts share: layer ids in either counting, and the names of the decoder layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headstart.inference.serving.imports.reading import Counting
from headstart.support.errors import UserError

TOP, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"


def tap_choices(config: Mapping[str, Any], layers: int, counting: Counting | None, path: str) -> list[tuple[tuple[int, ...], str]]:
    """Return the possible taps of an EAGLE-3 configuration, the likeliest first, each with the counting that gives them.

    The key at the top counts states (vLLM), the one in ``eagle_config`` outputs of layers (SGLang); files with one of them exist in both
    countings. Without either the taps are the default, on which all engines agree.
    """
    top = _ids(config.get(TOP), TOP, path)
    nested = _ids((config.get(NESTED) or {}).get(TOP), f"{NESTED}.{TOP}", path)
    if top is None and nested is None:
        default = (2, layers // 2, layers - 3)
        if len(set(default)) < 3 or min(default) < 0:
            raise UserError(f"{path} names no layers to read ({TOP}), and the default {list(default)} is none for {layers} layers; add it")
        return [(default, "")]
    if counting is None and top is not None and nested is not None and top == tuple(i + 1 for i in nested):
        return [(_within(top, layers, path), "")]
    ids = top if top is not None else nested
    assert ids is not None
    order: list[Counting] = ["hs", "layer"] if top is not None else ["layer", "hs"]
    readings: list[tuple[tuple[int, ...], str]] = []
    for one in [counting] if counting is not None else order:
        taps = tuple(sorted({i + (one == "layer") for i in ids}))
        if counting is not None or (min(taps) >= 0 and max(taps) <= layers):
            readings.append((_within(taps, layers, path), f"layer ids {list(ids)} counted as {one}: taps {list(taps)}"))
    if not readings:
        raise UserError(f"{path} reads the layers {list(ids)}, and the backbone has {layers}: give the backbone that they were trained on")
    return readings


def _within(taps: tuple[int, ...], layers: int, path: str) -> tuple[int, ...]:
    if min(taps) < 0 or max(taps) > layers:
        raise UserError(f"{path} reads the taps {list(taps)}, and the backbone has {layers} layers: give its own, or another --counting")
    return taps


def _ids(value: Any, key: str, path: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or not value or any(type(i) is not int for i in value):
        raise UserError(f"{path}: {key} in config.json is a list of layer numbers; got {value!r}")
    return tuple(sorted(set(value)))


def numbered(name: str) -> str:
    """Return a tensor's name with ``layers.0.`` for the first layer, which some layouts call ``midlayer.``."""
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name
