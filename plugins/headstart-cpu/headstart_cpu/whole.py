"""Compiled files with their hashes: one that was cut short would end the process that loads it."""

from __future__ import annotations

from pathlib import Path

from headstart.support.files import discard, file_hash


class Damaged(Exception):
    """A compiled file is not as it was written; it has been removed."""


def seal(file: Path, name: Path | None = None) -> None:
    """Write the hash of a file beside it, or beside the place that it will be moved to, where it must not be before its hash."""
    _sum(name or file).write_text(file_hash(file))


def require_whole(file: Path) -> Path:
    """Return a file that is as it was when it was sealed. Raises Damaged, and removes it, if it is not."""
    try:
        if file_hash(file) == _sum(file).read_text():
            return file
    except OSError:
        pass
    discard(file)
    raise Damaged(f"{file} is damaged and was removed; headstart compile makes it again")


def _sum(file: Path) -> Path:
    return file.with_name(f"{file.name}.sha256")
