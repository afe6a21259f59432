"""What a layout of heads on disk is: how a folder of it is recognised, read for a backbone, and written for an engine.

What is written are heads as a checkpoint of Headstart stores them: read without their backbone wherever that is possible.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from headstart.heads.backbone.adapter import ADAPTER
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.head_only import load_head_only
from headstart.heads.checkpoint import AGAIN, check_contract, checked_weights, read_metadata, require_sizes
from headstart.heads.draft_model import DRAFT_DEPTH
from headstart.serving.layouts.files import Files, write_folder
from headstart.support.devices import NAMES, torch_dtype
from headstart.support.errors import UserError
from headstart.support.hub import resolve
from headstart.support.json_text import read_json

Dtype = Literal["auto", "fp32", "bf16", "fp16"]
METHODS = {
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "eagle": "EAGLE-1",
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "domino": "Domino",
    "mtp": "MTP (in the backbone)",
    "draft_model": "draft model",
    "pard": "parallel draft model (PARD)",
    "medusa": "Medusa",
    "mlp": "MLP speculator",
    "hydra": "Hydra",
}
"""Methods as engines tell them apart -> their names; `method_of` gives that of heads."""


@dataclass(frozen=True)
class Checkpoint:
    """A heads checkpoint and the backbone that it is exported for."""

    path: str
    """Folder or hub id, as given."""
    folder: Path
    card: dict[str, Any]
    """``headstart.json``."""
    method: str
    """See `METHODS`, or the kind of code of the user's own."""
    config: dict[str, Any]
    """``config.json``."""
    tensors: dict[str, Tensor]
    backbone: str
    """Folder or hub id of the backbone."""
    served: str
    """Folder or hub id from which engines load it: another one if an adapter is merged into it."""
    dtype: Dtype = "auto"
    """What the weights were cast to."""

    @property
    def depth(self) -> int:
        """How many tokens the heads draft beyond the root; a block head its whole block, since its drafts depend on the block's length."""
        arguments = self.card["arguments"]
        if self.card["kind"] == "block":
            return int(arguments["depth"])
        least = DRAFT_DEPTH if self.method == "draft_model" else 1
        return int(arguments.get("draft_depth") or max(arguments["depth"], least))

    @property
    def adapter(self) -> Path | None:
        """The folder of the backbone's adapter that the heads were trained with, if any."""
        return self.folder / ADAPTER if self.card["contract"].get("adapter") is not None else None

    @property
    def weights_file(self) -> str:
        return str(self.card["weights"]["file"])

    def load_backbone(self) -> Backbone:
        """Load the backbone in fp32 on the CPU, without its adapter. Raises UserError, also for a backbone of another shape."""
        backbone = load_backbone(self.backbone, dtype="fp32", device="cpu")
        check_contract(self.path, self.card, backbone, allow_finetuned=True)
        return backbone

    @cached_property
    def ends(self) -> Backbone:
        """The backbone's embedding and output layer; see `load_ends`."""
        ends = load_ends(self.backbone)
        check_contract(self.path, self.card, ends, allow_finetuned=True)
        return ends

    def cast(self, dtype: Dtype) -> Checkpoint:
        """Return the heads with floating-point numbers in ``dtype``; auto: as they are."""
        wanted = torch_dtype(dtype)
        if wanted is None:
            return self
        stated = {key: NAMES[dtype] for key in ("dtype", "torch_dtype") if key in self.config}
        tensors = {name: x.to(wanted) if x.is_floating_point() else x for name, x in self.tensors.items()}
        return replace(self, config=self.config | stated, tensors=tensors, dtype=dtype)


def method_of(kind: str, arguments: dict[str, object]) -> str:
    """Return the method of heads of a kind, with the arguments that their checkpoint states, as engines tell methods apart."""
    if kind == "block":
        second = "dflash2" if arguments.get("convolution") else "dflash"
        methods = {"none": second, "selector": "dflash2", "markov": "dspark", "recurrent": "domino"}
        return methods[str(arguments.get("correction", "markov"))]
    return "pard" if kind == "draft_model" and arguments.get("parallel") else kind


def read_checkpoint(path: str, backbone: str | None = None) -> Checkpoint:
    """Read heads; ``backbone``: from where engines load the backbone (None: from where it was trained).

    Raises UserError if the heads are missing or damaged, or if the backbone given is missing or has other sizes than theirs.
    """
    folder, card = read_metadata(path)
    name = resolve(backbone or str(card["backbone"]))
    if backbone is not None:
        require_sizes(path, name)
    config, tensors = read_json(folder / "config.json", AGAIN), load_file(checked_weights(path, folder, card))
    return Checkpoint(path, folder, card, method_of(card["kind"], card["arguments"]), config, tensors, name, name)


def load_ends(name: str) -> Backbone:
    """Load a backbone's embedding and output layer in fp32, which is all that heads draft with after states that are given.

    The whole backbone is loaded where these cannot be read alone, as of a GGUF file. Raises UserError.
    """
    if find_gguf(name) is None:
        try:
            return load_head_only(name, dtype="fp32", device="cpu")
        except UserError:
            pass  # loading it whole works, or says why not
    return load_backbone(name, dtype="fp32", device="cpu")


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
