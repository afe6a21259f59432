"""A file system that fails: the n-th operation on files below a folder raises, or ends the process as a kill would."""

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headstart.heads import card
from headstart.training.run import checkpoint as run_checkpoint

PATHS = ("replace", "rename", "mkdir", "rmdir", "unlink")
"""Functions of `os` that take a path; `pathlib` and `shutil` call them."""


class Faulty:
    """Counts the operations and calls ``fail`` at number ``at`` (from 1), and at all later ones too if ``for_good``."""

    def __init__(self, folder: Path, at: int, fail: Callable[[], None], for_good: bool) -> None:
        self.folder, self.at, self.fail, self.for_good = str(folder), at, fail, for_good
        self.count = 0
        self.seen: list[str] = []

    def note(self, name: str) -> None:
        self.count += 1
        self.seen.append(name)
        if self.count == self.at or (self.for_good and self.count > self.at):
            self.fail()

    def concerns(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(self.folder)

    def of_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if self.concerns(path):
                self.note(f"{name} {Path(path).name}")
            return real(path, *args, **options)

        return call

    def fsync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(handle: int) -> None:
            self.note("fsync")
            real(handle)

        return call

    def opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            file = real(path, mode, *args, **options)
            if self.concerns(path) and set(mode) & set("wax+"):
                self.note(f"open {Path(path).name}")
                write = file.write

                def writing(content: Any) -> Any:
                    self.note(f"write {Path(path).name}")
                    return write(content)

                file.write = writing
            return file

        return call

    def saved(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """The safetensors library writes outside of Python; a fault leaves half of the file."""

        def call(tensors: Any, path: Path, *args: Any, **options: Any) -> Any:
            real(tensors, path, *args, **options)
            content = Path(path).read_bytes()
            os.truncate(path, len(content) // 2)
            self.note(f"save_file {Path(path).name}")
            with open(path, "r+b") as file:
                os.write(file.fileno(), content)
            return None

        return call


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only() -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def broken_disk() -> None:
    raise OSError(errno.EIO, "Input/output error")


def killed() -> None:
    os._exit(9)


@contextmanager
def faults(folder: Path, at: int, fail: Callable[[], None] = broken_disk, for_good: bool = False) -> Iterator[Faulty]:
    """In the block, the ``at``-th operation below ``folder`` fails (0: none; they are only counted)."""
    faulty = Faulty(folder, at, fail, for_good)
    with pytest.MonkeyPatch.context() as patch:
        for name in PATHS:
            patch.setattr(os, name, faulty.of_path(name, getattr(os, name)))
        patch.setattr(os, "fsync", faulty.fsync(os.fsync))
        opened = faulty.opened(io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        for module in (card, run_checkpoint):
            patch.setattr(module, "save_file", faulty.saved(module.save_file))
        yield faulty
