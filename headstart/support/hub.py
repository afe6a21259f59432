"""Folders by path or hub id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from headstart.support.errors import UserError


def find_folder(path: str | Path, what: str, files: Sequence[str] | None = None) -> Path:
    """Return the folder ``path`` or, if there is none, download the hub repository of that id, only ``files`` (patterns) if given.

    Raises UserError, saying ``what`` was looked for, if there is neither.
    """
    folder = Path(path).expanduser()
    if str(path) and folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(str(path), allow_patterns=None if files is None else list(files)))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        cause = " ".join(str(error).split())[:200]
        fault = f"no {what} at {str(path)!r}: no such folder, and not on the hub ({cause}); give a folder or a hub id"
        raise UserError(fault) from None
