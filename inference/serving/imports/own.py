"""Heads that Headstart saved, or exported with their ``headstart.json``."""

from __future__ import annotations

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.checkpoint import METADATA, check_contract, read_drafter, read_metadata
from headstart.inference.serving.imports.foreign import Foreign
from headstart.inference.serving.imports.reading import Counting, Reading, Sizes

NAME = "Headstart"


def recognises(foreign: Foreign) -> bool:
    return (foreign.folder / METADATA).is_file()


def sizes(foreign: Foreign) -> Sizes:
    contract = read_metadata(foreign.folder)[1]["contract"]
    return Sizes(contract.get("hidden_size"), contract.get("vocab_size"), contract.get("num_hidden_layers"))


def readings(foreign: Foreign, backbone: Backbone, counting: Counting | None) -> list[Reading]:
    folder, card = read_metadata(foreign.folder)
    check_contract(foreign.path, card, backbone, allow_finetuned=True)
    drafter = read_drafter(foreign.path, folder, card, backbone)   # checks the files, and adds the heads' own adapter
    tensors = foreign.read(foreign.shapes) if card["weights"].get("adapter") is None else drafter.tensors()
    return [Reading(card["kind"], card["arguments"], tensors, notes=(f"saved by Headstart, trained on {card['backbone']}",))]
