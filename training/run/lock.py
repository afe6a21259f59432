"""The lock of a run's folder: two runs never write to the same one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headstart.support.errors import UserError
from headstart.support.files import locked

LOCK = "run.lock"
"""File in ``save.dir``; it stays there, and means nothing unless a process holds it."""


@contextmanager
def sole_run(save_dir: str) -> Iterator[None]:
    """Hold the lock of the folder, which the system releases when this process ends, by a kill too.

    Raises UserError if another run holds it, or if the folder cannot be written. Folders made for the lock alone are removed again.
    """
    folder = Path(save_dir)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"save.dir={save_dir} cannot be made ({error.strerror}); choose a folder that you may write to") from None
    with locked(folder / LOCK, "save.dir") as mine:
        if not mine:
            raise UserError(f"another run is writing to save.dir={save_dir}; let it end or stop it, or choose another save.dir")
        try:
            yield
        finally:
            if made and [path.name for path in folder.iterdir()] == [LOCK]:   # refused before anything was written
                with suppress(OSError):
                    (folder / LOCK).unlink()
                    for place in made:
                        place.rmdir()
