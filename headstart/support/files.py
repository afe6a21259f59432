"""Files: paths that users give, atomic writes of one file or of several of a folder, locks between processes, hashes."""

import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from headstart.support.errors import UserError, cause, nearest

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
"""The folder of recipes: that of the clone, or of the installed package."""
MAX_PATH, MAX_PART = 4096, 255
"""Bytes of a path, and of a name in it, on Linux."""
KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


@contextmanager
def atomic(path: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces ``path`` when the block ends and is removed on an error.

    Only the user can read the temporary file; in the end it has default permissions, whatever its writer sets (safetensors sets mode 600).
    With ``folder`` the temporary path is an empty folder; only an empty folder at ``path`` is replaced, so that the rename is one step.
    Parent folders are created. Raises UserError if ``path`` is there and no regular file, OSError if it is a folder that is not empty.
    """
    if not folder and path.exists() and not path.is_file():  # a replaced device would be gone for every program
        raise UserError(f"{path} is {KINDS.get(stat.S_IFMT(path.stat().st_mode), 'no regular file')}; give a regular file")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        if folder:
            temporary.mkdir()
        else:
            temporary.touch(exist_ok=False)  # follows no link that somebody has put there
        mode = temporary.stat().st_mode
        temporary.chmod(0o700 if folder else 0o600)
        yield temporary
        temporary.chmod(mode)
        os.replace(temporary, path)
    except BaseException:  # such as a full disk or an interrupt
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
    """Write a file atomically, as UTF-8 (halves of surrogate pairs as escapes, which JSON reads back); do nothing if ``path`` is None."""
    if path is not None:
        with atomic(path) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path | None, value: dict[str, Any], indent: int = 2) -> None:
    """Write JSON atomically; do nothing if ``path`` is None."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def cache_folder() -> Path:
    """The folder of files that may be removed at any time: the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart"


def as_path(what: str, text: str | Path) -> Path:
    """Return a path, ``~`` expanded. Raises UserError, which begins with ``what``, for one that no file can have."""
    name = str(text)
    try:
        size = len(os.fsencode(name))
    except UnicodeEncodeError:
        raise UserError(f"{what} {name!r} is no path: it holds half of a surrogate pair; give a path of whole characters") from None
    if not name or "\0" in name:
        fault = "holds a null character" if name else "is empty"
        raise UserError(f"{what} {name!r} is no path: it {fault}; give the path of a file or folder")
    if size >= MAX_PATH or max(len(os.fsencode(part)) for part in name.split("/")) > MAX_PART:
        raise UserError(f"{what} {name[:40]}... is too long: a path has less than {MAX_PATH} bytes, each name in it at most {MAX_PART}")
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UserError(f"{what} {name}: there is no such user; write the path in full") from None


def require_file(what: str, path: str | Path) -> Path:
    """Return the path of a regular file. Raises UserError, which begins with ``what`` and the path, if there is none."""
    file = as_path(what, path)
    what = f"{what} {file}".strip()
    try:
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{what}: there is no such file; {_near(file)}") from None
    except OSError as error:
        raise UserError(f"{what} cannot be read: {error.strerror or cause(error)}; check the path") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{what} is {KINDS.get(stat.S_IFMT(mode), 'no regular file')}; give a regular file")
    return file


def _near(file: Path) -> str:
    """Say which file of the folder has the nearest name."""
    try:
        names = [path.name for path in file.parent.iterdir() if path.is_file()]
    except OSError:
        names = []
    stems = {name.partition(".")[0]: name for name in sorted(names, key=lambda name: name.endswith(file.suffix))}  # endings are alike
    near = nearest(file.name.partition(".")[0], stems)
    return "check its name" if near is None else f"did you mean {file.with_name(stems[near])}?"


def require_writable(what: str, path: str | Path | None) -> None:
    """Raise UserError if a file cannot be written; called before the work starts."""
    if path is None:
        return
    file = as_path(what, path)
    try:
        mode = file.stat().st_mode
    except OSError:  # not there yet, or below something that is no folder
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode):
        raise UserError(f"{what} {file} is {KINDS.get(stat.S_IFMT(mode), 'no regular file')}; give the name of a file")
    _require_folder(what, file, file.absolute().parent)


def require_folder(what: str, path: str | Path) -> Path:
    """Return the path of a folder that can be written or created. Raises UserError; nothing is created."""
    folder = as_path(what, path)
    _require_folder(what, folder, folder.absolute())
    return folder


def _require_folder(what: str, path: Path, folder: Path) -> None:
    """Write a temporary file into ``folder`` or, if it is not there yet, into the one it would be created in."""
    parent = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".headstart-"):
            pass
    except OSError as error:
        refused = f"{parent} is not a folder that you may write to ({error.strerror or cause(error)})"
        raise UserError(f"{what} {path} cannot be written: {refused}; choose another place") from None


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
    except (OSError, NotImplementedError) as error:  # the latter is filelock's, for a file system without locks
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


PENDING = ".pending"


@contextmanager
def transaction(folder: Path) -> Iterator[Path]:
    """Yield an empty folder whose files replace those of ``folder`` in one step when the block ends; files of other names stay.

        with transaction(folder) as new:   # an empty folder
            (new / "model.safetensors").write_bytes(...)
            (new / "headstart.json").write_text(...)

    The files are written below a temporary name and flushed to disk; renaming that folder to `PENDING` is the step. They are the folder's
    files from then on, and are moved to their places at once, or, if the process is killed first, by whoever calls `settle` next.
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
            with suppress(FileNotFoundError):  # another process has moved it
                os.replace(Path(place) / name, target / name)
        with suppress(OSError):  # another process has removed it, or has begun the next transaction
            os.rmdir(place)
