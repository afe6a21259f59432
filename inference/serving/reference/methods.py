"""Find the method of a folder with heads."""

from __future__ import annotations

from headstart.inference.serving.reference.block import BlockDrafting
from headstart.inference.serving.reference.draft_model import DraftModelDrafting
from headstart.inference.serving.reference.eagle import EagleDrafting
from headstart.inference.serving.reference.eagle3 import Eagle3Drafting
from headstart.inference.serving.reference.files import Files
from headstart.inference.serving.reference.medusa import MedusaDrafting
from headstart.inference.serving.reference.mlp import MlpDrafting
from headstart.inference.serving.reference.mtp import MtpDrafting
from headstart.inference.serving.reference.reading import Drafting, Reading
from headstart.inference.serving.reference.target import Target
from headstart.support.errors import UserError

METHODS: tuple[type[Drafting], ...] = (
    MedusaDrafting, MlpDrafting, BlockDrafting, Eagle3Drafting, MtpDrafting, EagleDrafting, DraftModelDrafting,
)  # fmt: skip
"""In the order in which a folder is offered to them."""


def find_method(files: Files) -> type[Drafting]:
    """Return the method of these files. Raises UserError if it is none that is read here."""
    found = next((one for one in METHODS if one.recognises(files)), None)
    if found is None:
        stated = files.config.get("architectures") or files.config.get("model_type") or "no architecture"
        known = ", ".join(one.method for one in METHODS)
        raise UserError(f"{files.folder} ({stated}) holds no heads that the reference engine reads; it reads {known}")
    return found


def read_heads(files: Files, target: Target) -> Reading:
    """Read the heads as the engines do. Raises UserError, or DamagedError for damaged files."""
    return find_method(files).read(files, target)


def drafting_of(reading: Reading) -> type[Drafting]:
    """Return the method that drafts with these heads."""
    return next(one for one in METHODS if one.method == reading.method)
