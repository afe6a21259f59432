"""What an import makes of a foreign folder: a kind of drafter, its arguments, and its tensors under Headstart's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.serving.imports.foreign import Foreign
from headstart.support.errors import UserError

Counting = Literal["hs", "layer"]
"""What a layer id j means: the residual stream after j layers, or the output of layer j, counted from 0."""
DERIVED = "rotary_emb.inv_freq"
"""Ending of buffers that follow from the configuration."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the backbone that heads were trained for; None where a layout does not say."""

    width: int | None = None
    vocab: int | None = None
    layers: int | None = None


@dataclass(frozen=True)
class Reading:
    """One way to read a folder."""

    kind: str
    arguments: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """Under the names of `Drafter.tensors`; what has no such name is under its own."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The foreign name of each tensor, where it is another."""
    notes: tuple[str, ...] = ()
    """What the user should know."""
    choice: str = ""
    """What distinguishes this reading from the others of the folder, if there are several."""


class Source(Protocol):
    """A module that reads one layout."""

    NAME: str

    def recognises(self, foreign: Foreign) -> bool:
        """Return whether the folder has this layout."""
        ...

    def sizes(self, foreign: Foreign) -> Sizes:
        """Return the sizes of the backbone that the heads are for."""
        ...

    def readings(self, foreign: Foreign, backbone: Backbone, counting: Counting | None) -> Sequence[Reading]:
        """Return the ways to read the folder, the likeliest first. Raises UserError for what Headstart's heads cannot compute."""
        ...


def width_of(foreign: Foreign, name: str, axis: int = 0) -> int | None:
    """Return a size of a tensor's shape; None if there is no such tensor."""
    shape = foreign.shapes.get(name, ())
    return shape[axis] if len(shape) > axis else None


def without_copies(tensors: Mapping[str, Tensor], backbone: Backbone, path: str, head: bool = True) -> tuple[dict[str, Tensor], list[str]]:
    """Drop copies of the backbone's embedding and, with ``head``, of its output layer; returns the others and notes.

    Raises UserError if they differ from the backbone's, which heads here share.
    """
    kept, notes = dict(tensors), []
    for name, what, layer in (
        ("embed_tokens.weight", "embedding", backbone.embed),
        ("lm_head.weight", "output layer", backbone.unembed if head else None),
    ):
        if layer is None or name not in kept:
            continue
        copy = kept.pop(name)
        if not _same(copy, layer.weight):
            raise UserError(
                f"{path} has {name} {list(copy.shape)} of its own, which is not the backbone's {list(layer.weight.shape)}; "
                f"heads here share the backbone's {what}: give the backbone that they were trained on"
            )
        notes.append(f"{name} is a copy of the backbone's and left out")
    return kept, notes


def _same(copy: Tensor, ours: Tensor) -> bool:
    """Compare weights up to rounding to half precision."""
    if copy.shape != ours.shape:
        return False
    return torch.allclose(copy.to(ours.device, torch.float32), ours.detach().float(), rtol=1e-2, atol=1e-3)


def whole_number(config: Mapping[str, Any], key: str, path: str) -> int | None:
    """Return a positive whole number of a configuration; None if it has none. Raises UserError for anything else."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{path}: {key} in config.json is a whole number of at least 1; got {value!r}")
    return value
