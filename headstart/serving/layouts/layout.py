"""What a layout of heads on disk is, and finding one: by name for an export, by its files for an import or a verification."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import isabstract
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

import headstart.serving.layouts as package
from headstart.heads.backbone.backbone import Backbone
from headstart.serving.layouts.checkpoint import Checkpoint, Dtype
from headstart.serving.layouts.files import Contents, Files
from headstart.support.errors import UserError

Counting = Literal["hs", "layer", "stated"]
"""What a layer id j means: the residual stream after j layers, or the output of layer j, counted from 0; or what its key says."""
SCALED = ("gemma3", "gemma4")
"""Beginnings of model types whose embedding multiplies by the square root of the width, here but not where engines embed for heads."""


class Sizes(NamedTuple):
    """Sizes of a backbone, as far as they are known."""

    width: Any = None
    vocab: Any = None
    layers: Any = None


@dataclass(frozen=True)
class Heads:
    """What a folder holds: a kind of drafter, its arguments, and its tensors."""

    kind: str
    arguments: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """Under the names of `Drafter.tensors`; what has no such name is under its own."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The foreign name of each tensor, where it is another."""
    notes: tuple[str, ...] = ()
    """What the user should know."""
    remarks: tuple[str, ...] = ()
    """Contradictions in the files: some engine reads other heads than these."""
    choice: str = ""
    """What distinguishes these from other heads that the folder may hold."""


class Layout(ABC):
    """A layout of heads on disk, which can be imported."""

    title: ClassVar[str]
    order: ClassVar[int] = 0
    """When it is asked whether a folder is its own; 0: never."""

    @abstractmethod
    def recognises(self, files: Files) -> bool:
        """Return whether a folder has this layout, by its tensors."""

    def states(self, config: Mapping[str, Any]) -> bool:
        """Return whether a configuration says that a folder has this layout, whatever its tensors."""
        return False

    def sizes(self, files: Files) -> Sizes:
        """Return the sizes of the backbone that the heads are for, as far as the configuration says."""
        config = {**files.config, **(files.config.get("transformer_layer_config") or {})}
        width = files.config.get("target_hidden_size") or config.get("hidden_size", config.get("emb_dim"))
        return Sizes(width, (files.shapes.get("t2d") or (config.get("vocab_size"),))[0], config.get("num_target_layers"))

    @abstractmethod
    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> list[Heads]:
        """Return what the folder may hold for this backbone, the likeliest first; of ``stated`` the first is what engines read.

        Raises UserError for heads that Headstart does not compute, DamagedError for files that contradict each other or the backbone.
        """


class ServedLayout(Layout):
    """A layout that engines read, of the heads of some methods. By default it is written as the checkpoint is."""

    name: ClassVar[str]
    """Its name for ``export --to``."""
    methods: ClassVar[tuple[str, ...]]
    """Methods of `engines.METHODS` whose heads it holds."""
    engines: ClassVar[tuple[str, ...]]
    """Engines that read this layout, where they read the method."""

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        """Return the engines of `engines` that do not read these heads in particular, and why."""
        return {}

    def lay_out(self, heads: Checkpoint, dtype: Dtype) -> Contents:
        """Return the files. Raises UserError for heads that the layout cannot hold."""
        return Contents(*heads.cast(dtype), heads.weights_file)

    def notes(self, heads: Checkpoint) -> list[str]:
        """Return what differs from the checkpoint, in one line each; empty: nothing does."""
        return []

    def write(self, heads: Checkpoint, dtype: Dtype, folder: Path) -> None:
        """Write the files into an empty folder. Raises UserError."""
        self.lay_out(heads, dtype).write(folder)


def layouts() -> list[Layout]:
    """Return every layout, in the order in which they are asked for a folder."""
    found: list[Layout] = []
    for one in pkgutil.iter_modules(package.__path__):
        module = f"{package.__name__}.{one.name}"
        classes = [value for value in vars(importlib.import_module(module)).values() if isinstance(value, type)]
        found += [cls() for cls in classes if issubclass(cls, Layout) and cls.__module__ == module and not isabstract(cls)]
    return sorted(found, key=lambda one: one.order)


def layouts_of(method: str | None = None) -> list[ServedLayout]:
    """Return the layouts that can be written, or those that hold a method's heads, the checkpoint's own first: most engines read it."""
    held = [one for one in layouts() if isinstance(one, ServedLayout) and (method is None or method in one.methods)]
    return sorted(held, key=lambda one: -len(one.engines))


def recognise(files: Files) -> Layout:
    """Return the layout of a folder: by its configuration if that says it, else by its tensors. Raises UserError if none is known."""
    asked = [one for one in layouts() if one.order]
    found = [one for one in asked if one.states(files.config)] or [one for one in asked if one.recognises(files)]
    if not found:
        some, known = ", ".join(sorted(files.shapes)[:3]), ", ".join(one.title for one in asked)
        raise UserError(f"{files.path} has no known layout (tensors {some}, ...); known: {known}")
    return found[0]


def whole_number(config: Mapping[str, Any], key: str, path: str) -> int:
    """Return a positive whole number of a configuration. Raises UserError if it is absent or none."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{path}: {key} in config.json is a whole number of at least 1; got {value!r}")
    return value


# What layouts share.


def unscaled_embedding(heads: Checkpoint, engines: tuple[str, ...]) -> dict[str, str]:
    """Return what `ServedLayout.unread` says of heads that take a backbone's scaled embedding without a norm."""
    kind = str(heads.card["contract"]["model_type"])
    reason = f"it gives heads the embedding of a {kind} backbone without its factor (read in the source of vLLM 0.32.0)"
    return dict.fromkeys(engines, reason) if kind.startswith(SCALED) else {}


def without_copies(tensors: Mapping[str, Tensor], backbone: Backbone, path: str, head: bool = True) -> tuple[dict[str, Tensor], list[str]]:
    """Drop copies of the backbone's embedding and, with ``head``, of its output layer; returns the others and notes.

    Raises UserError if they differ from the backbone's, which heads here share, by more than rounding to half precision.
    """
    kept, notes = dict(tensors), []
    shared = [("embed_tokens.weight", "embedding", backbone.embed), ("lm_head.weight", "output layer", backbone.unembed)]
    for name, what, layer in shared[: 2 if head else 1]:
        if name not in kept:
            continue
        copy, ours = kept.pop(name), layer.weight.detach().float()
        if copy.shape != ours.shape or not torch.allclose(copy.to(ours.device, torch.float32), ours, rtol=1e-2, atol=1e-3):
            raise UserError(
                f"{path} has {name} {list(copy.shape)} of its own, which is not the backbone's {list(ours.shape)}; "
                f"heads here share the backbone's {what}: give the backbone that they were trained on"
            )
        notes.append(f"{name} is a copy of the backbone's and left out")
    return kept, notes
