"""What the processes of a run and its machine agree on: who goes first, who owns the folder, when to stop, and who is gone."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed import ProcessGroup

from headstart.support.errors import UserError, cause
from headstart.support.files import locked

T = TypeVar("T")


def in_first_process(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, in every process; the first one of each machine does it while the others wait.

    If it fails there, it fails everywhere, and no process waits for one that has ended: UserError says why in the others.
    """
    result: list[T] = []
    failed: Exception | None = None
    if accelerator.is_local_main_process:
        try:
            result.append(work())
        except Exception as error:
            failed = error
    said = gather_object([None if failed is None else cause(failed)]) if accelerator.num_processes > 1 else []
    if failed is not None:
        raise failed
    if (first := next(filter(None, said), None)) is not None:
        raise UserError(first)
    return result[0] if result else work()


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
            if made and [path.name for path in folder.iterdir()] == [LOCK]:  # refused before anything was written
                with suppress(OSError):
                    (folder / LOCK).unlink()
                    for place in made:
                        place.rmdir()


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Context in which the first signal is only recorded."""

    def __init__(self) -> None:
        self.number = int(signal.SIGTERM)
        """The received signal; SIGTERM if only another process received one."""
        self.received = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            self._before = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.number, self.received = number, True
        self._restore()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


LOST = re.compile(r"connection (closed|reset|refused|was likely closed)|broken pipe|gloo/transport|NCCL|timed? ?out|recvValue failed", re.I)
"""In messages of collective operations, which raise plain RuntimeErrors for most faults of a connection."""


_kept: list[ProcessGroup | None] = []


def any_of(accelerator: Accelerator, flag: bool, group: ProcessGroup | None = None) -> bool:
    """Return True if the flag is set in any process, after all have called this. ``group``: one of CPUs; None: the run's own."""
    if accelerator.num_processes == 1:
        return flag
    flags = torch.tensor(float(flag), device=accelerator.device if group is None else "cpu")
    torch.distributed.all_reduce(flags, group=group)
    return bool(flags.item())


def keep_group() -> None:
    """Keep the process group until the process ends; to be called before it is destroyed.

    Else the last one to let go of it is DDP's reducer. That one joins gloo's threads with Python's lock in hand, and waits for ever if one
    of them waits for the lock, as it does to let go of the tensors of its last collective.
    """
    if torch.distributed.is_initialized():
        _kept.append(torch.distributed.group.WORLD)


def lost_process(error: RuntimeError, save_dir: str) -> UserError | None:
    """Return what to report if a collective operation failed because another process is gone; None for any other error."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or not (isinstance(error, torch.distributed.DistError) or LOST.search(str(error))):
        return None
    cause = re.sub(r"^\[[^\]]*\] ", "", str(error).strip()).split("\n")[0].split(". ")[0][:200]  # without the place in gloo's source
    return UserError(
        f"another process of this run has ended or does not answer ({cause}); its own message says why. "
        f"The same command goes on from what was last saved in {save_dir}"
    )
