"""What a layout of exported heads is, and finding one by name: ``mtp-stitch`` is the class in formats/mtp_stitch.py."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import ClassVar

import headstart.inference.serving.formats as package
from headstart.inference.serving.checks import require_layers, require_vocabulary
from headstart.inference.serving.engines import ENGINES, METHODS, nearest
from headstart.inference.serving.layout import Layout, write_files
from headstart.inference.serving.shapes import SHAPES, require_shapes
from headstart.inference.serving.trained import Dtype, Trained
from headstart.support.errors import UserError

SCALED = ("gemma3", "gemma4")
"""Beginnings of model types whose embedding multiplies by the square root of the width, here but not where engines embed for heads."""


class Format:
    """A layout that holds the heads of some methods; by default the checkpoint's own."""

    methods: ClassVar[tuple[str, ...]]
    engines: ClassVar[tuple[str, ...]]
    """Engines that read this layout, where they read the method."""

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2].replace("_", "-")

    def unread(self, trained: Trained) -> dict[str, str]:
        """Return the engines of `engines` that do not read these heads in particular, and why."""
        return {}

    def require(self, trained: Trained) -> None:
        """Raise UserError if the layout does not hold heads of this method."""
        if trained.method not in self.methods:
            held = ", ".join(METHODS[method] for method in self.methods)
            layouts = ", ".join(layouts_of(trained.method))
            allowed = f"for these heads: {layouts}" if layouts else "no engine reads these: decode them with headstart.load"
            raise UserError(f"{trained.path} holds {METHODS[trained.method]} heads; the layout {self.name} is of {held}; {allowed}")

    def lay_out(self, trained: Trained, dtype: Dtype) -> Layout:
        """Return the files. Raises UserError for heads that the layout cannot hold."""
        return Layout(*trained.cast(dtype), trained.weights_file)

    def notes(self, trained: Trained) -> list[str]:
        """Return what differs from the checkpoint, in one line each; empty: nothing does."""
        return []

    def write(self, trained: Trained, dtype: Dtype, folder: Path) -> None:
        """Write the files into an empty folder."""
        write_files(self.lay_out(trained, dtype), folder)


def embedding_unread(trained: Trained, engines: tuple[str, ...]) -> dict[str, str]:
    """Return what `Format.unread` says of heads that take a backbone's scaled embedding without a norm."""
    kind = str(trained.card["contract"]["model_type"])
    reason = f"it gives heads the embedding of a {kind} backbone without its factor (read in the source of vLLM 0.32.0)"
    return dict.fromkeys(engines, reason) if kind.startswith(SCALED) else {}


def require_sound(trained: Trained) -> None:
    """Raise UserError unless a checkpoint's tensors are those of its configuration, and layer numbers and draft vocabulary are sound."""
    config, V = trained.config, trained.card["contract"]["vocab_size"]
    DV = config.get("draft_vocab_size") or V
    if trained.method in SHAPES:
        drafted = {"d2t": [DV], "t2d": [V]} if DV < V else {}
        rows = config | {"vocab_size": DV} if trained.method == "medusa" else config
        expected = SHAPES[trained.method](rows) | drafted
        if trained.method == "mlp":
            expected |= {name: [DV, *shape[1:]] for name, shape in expected.items() if ".head." in name}
        require_shapes(trained.tensors, expected, {}, trained.path)
    require_layers(config, trained.card["contract"]["num_hidden_layers"], trained.path)
    require_vocabulary(trained.tensors, trained.path)


def formats() -> dict[str, Format]:
    """Return every layout by name."""
    found: list[Format] = []
    for one in pkgutil.iter_modules(package.__path__):
        module = f"{package.__name__}.{one.name}"
        classes = [value for value in vars(importlib.import_module(module)).values() if isinstance(value, type)]
        found += [cls() for cls in classes if issubclass(cls, Format) and cls.__module__ == module and cls is not Format]
    return {one.name: one for one in found}


def layouts_of(method: str) -> list[str]:
    """Return the names of the layouts that hold a method's heads, those of several engines first."""
    return sorted((name for name, one in formats().items() if method in one.methods), key=lambda name: -len(formats()[name].engines))


def find_format(name: str) -> Format:
    """Return a layout by name. Raises UserError naming the nearest."""
    known = formats()
    if name not in known:
        raise nearest(name, [*ENGINES, *known])
    return known[name]
