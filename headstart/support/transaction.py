"""Replace several files of a folder in one step.

    with transaction(folder) as new:   # an empty folder
        (new / "model.safetensors").write_bytes(...)
        (new / "headstart.json").write_text(...)

The files are written below a temporary name and flushed to disk; renaming that folder to `PENDING` is the step. They are the folder's files
from then on, and are moved to their places at once, or, if the process is killed first, by whoever calls `settle` next.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headstart.support.errors import UserError
from headstart.support.files import atomic

PENDING = ".pending"


@contextmanager
def transaction(folder: Path) -> Iterator[Path]:
    """Yield an empty folder whose files replace those of ``folder`` in one step when the block ends; files of other names stay.

    Nothing changes if the block raises. Raises OSError if the disk fails; once the step is done, the files are the new ones even then.
    """
    settle(folder)
    with atomic(folder / PENDING, folder=True) as new:
        yield new
        for path in [*new.rglob("*"), new]:
            flush(path)
    flush(folder)
    _move(folder)


def settle(folder: Path) -> None:
    """Move the files of an interrupted `transaction`, if any, to their places. Several processes may do so at once.

    Raises UserError if the folder cannot be written.
    """
    if not (folder / PENDING).is_dir():
        return
    try:
        _move(folder)
    except OSError as error:
        raise UserError(
            f"saving {folder} was interrupted, and its new files cannot be moved out of {PENDING} ({error.strerror}); "
            "run this once where the folder can be written"
        ) from None


def flush(path: Path) -> None:
    """Flush a file or folder to disk; otherwise a rename might survive a power failure that the file's content does not."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move(folder: Path) -> None:
    pending = folder / PENDING
    for place, _, names in os.walk(pending, topdown=False):
        target = folder / Path(place).relative_to(pending)
        for name in names:
            target.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):   # another process has moved it
                os.replace(Path(place) / name, target / name)
        with suppress(OSError):   # another process has removed it, or has begun the next transaction
            os.rmdir(place)
