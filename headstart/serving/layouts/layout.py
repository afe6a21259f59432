"""What a layout of heads on disk is: how a folder of it is recognised, read for a backbone, and written for an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.serving.layouts.checkpoint import Checkpoint
from headstart.serving.layouts.files import Files, write_folder
from headstart.support.errors import UserError

Counting = Literal["hs", "layer", "stated"]
"""What a layer id j means: the residual stream after j layers, or the output of layer j, counted from 0; or what its key says."""
SCALED = ("gemma3", "gemma4")
"""Beginnings of model types whose embedding multiplies by the square root of the width, here but not where engines embed for heads."""


class Choice(NamedTuple):
    """One way to read what files leave open, and the arguments and tensors that follow from it."""

    words: str
    arguments: Mapping[str, Any] = {}
    tensors: Mapping[str, Tensor] = {}


@dataclass(frozen=True)
class Heads:
    """What a folder holds: a kind of drafter, its arguments, and its tensors."""

    kind: str
    arguments: dict[str, Any]
    tensors: dict[str, Tensor]
    """Under the names of `Drafter.tensors`; what has no such name is under its own."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The foreign name of each tensor, where it is another."""
    notes: tuple[str, ...] = ()
    """What the user should know."""
    remarks: tuple[str, ...] = ()
    """Contradictions in the files: some engine reads other heads than these."""
    open: tuple[list[Choice], ...] = ()
    """What the files leave open. Of each list the first is what engines read."""
    choice: str = ""
    """What distinguishes these from other heads that the folder may hold."""

    def plus(
        self,
        arguments: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        notes: Iterable[str] = (),
        remarks: Iterable[str] = (),
        open: Iterable[list[Choice]] = (),
    ) -> Heads:
        """Return the heads with more of each; arguments and tensors of a name that they have replace those."""
        return replace(
            self, arguments={**self.arguments, **(arguments or {})}, tensors={**self.tensors, **(tensors or {})},
            notes=(*self.notes, *notes), remarks=(*self.remarks, *remarks), open=(*self.open, *open),
        )  # fmt: skip

    def without(self, names: Iterable[str]) -> Heads:
        """Return the heads without tensors of these names."""
        return replace(self, tensors={name: tensor for name, tensor in self.tensors.items() if name not in names})

    def readings(self) -> list[Heads]:
        """Return the heads for every combination of choices, the engines' own first."""
        found = []
        for ways in product(*self.open):
            heads = replace(self, open=(), choice="; ".join(way.words for way in ways if way.words))
            found.append(reduce(lambda heads, way: heads.plus(way.arguments, way.tensors), ways, heads))
        return found


class Layout(ABC):
    """A layout of heads on disk. It is imported, and written for engines if it has methods."""

    title: ClassVar[str]
    name: ClassVar[str] = ""
    """Its name for ``export --to``."""
    methods: ClassVar[tuple[str, ...]] = ()
    """Methods of `engines.METHODS` whose heads are written in it."""
    engines: ClassVar[tuple[str, ...]] = ()
    """Engines that read this layout, where they read the method."""

    @abstractmethod
    def recognises(self, files: Files) -> bool:
        """Return whether a folder has this layout, by its configuration or its tensors."""

    def sizes(self, files: Files) -> dict[str, Any]:
        """Return the sizes of the backbone that the heads are for, as far as the configuration says, by their names in ``config.json``."""
        config = {**files.config, **(files.config.get("transformer_layer_config") or {})}
        return {
            "hidden_size": files.config.get("target_hidden_size") or config.get("hidden_size", config.get("emb_dim")),
            "vocab_size": (files.shapes.get("t2d") or (config.get("vocab_size"),))[0],
            "num_hidden_layers": config.get("num_target_layers"),
        }

    @abstractmethod
    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        """Return what the folder holds for this backbone; with ``stated`` layer ids are counted as engines do.

        Raises UserError for heads that Headstart does not compute, DamagedError for files that contradict each other or the backbone.
        """

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        """Return the engines of `engines` that do not read these heads in particular, and why."""
        return {}

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        """Write the files into an empty folder, as the checkpoint is by default, and return what differs from it, in one line each.

        Raises UserError for heads that the layout cannot hold.
        """
        write_folder(folder, heads.config, heads.tensors, heads.weights_file)
        return []


# What layouts share.


def whole_number(config: Mapping[str, Any], key: str, path: str) -> int:
    """Return a positive whole number of a configuration. Raises UserError if it is absent or none."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{path}: {key} in config.json is a whole number of at least 1; got {value!r}")
    return value


def unscaled_embedding(heads: Checkpoint, engines: tuple[str, ...]) -> dict[str, str]:
    """Return what `Layout.unread` says of heads that take a backbone's scaled embedding without a norm."""
    kind = str(heads.card["contract"]["model_type"])
    reason = f"it gives heads the embedding of a {kind} backbone without its factor (read in the source of vLLM 0.32.0)"
    return dict.fromkeys(engines, reason) if kind.startswith(SCALED) else {}


def without_copies(heads: Heads, backbone: Backbone, path: str, *names: str) -> Heads:
    """Return the heads without copies of the backbone's embedding and output layer, as far as they are named.

    Raises UserError if they differ from the backbone's, which heads here share, by more than rounding to half precision.
    """
    shared = {"embed_tokens.weight": ("embedding", backbone.embed), "lm_head.weight": ("output layer", backbone.unembed)}
    copies = [name for name in names if name in heads.tensors]
    for name in copies:
        what, layer = shared[name]
        copy, ours = heads.tensors[name], layer.weight.detach().float()
        if copy.shape != ours.shape or not torch.allclose(copy.to(ours.device, torch.float32), ours, rtol=1e-2, atol=1e-3):
            raise UserError(
                f"{path} has {name} {list(copy.shape)} of its own, which is not the backbone's {list(ours.shape)}; "
                f"heads here share the backbone's {what}: give the backbone that they were trained on"
            )
    return heads.without(copies).plus(notes=[f"{name} is a copy of the backbone's and left out" for name in copies])
