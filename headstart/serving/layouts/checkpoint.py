"""Heads as a checkpoint of Headstart stores them, for export and publication: read without their backbone wherever that is possible."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headstart.heads.backbone.adapter import ADAPTER
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.backbone.gguf_config import read_gguf_config
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.head_only import load_head_only
from headstart.heads.backbone.shipped import resolve
from headstart.heads.checkpoint import AGAIN, METADATA, check_contract, read_metadata
from headstart.heads.draft_model import DRAFT_DEPTH
from headstart.support.devices import NAMES, torch_dtype
from headstart.support.errors import UserError
from headstart.support.files import file_hash
from headstart.support.hub import find_folder
from headstart.support.json_text import read_json

Dtype = Literal["auto", "fp32", "bf16", "fp16"]
METHODS = {
    "eagle3": "EAGLE-3",
    "eagle": "EAGLE-1",
    "dflash": "DFlash",
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
    """See `METHODS`."""
    config: dict[str, Any]
    """``config.json``."""
    tensors: dict[str, Tensor]
    backbone: str
    """Folder or hub id of the backbone."""
    served: str
    """Folder or hub id from which engines load it: another one if an adapter is merged into it."""

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

    @cached_property
    def backbone_config(self) -> dict[str, Any]:
        """The backbone's ``config.json``. Raises UserError if it cannot be found or is not the backbone the heads were trained on."""
        return backbone_config(self.backbone, self.path, self.card["contract"])

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

    def cast(self, dtype: Dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return configuration and tensors with floating-point numbers in ``dtype``; auto: as they are."""
        wanted = torch_dtype(dtype)
        if wanted is None:
            return dict(self.config), dict(self.tensors)
        stated = {key: NAMES[dtype] for key in ("dtype", "torch_dtype") if key in self.config}
        return self.config | stated, {name: x.to(wanted) if x.is_floating_point() else x for name, x in self.tensors.items()}


def method_of(kind: str, arguments: dict[str, object]) -> str:
    """Return the method of heads of a kind, with the arguments that their checkpoint states, as engines tell methods apart."""
    if kind == "block":
        return {"none": "dflash", "markov": "dspark", "recurrent": "domino"}[str(arguments.get("correction", "markov"))]
    return "pard" if kind == "draft_model" and arguments.get("parallel") else kind


def read_checkpoint(path: str, backbone: str | None) -> Checkpoint:
    """Read heads; ``backbone``: from where engines load the backbone (None: from where it was trained).

    Raises UserError if the heads are missing, damaged or of no method that an engine reads, or if the backbone given is missing or not the
    one that they were trained on.
    """
    folder, card = read_metadata(path)
    name = resolve(backbone or str(card["backbone"]))
    if not name:
        raise UserError(f"{path} does not say which backbone it was trained on; give --backbone")
    if backbone is not None:
        backbone_config(name, path, card["contract"])
    method = method_of(card["kind"], card["arguments"])
    if method not in METHODS:
        raise UserError(f"{path} holds heads of kind {method!r}, which is code of your own; engines read {', '.join(METHODS)}")
    config, tensors = _files(path, folder, card)
    return Checkpoint(path, folder, card, method, config, tensors, name, name)


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


def backbone_config(name: str, heads: str, contract: dict[str, Any]) -> dict[str, Any]:
    """Return a backbone's ``config.json``, or what the header of a GGUF file states.

    Raises UserError if there is none, or if its sizes are not those that the heads state.
    """
    if (gguf := find_gguf(name)) is not None:
        config = read_gguf_config(gguf).to_dict()
    else:
        file = find_folder(name, "backbone", ["config.json"]) / "config.json"
        if not file.is_file():
            raise UserError(f"no backbone at {name!r}: the folder has no config.json; give a folder or a hub id of a model")
        config = read_json(file, "fetch the backbone again")
    stated = config.get("text_config", config)
    spelled = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "vocab_size": "vocab_size"}
    for key, other in spelled.items():
        found = stated.get(key, stated.get(other, contract[key]))
        if found != contract[key]:
            trained = f"{heads} was trained on a backbone with {key} {contract[key]}"
            raise UserError(f"{trained}; {name} has {found}: give the one it was trained on with --backbone")
    return config


def _files(path: str, folder: Path, card: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read configuration and weights as they are stored."""
    file = folder / card["weights"]["file"]
    if not file.is_file() or file_hash(file) != card["weights"]["sha256"]:
        fault = "is truncated or changed" if file.is_file() else "is missing"
        raise UserError(f"{file} {fault} (see the hash in {METADATA}); train or fetch the heads again")
    try:
        return read_json(folder / "config.json", AGAIN), load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())[:200]}; train or fetch the heads again") from None
