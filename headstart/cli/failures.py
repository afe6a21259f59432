"""The last line of defence: whatever leaves a command becomes one line and an exit status.

| status | |
|---|---|
| 2 | a user's mistake, or too little memory, a full disk, no connection: the line says what to change |
| 70 | an error nobody foresaw: the traceback is in a file that the line names |
| 130, 141 | interrupted; the reader of the output has left |

``--debug``, or HEADSTART_DEBUG=1, prints the traceback too.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from headstart import __version__
from headstart.support.errors import UserError, cause
from headstart.support.files import cache_folder

USER, UNFORESEEN, INTERRUPTED, BROKEN_PIPE = 2, 70, 130, 141
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Guard:
    """A context in which whatever is raised becomes one line on standard error and a `status`."""

    folder: Path | None = None
    """Where a traceback is logged, if known."""
    debug: bool = False
    status: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        try:
            if error is None:
                sys.stdout.flush()
        except Exception as fault:
            error = fault
        if isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
            self.status = INTERRUPTED
        elif isinstance(error, BrokenPipeError):
            _discard_output()
            self.status = BROKEN_PIPE
        elif isinstance(error, UserError):
            self.status = report(str(error), USER)
        elif isinstance(error, Exception):
            if self.debug or os.environ.get("HEADSTART_DEBUG", "0") not in ("", "0"):
                traceback.print_exception(error)
            known = _known(error)
            self.status = report(known, USER) if known else report(_unforeseen(error, self.folder), UNFORESEEN)
        return error is None or isinstance(error, KeyboardInterrupt | Exception)


def report(line: str, status: int, wait: bool = True) -> int:
    """Print the error and return the status. Of several processes that have it, the first one speaks, and its end ends the others."""
    if rank() and wait:
        time.sleep(15)
    print(f"error: {line}" if rank() == 0 else f"error (process {rank()}): {line}", file=sys.stderr, flush=True)
    return status


def rank() -> int:
    """Return the number of this process of several."""
    return int(os.environ.get("RANK", "0"))


def _known(error: Exception) -> str | None:
    """Say what to try, for errors of the machine; None for others."""
    names = {kind.__name__ for kind in type(error).__mro__}
    said = cause(error)
    smaller = "lower the batch, the context (--max-new-tokens, data.max_length) or --nodes"
    if "OutOfMemoryError" in names:  # torch's, of an accelerator
        return f"the accelerator is out of memory ({said}); {smaller}"
    if isinstance(error, MemoryError) or "can't allocate memory" in said or "not enough memory" in said:
        return f"out of memory ({said}); {smaller}, or close other programs"
    if isinstance(error, OSError) and error.errno in FULL:
        return f"the disk is full ({said}); make room there, and run the same command again"
    if isinstance(error, ConnectionError | TimeoutError) or names & {"TransportError", "NetworkError", "ConnectTimeout", "ReadTimeout"}:
        return f"the connection was lost ({type(error).__name__}: {said}); check the network and run the same command again"
    return None


def _unforeseen(error: Exception, folder: Path | None) -> str:
    what = f"{type(error).__name__}: {cause(error)}"
    if isinstance(error, RecursionError):
        what = f"{what} (something is nested too deep: an input, or a path of links)"
    if any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__) or "CUDA error" in what:
        what = f"{what} (the accelerator failed or was lost: see its driver's log; a new process may have it again, and training goes on)"
    log = _log(error, folder)
    where = f"the details are in {log}" if log else "the details could not be written; --debug prints them"
    return f"unforeseen, and not your mistake: {what}; {where}, please report it with them"


def _log(error: Exception, folder: Path | None) -> Path | None:
    """Write the traceback into ``folder``, if it is there, or below the cache folder; returns the file, or None if neither works."""
    home = cache_folder() / "failures"
    text = "".join(traceback.format_exception(error))
    command = " ".join(map(repr, sys.argv))
    for place in ([folder] if folder is not None and folder.is_dir() else []) + [home]:
        try:
            place.mkdir(parents=True, exist_ok=True)
            name = time.strftime("failure-%Y%m%d-%H%M%S-")
            handle, file = tempfile.mkstemp(".txt", name, place)  # private: tracebacks may hold parts of prompts
            with open(handle, "w", encoding="utf-8", errors="backslashreplace") as log:
                log.write(f"headstart {__version__}, Python {sys.version.split()[0]}\n{command}\n\n{text}")
            return Path(file)
        except OSError:
            continue
    return None


def _discard_output() -> None:
    """Send output that is not written yet to the null device, so that the interpreter ends silently."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # no file behind it
        pass
