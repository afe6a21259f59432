"""A folder of heads, by any trainer, as a drafter of Headstart: recognised, held to the backbone's sizes, and built strictly."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import load_config
from headstart.heads.base import Drafter
from headstart.heads.card import METADATA
from headstart.heads.checkpoint import check_contract, read_drafter, read_metadata
from headstart.heads.methods import construct_drafter, require_weights
from headstart.serving.layouts.block import Block, DflashHf
from headstart.serving.layouts.eagle3 import Eagle, Eagle3, OpenVino, Peagle
from headstart.serving.layouts.eagle4 import Eagle4
from headstart.serving.layouts.files import DamagedError, Files
from headstart.serving.layouts.layout import Counting, Heads, Layout
from headstart.serving.layouts.llamacpp import LlamaCpp
from headstart.serving.layouts.llamacpp_block import LlamaCppBlock
from headstart.serving.layouts.medusa import Hydra, Medusa, MlpSpeculator
from headstart.serving.layouts.mtp import DraftModel, MtpStitch
from headstart.serving.layouts.speculators import Speculators
from headstart.support.errors import UserError

LAYOUTS: tuple[Layout, ...] = (
    Medusa(), Peagle(), Speculators(), Hydra(), MlpSpeculator(), Block(), DflashHf(), Eagle4(), Eagle3(), Eagle(), MtpStitch(),
    DraftModel(), OpenVino(), LlamaCpp(), LlamaCppBlock(),
)  # fmt: skip
"""Every layout, in the order in which they are asked whether a folder is theirs."""
SIZES = {"hidden_size": "width", "vocab_size": "vocabulary", "num_hidden_layers": "layers"}
DERIVED = "rotary_emb.inv_freq"
"""Ending of buffers that follow from the configuration."""


def layouts_of(method: str | None = None) -> list[Layout]:
    """Return the layouts that are written, or those that hold a method's heads, the checkpoint's own first: most engines read it."""
    held = [layout for layout in LAYOUTS if layout.methods and (method is None or method in layout.methods)]
    return sorted(held, key=lambda layout: -len(layout.engines))


def recognise(files: Files) -> Layout:
    """Return the layout in which engines read a folder. Raises UserError if none is known."""
    found = next((layout for layout in LAYOUTS if layout.recognises(files)), None)
    if found is None:
        some, known = ", ".join(sorted(files.shapes)[:3]), ", ".join(dict.fromkeys(layout.title for layout in LAYOUTS))
        raise UserError(f"{files.path} has no known layout (tensors {some}, ...); known: {known}")
    return found


class Saved(Layout):
    """Heads that Headstart saved, or exported with their ``headstart.json``."""

    title = "Headstart"

    def recognises(self, files: Files) -> bool:
        return (files.folder / METADATA).is_file()

    def sizes(self, files: Files) -> dict[str, Any]:
        return dict(read_metadata(files.folder)[1]["contract"])

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        folder, card = read_metadata(files.folder)
        check_contract(files.path, card, backbone, allow_finetuned=True)
        read_drafter(files.path, folder, card, backbone)  # refuses files that were changed, and code that was not imported
        return Heads(card["kind"], card["arguments"], files.read(), notes=(f"saved by Headstart, trained on {card['backbone']}",))


def layout_of(files: Files) -> Layout:
    """Return the layout in which a folder is imported. Raises UserError if none is known."""
    return Saved() if Saved().recognises(files) else recognise(files)


def require_fit(files: Files, layout: Layout, backbone: str, trust_remote_code: bool) -> None:
    """Raise UserError, naming both, if the heads are for a backbone of other sizes; only the backbone's configuration is read."""
    try:
        config = load_config(backbone, trust_remote_code=trust_remote_code).get_text_config()
    except UserError:
        return  # loading the backbone says why
    sizes, given = layout.sizes(files), config.to_dict()
    for key, what in SIZES.items():
        theirs, ours = sizes.get(key), given.get(key)
        if theirs and ours and theirs != ours:
            verifier = ((files.config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
            named = files.config.get("base_model_name_or_path") or verifier
            raise UserError(
                f"{files.path} ({layout.title}) is for a backbone of {what} {theirs}; {backbone} has {what} {ours}: "
                f"give the backbone that they were trained on{f', {named}' if isinstance(named, str) and named else ''}"
            )


def build(heads: Heads, backbone: Backbone, path: str) -> Drafter:
    """Return the drafter with these weights, in fp32. Raises DamagedError naming the first tensor that does not fit."""
    drafter = construct_drafter(heads.kind, backbone, heads.arguments)
    expected = drafter.tensors()
    found = {name: tensor for name, tensor in heads.tensors.items() if not name.endswith(DERIVED)}
    odd = [f"{heads.names.get(name, name)} {list(tensor.shape)}" for name, tensor in found.items() if name not in expected]
    for name, tensor in expected.items():
        theirs, shape = heads.names.get(name, name), list(tensor.shape)
        called = theirs if theirs == name else f"{theirs} ({name} here)"
        if name not in found:
            instead = f"; it has {odd[0]}, which they do not have" if odd else ""
            raise DamagedError(f"{path} lacks the tensor {called} {shape} of {heads.kind} heads{instead}")
        if found[name].shape != tensor.shape:
            fault = f"{path}: tensor {called} is {list(found[name].shape)}"
            raise DamagedError(f"{fault}; with this config.json and backbone it is {shape}")
    if odd:
        raise DamagedError(f"{path} has a tensor {odd[0]}, which {heads.kind} heads of its config.json do not have")
    drafter.load_tensors(found)
    require_weights(drafter, path)
    return drafter.eval().requires_grad_(False)


def stored_dtype(heads: Heads) -> torch.dtype:
    """Return the widest floating-point dtype of the tensors."""
    dtypes = {tensor.dtype for tensor in heads.tensors.values() if tensor.is_floating_point()}
    return reduce(torch.promote_types, dtypes) if dtypes else torch.bfloat16


def read_exported(files: Files, backbone: Backbone) -> Heads:
    """Return what engines read in a folder. Raises UserError for what Headstart does not compute or does not fit the backbone."""
    layout = recognise(files)
    require_fit(files, layout, backbone.name, trust_remote_code=False)
    return layout.parse(files, backbone, "stated").readings()[0]


def round_as_stored(drafter: Drafter, stored: Heads) -> None:
    """Round the weights of a drafter in fp32 to the precision in which a folder stores them."""
    drafter.to(stored_dtype(stored)).to(torch.float32)


def original_of(path: str, backbone: Backbone, allow_finetuned: bool) -> Drafter:
    """Return trained heads in fp32, without their adapter on the backbone, which has no part in a draft after states that are given."""
    folder, card = read_metadata(path)
    check_contract(path, card, backbone, allow_finetuned)
    return read_drafter(path, folder, card, backbone).eval().requires_grad_(False)
