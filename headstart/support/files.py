"""Files: atomic writes, locks between processes, hashes."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from headstart.support.errors import UserError


@contextmanager
def atomic(path: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces ``path`` when the block ends and is removed on an error.

    Only the user can read the temporary file; in the end it has default permissions, whatever its writer sets (safetensors sets mode 600).
    With ``folder`` the temporary path is an empty folder, and an existing folder at ``path`` is replaced. Parent folders are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        if folder:
            temporary.mkdir()
        else:
            temporary.touch(exist_ok=False)   # follows no link that somebody has put there
        mode = temporary.stat().st_mode
        temporary.chmod(0o700 if folder else 0o600)
        yield temporary
        temporary.chmod(mode)
        if folder:
            shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
    except BaseException:   # such as a full disk or an interrupt
        discard(temporary)
        raise


def discard(path: Path) -> None:
    """Remove a file, or a folder and its contents, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def discard_unfinished(path: Path) -> None:
    """Remove temporary files of `atomic` left by killed processes. No other process may be writing; the name may be a glob (``*``)."""
    for temporary in path.parent.glob(f".{path.name}.*.tmp"):
        discard(temporary)


def write_text(path: Path | None, text: str) -> None:
    """Write a file atomically, as UTF-8; do nothing if ``path`` is None."""
    if path is not None:
        with atomic(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | None, value: dict[str, Any], indent: int = 2) -> None:
    """Write JSON atomically; do nothing if ``path`` is None."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def require_writable(flag: str, path: Path | None) -> None:
    """Raise UserError if the file given by ``flag`` cannot be written; called before the work starts."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder; give the name of a file")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{flag} {path} cannot be written: {parent} is not a folder that you may write to")


@contextmanager
def locked(path: Path, setting: str, wait: bool = False) -> Iterator[bool]:
    """Hold the lock file ``path``; yields False without ``wait`` if another process holds it.

    The system releases the lock when the process dies; the file remains. Raises UserError, naming ``setting``, if the disk does not
    support locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except (OSError, NotImplementedError) as error:
        raise UserError(f"{path} cannot be locked ({error}); choose a {setting} on a disk that can lock files") from None
    try:
        yield True
    finally:
        lock.release()


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def value_hash(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a JSON value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
