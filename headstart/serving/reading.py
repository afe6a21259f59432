"""A folder of heads, by any trainer, as a drafter of Headstart: recognised, held to the backbone's sizes, and built strictly."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import load_config
from headstart.heads.base import Drafter
from headstart.heads.checkpoint import METADATA, check_contract, read_drafter, read_metadata
from headstart.heads.methods import construct_drafter, require_weights
from headstart.serving.layouts.files import DamagedError, Files
from headstart.serving.layouts.layout import Counting, Heads, Layout, Sizes, recognise
from headstart.support.errors import UserError

DERIVED = "rotary_emb.inv_freq"
"""Ending of buffers that follow from the configuration."""


class Saved(Layout):
    """Heads that Headstart saved, or exported with their ``headstart.json``."""

    title = "Headstart"

    def recognises(self, files: Files) -> bool:
        return (files.folder / METADATA).is_file()

    def sizes(self, files: Files) -> Sizes:
        contract = read_metadata(files.folder)[1]["contract"]
        return Sizes(contract.get("hidden_size"), contract.get("vocab_size"), contract.get("num_hidden_layers"))

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> list[Heads]:
        folder, card = read_metadata(files.folder)
        check_contract(files.path, card, backbone, allow_finetuned=True)
        drafter = read_drafter(files.path, folder, card, backbone)  # checks the files, and adds the heads' own adapter
        tensors = files.read() if card["weights"].get("adapter") is None else drafter.tensors()
        return [Heads(card["kind"], card["arguments"], tensors, notes=(f"saved by Headstart, trained on {card['backbone']}",))]


def layout_of(files: Files) -> Layout:
    """Return the layout of the files. Raises UserError if none is known."""
    return Saved() if Saved().recognises(files) else recognise(files)


def require_fit(files: Files, layout: Layout, backbone: str, trust_remote_code: bool) -> None:
    """Raise UserError, naming both, if the heads are for a backbone of other sizes; only the backbone's configuration is read."""
    try:
        config = load_config(backbone, trust_remote_code=trust_remote_code).get_text_config()
    except UserError:
        return  # loading the backbone says why
    sizes = layout.sizes(files)
    given = config.to_dict()
    keys = {"width": "hidden_size", "vocabulary": "vocab_size", "layers": "num_hidden_layers"}
    for (what, key), theirs in zip(keys.items(), (sizes.width, sizes.vocab, sizes.layers), strict=True):
        ours = given.get(key)
        if theirs and ours and theirs != ours:
            raise UserError(
                f"{files.path} ({layout.title}) is for a backbone of {what} {theirs}; {backbone} has {what} {ours}: "
                f"give the backbone that they were trained on{_named(files)}"
            )


def _named(files: Files) -> str:
    """Name the backbone that a configuration states, if any."""
    verifier = ((files.config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    stated = files.config.get("base_model_name_or_path") or verifier
    return f", {stated}" if isinstance(stated, str) and stated else ""


def build(heads: Heads, backbone: Backbone, path: str) -> Drafter:
    """Return the drafter with these weights, in fp32. Raises DamagedError naming the first tensor that does not fit."""
    drafter = construct_drafter(heads.kind, backbone, heads.arguments)
    expected = drafter.tensors()
    found = {name: tensor for name, tensor in heads.tensors.items() if not name.endswith(DERIVED)}
    for name, tensor in expected.items():
        theirs = heads.names.get(name, name)
        called = theirs if theirs == name else f"{theirs} ({name} here)"
        if name not in found:
            raise DamagedError(f"{path} lacks the tensor {called} {list(tensor.shape)} of {heads.kind} heads{_near(found, expected)}")
        if found[name].shape != tensor.shape:
            raise DamagedError(
                f"{path}: tensor {called} is {list(found[name].shape)}; with this config.json and backbone it is {list(tensor.shape)}"
            )
    for name, tensor in found.items():
        if name not in expected:
            theirs = heads.names.get(name, name)
            raise DamagedError(
                f"{path} has a tensor {theirs} {list(tensor.shape)}, which {heads.kind} heads of its config.json do not have"
            )
    drafter.load_tensors(found)
    require_weights(drafter, path)
    return drafter.eval().requires_grad_(False)


def _near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """Name a tensor that is there instead of a missing one."""
    odd = next((name for name in found if name not in expected), None)
    return "" if odd is None else f"; it has {odd} {list(found[odd].shape)}, which they do not have"


def stored_dtype(heads: Heads) -> torch.dtype:
    """Return the widest floating-point dtype of the tensors."""
    dtypes = {tensor.dtype for tensor in heads.tensors.values() if tensor.is_floating_point()}
    widest = torch.float16 if dtypes == {torch.float16} else torch.bfloat16
    for dtype in dtypes:
        widest = dtype if dtypes == {dtype} else torch.promote_types(widest, dtype)
    return widest


def read_exported(files: Files, backbone: Backbone) -> Heads:
    """Return what engines read in a folder. Raises UserError for what Headstart does not compute or does not fit the backbone."""
    layout = recognise(files)
    require_fit(files, layout, backbone.name, trust_remote_code=False)
    return layout.parse(files, backbone, "stated")[0]


def round_as_stored(drafter: Drafter, stored: Heads) -> None:
    """Round the weights of a drafter in fp32 to the precision in which a folder stores them."""
    drafter.to(stored_dtype(stored)).to(torch.float32)


def original_of(path: str, backbone: Backbone, allow_finetuned: bool) -> Drafter:
    """Return trained heads in fp32, without their adapter on the backbone, which has no part in a draft after states that are given."""
    folder, card = read_metadata(path)
    check_contract(path, card, backbone, allow_finetuned)
    return read_drafter(path, folder, card, backbone).eval().requires_grad_(False)
