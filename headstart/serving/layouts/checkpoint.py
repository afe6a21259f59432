"""Heads as a checkpoint of Headstart stores them, for export and publication: read without their backbone wherever that is possible."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from headstart.heads.backbone.adapter import ADAPTER
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.head_only import load_head_only
from headstart.heads.checkpoint import AGAIN, check_contract, checked_weights, read_metadata, require_sizes
from headstart.heads.draft_model import DRAFT_DEPTH
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
