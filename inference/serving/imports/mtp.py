"""MTP modules: alone, as Headstart saves them, or inside a whole model's checkpoint, as DeepSeek, MiMo and Qwen3.5 ship them."""

from __future__ import annotations

from typing import Any

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.native_mtp import LAYOUTS, SHARED, Layout
from headstart.inference.serving.imports.foreign import Foreign
from headstart.inference.serving.imports.reading import Counting, Reading, Sizes

NAME = "MTP modules"


def recognises(foreign: Foreign) -> bool:
    layers = _text(foreign).get("num_hidden_layers")
    return isinstance(layers, int) and _layout(foreign, layers) is not None


def sizes(foreign: Foreign) -> Sizes:
    text = _text(foreign)
    return Sizes(text.get("hidden_size"), text.get("vocab_size"), text.get("num_hidden_layers"))


def readings(foreign: Foreign, backbone: Backbone, counting: Counting | None) -> list[Reading]:
    layers = backbone.num_layers
    layout = _layout(foreign, layers)
    assert layout is not None
    modules = 1
    while layout.native(f"mtp.{modules}.eh_proj.weight", layers) in foreign.shapes and not layout.single:
        modules += 1
    starts = tuple(layout.native(f"mtp.{module}.layer.", layers) for module in range(modules))
    parts = ("enorm", "hnorm", "eh_proj", "norm")
    own = {layout.native(f"mtp.{module}.{name}.weight", layers) for module in range(modules) for name in parts}
    names = [name for name in foreign.shapes if name in own or (name.startswith(starts) and not name.endswith(SHARED))]
    rest = len(foreign.shapes) - len(names)
    arguments = {"layout": layout.name} | ({"shared": False, "depth": modules} if modules > 1 else {})
    notes = (f"{rest} tensors of the model beside the modules are left out",) if rest else ()
    return [Reading("mtp", arguments, foreign.read(names), notes=notes)]


def _text(foreign: Foreign) -> dict[str, Any]:
    return dict(foreign.config.get("text_config") or foreign.config)


def _layout(foreign: Foreign, layers: int) -> Layout | None:
    return next((one for one in LAYOUTS.values() if one.native("mtp.0.eh_proj.weight", layers) in foreign.shapes), None)
