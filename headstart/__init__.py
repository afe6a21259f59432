"""Headstart: train lookahead heads on a frozen language model, and decode the same text faster with them.

The public names below are found on first use, so that `import headstart` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
    from headstart.heads.backbone.features import Features
    from headstart.heads.base import Drafter
    from headstart.inference.custom_generate import custom_generate
    from headstart.inference.engine.known_processors import stateless
    from headstart.inference.engine.tree import TreeShape
    from headstart.inference.generate import SpeculativeModel, load
    from headstart.inference.grammar import grammar
    from headstart.inference.show import show
    from headstart.training.recipe.recipe import load_recipe

__version__ = "0.2.0"

__all__ = [
    "Backbone",
    "Drafter",
    "Features",
    "SpeculativeModel",
    "TreeShape",
    "__version__",
    "custom_generate",
    "grammar",
    "load",
    "load_backbone",
    "load_recipe",
    "load_tokenizer",
    "show",
    "stateless",
]

_HOME = {
    "Backbone": "headstart.heads.backbone.backbone",
    "Drafter": "headstart.heads.base",
    "Features": "headstart.heads.backbone.features",
    "SpeculativeModel": "headstart.inference.generate",
    "TreeShape": "headstart.inference.engine.tree",
    "custom_generate": "headstart.inference.custom_generate",
    "grammar": "headstart.inference.grammar",
    "load": "headstart.inference.generate",
    "load_backbone": "headstart.heads.backbone.backbone",
    "load_recipe": "headstart.training.recipe.recipe",
    "load_tokenizer": "headstart.heads.backbone.backbone",
    "show": "headstart.inference.show",
    "stateless": "headstart.inference.engine.known_processors",
}
"""The module each public name lives in."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}")
    value = import_module(_HOME[name]).__dict__[name]
    globals()[name] = value  # found once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
