"""What an exported folder records about its origin."""

from __future__ import annotations

from pathlib import Path

from headstart.heads.checkpoint import METADATA, read_metadata
from headstart.inference.serving.export.export import PROVENANCE
from headstart.support.errors import UserError
from headstart.support.json_text import read_json


def recorded(folder: Path) -> tuple[str | None, str | None]:
    """Return the heads that a folder was exported from and the backbone that it is for, as far as they are recorded.

    The heads are those of a folder that is still there, with the weights that were exported; a checkpoint of Headstart is its own.
    """
    if (folder / METADATA).is_file():
        return str(folder), None
    try:
        stated = read_json(folder / PROVENANCE, "export the heads again")
        path, sha256, backbone = str(stated["heads"]["path"]), stated["heads"]["sha256"], str(stated["backbone"])
    except (UserError, KeyError, TypeError):
        return None, None
    try:
        _, card = read_metadata(path)
    except UserError:
        return None, backbone
    return (path if card["weights"]["sha256"] == sha256 else None), backbone
