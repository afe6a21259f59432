"""What a layout of heads on disk is, and finding one: by name for an export, by its files for an import or a verification."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from inspect import isabstract
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import headstart.inference.serving.layouts as package
from headstart.heads.backbone.backbone import Backbone
from headstart.inference.serving.layouts.checkpoint import Checkpoint, Dtype
from headstart.inference.serving.layouts.files import Contents, Files
from headstart.inference.serving.layouts.parts import IDS
from headstart.inference.serving.layouts.reader.base import Reading
from headstart.support.errors import UserError

Counting = Literal["hs", "layer", "stated"]
"""What a layer id j means: the residual stream after j layers, or the output of layer j, counted from 0; or what its key says."""
SCALED = ("gemma3", "gemma4")
"""Beginnings of model types whose embedding multiplies by the square root of the width, here but not where engines embed for heads."""
DAMAGED = "it is damaged; train or fetch it again"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a backbone; 0, or None of a configuration, where they are not known."""

    width: Any = 0
    vocab: Any = 0
    layers: Any = 0
    positions: Any = 0

    @classmethod
    def of(cls, backbone: Backbone) -> Sizes:
        return cls(backbone.dim, backbone.vocab, backbone.num_layers, backbone.max_positions or 0)

    def vocabularies(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """Return the sizes of the whole vocabulary and of the drafted one, by a configuration or of the backbone."""
        whole = config.get("vocab_size") or self.vocab
        return whole, whole_number(config, "draft_vocab_size") if config.get("draft_vocab_size") else whole


@dataclass(frozen=True)
class Imported:
    """A reading as a kind of drafter, its arguments, and its tensors under Headstart's names."""

    kind: str
    arguments: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """Under the names of `Drafter.tensors`; what has no such name is under its own."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The foreign name of each tensor, where it is another."""
    notes: tuple[str, ...] = ()
    """What the user should know."""
    choice: str = ""
    """See `Reading.choice`."""


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
    def imports(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> list[Imported]:
        """Return all readings of the folder as heads of Headstart, the likeliest first. Raises UserError."""


class ServedLayout(Layout):
    """A layout that engines read, of the heads of some methods. By default it is written as the checkpoint is."""

    name: ClassVar[str]
    """Its name for ``export --to``."""
    methods: ClassVar[tuple[str, ...]]
    """Methods of `engines.METHODS` whose heads it holds."""
    engines: ClassVar[tuple[str, ...]]
    """Engines that read this layout, where they read the method."""
    copies: ClassVar[frozenset[str]] = frozenset()
    """Tensors of the backbone that files may hold and checkpoints do not."""

    # Writing.

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        """Return the engines of `engines` that do not read these heads in particular, and why."""
        return {}

    def lay_out(self, heads: Checkpoint, dtype: Dtype) -> Contents:
        """Return the files. Raises UserError for heads that the layout cannot hold."""
        return Contents(*heads.cast(dtype), heads.weights_file)

    def notes(self, heads: Checkpoint) -> list[str]:
        """Return what differs from the checkpoint, in one line each; empty: nothing does."""
        return []

    def check(self, heads: Checkpoint, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Raise UserError unless these are the tensors of the configuration, and layer numbers and draft vocabulary are sound."""
        contract = heads.card["contract"]
        require_layers(config, contract["num_hidden_layers"], heads.path)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        positions = (config.get("transformer_layer_config") or config).get("max_position_embeddings") or 0
        sizes = Sizes(contract["hidden_size"], contract["vocab_size"], contract["num_hidden_layers"], positions)
        require_shapes(self.stated(Files(heads.path, heads.folder, config, shapes, loaded=tensors), sizes), self.copies, heads.path)
        require_vocabulary(tensors, heads.path)

    def write(self, heads: Checkpoint, dtype: Dtype, folder: Path) -> None:
        """Write the files into an empty folder, checked. Raises UserError."""
        contents = self.lay_out(heads, dtype)
        self.check(heads, contents.config, contents.tensors)
        contents.write(folder)

    # Reading.

    @abstractmethod
    def read(self, files: Files, on: Sizes, counting: Counting | None = None) -> list[Reading]:
        """Return the ways to read the folder for a backbone of these sizes, the likeliest first; ``counting`` None: all.

        Raises UserError for what is not read, DamagedError for files that contradict each other or the backbone.
        """

    def shaped(self, reading: Reading, on: Sizes) -> Reading:
        """Return the reading with the shapes that its tensors should have, and that of its decoder layers."""
        return reading

    def stated(self, files: Files, on: Sizes) -> Reading:
        """Return the reading that engines make of the folder, with shapes."""
        return self.shaped(self.read(files, on, "stated")[0], on)


class RenamedLayout(ServedLayout):
    """A layout of which each reading is heads of Headstart under other names."""

    @abstractmethod
    def imported(self, reading: Reading, files: Files, backbone: Backbone) -> Imported:
        """Return a reading as heads of Headstart. Raises UserError for what these cannot compute."""

    def imports(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> list[Imported]:
        readings = self.read(files, Sizes.of(backbone), counting)
        return [replace(self.imported(one, files, backbone), choice=one.choice) for one in readings]


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


def recognise(files: Files) -> Layout | None:
    """Return the layout of a folder by its tensors."""
    return next((one for one in layouts() if one.order and one.recognises(files)), None)


def recognise_served(files: Files) -> ServedLayout | None:
    """Return the layout that engines read in a folder: by its configuration if that says it, else by its tensors."""
    asked = [one for one in layouts() if one.order and isinstance(one, ServedLayout)]
    return next((one for one in asked if one.states(files.config)), None) or next((one for one in asked if one.recognises(files)), None)


# Checks.


def require_shapes(reading: Reading, copies: frozenset[str], source: str) -> None:
    """Raise UserError naming the first contradiction, or tensor that is missing, unexpected or of another shape than config.json says."""
    for remark in reading.remarks:
        raise UserError(f"{source}: {remark}: {DAMAGED}")
    for name, shape in reading.shapes.items():
        if name not in reading.tensors and name not in copies:
            raise UserError(f"{source} lacks tensor {name} {list(shape)}, which config.json calls for: {DAMAGED}")
    for name, tensor in reading.tensors.items():
        if name not in reading.shapes:
            raise UserError(f"{source} holds tensor {name}, for which config.json has no place: {DAMAGED}")
        if tuple(tensor.shape) != reading.shapes[name]:
            found, said = list(tensor.shape), list(reading.shapes[name])
            raise UserError(f"tensor {name} of {source} is {found}, config.json says {said}: {DAMAGED}")


def require_layers(config: Mapping[str, Any], num_layers: int, source: str) -> None:
    """Hold that both ways of counting the tapped layers agree, and that the backbone has these layers.

    vLLM's own key counts the layers that the residual stream has passed, the others the layer whose output it is: one less.
    """
    taps = config.get(IDS)
    if taps is None:
        return
    for other in ((config.get("eagle_config") or {}).get(IDS), (config.get("dflash_config") or {}).get("target_layer_ids")):
        if other is not None and other != [tap - 1 for tap in taps]:
            raise UserError(f"config.json of {source} states the layers {taps} and {other}, which are not one less each: it is damaged")
    if taps != sorted(set(taps)) or not taps or taps[0] < 0 or taps[-1] > num_layers:
        raise UserError(f"config.json of {source} states the layers {taps}; they ascend from 0 to {num_layers}, the layers of the backbone")


def require_vocabulary(tensors: Mapping[str, Tensor], source: str) -> None:
    """Hold that ``d2t`` (offsets) and ``t2d`` (which tokens are drafted) describe the same draft vocabulary."""
    if "d2t" in tensors:
        drafted = tensors["t2d"].nonzero().flatten()
        if tensors["d2t"].dtype != torch.int64 or not torch.equal(drafted - torch.arange(len(drafted)), tensors["d2t"]):
            raise UserError(f"d2t and t2d of {source} disagree about the draft vocabulary: {DAMAGED}")


def whole_number(config: Mapping[str, Any], key: str, path: str = "") -> int:
    """Return a positive whole number of a configuration. Raises UserError if it is absent or none."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{path}{': ' if path else ''}{key} in config.json is a whole number of at least 1; got {value!r}")
    return value


# What layouts share.


def unscaled_embedding(heads: Checkpoint, engines: tuple[str, ...]) -> dict[str, str]:
    """Return what `Layout.unread` says of heads that take a backbone's scaled embedding without a norm."""
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
