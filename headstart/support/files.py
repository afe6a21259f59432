"""Files that a command writes: known to be writable before the work, and never half there."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from headstart.support.errors import UserError


def require_writable(flag: str, file: Path | None) -> None:
    """Raise UserError, before the work and not after it, if what ``flag`` asks for cannot be written."""
    if file is None:
        return
    if file.is_dir():
        raise UserError(f"{flag} {file} is a folder; give the name of a file")
    above = next(folder for folder in file.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"{flag} {file} cannot be written: {above} is not a folder that you may write to")


def write_text(file: Path | None, text: str) -> None:
    """Nothing, for no file; folders above it are made."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".writing-") as folder:
        whole = Path(folder) / file.name
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, file)


def write_json(file: Path | None, report: dict[str, Any]) -> None:
    """As `write_text`."""
    write_text(file, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
