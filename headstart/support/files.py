"""Files: written whole or not at all, locked between processes, hashed."""

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
    """Yield a temporary path beside ``path`` that replaces it when the block ends; on an error it is removed.

    The file gets the permissions of any new file there, whatever its writer sets (safetensors would make it private). With ``folder``
    the temporary path is an empty folder, and an older folder of that name is replaced. Parent folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        if folder:
            temporary.mkdir()
        else:
            temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        if folder:
            shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
    except BaseException:   # a full disk, an interrupt
        discard(temporary)
        raise


def discard(path: Path) -> None:
    """Remove a file, or a folder with all it holds, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def discard_unfinished(path: Path) -> None:
    """Remove what killed processes left of `atomic`; only while no other process writes there. The name may be a pattern (``*``)."""
    for temporary in path.parent.glob(f".{path.name}.*.tmp"):
        discard(temporary)


def write_text(path: Path | None, text: str) -> None:
    """Write atomically, as UTF-8; nothing for None."""
    if path is not None:
        with atomic(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | None, value: dict[str, Any], indent: int = 2) -> None:
    """As `write_text`."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def require_writable(flag: str, path: Path | None) -> None:
    """Raise UserError, before the work rather than after it, if the file that ``flag`` names cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder; give the name of a file")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{flag} {path} cannot be written: {parent} is not a folder that you may write to")


@contextmanager
def locked(path: Path, setting: str, wait: bool = False) -> Iterator[bool]:
    """Hold the lock file ``path``; yields False, at once, where another process holds it and ``wait`` is not set.

    The system releases the lock when the process dies. The lock file stays. Raises UserError, naming ``setting``, for a disk that
    cannot lock files.
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
    """SHA-256 of the contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def value_hash(value: Any) -> str:
    """16 hexadecimal digits of the SHA-256 of a JSON value; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
