"""Work on many items in several processes of this machine."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import current_process
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from headstart.support.errors import UserError, cause

T = TypeVar("T")
PR_SET_PDEATHSIG = 1
"""Of Linux: the signal that a process gets when its parent ends."""
PART, LEAST, MOST = 128, 1024, 16
"""Items of a part; items for which another process pays; processes that are started unless more are asked for."""


def in_parts(work: Callable[[range], T], items: int, processes: int | None = None) -> Iterator[T]:
    """Yield what ``work`` returns for one part of ``range(items)`` after another, in order.

    In this process where items are few, else in ``processes`` others, by default one for each CPU that is free. Those are forks, so
    ``work`` may be any function; it must neither use an accelerator nor return tensors. Raises what ``work`` raises, and UserError if a
    process is killed.
    """
    parts = [range(first, min(first + PART, items)) for first in range(0, items, PART)]
    count = min(free_cpus() if processes is None else processes, items // LEAST)
    if count < 2 or sys.platform != "linux" or current_process().daemon:  # elsewhere a fork is not safe, and a daemon may have none
        yield from map(work, parts)
        return
    settings: dict[str, Any] = {"batch_size": None, "collate_fn": _as_it_is, "worker_init_fn": _begin, "multiprocessing_context": "fork"}
    own = torch.Generator()  # the loader draws a seed, which would change the random numbers of the run
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*worker processes in total")
        loader = iter(DataLoader(_Parts(work, parts), num_workers=count, generator=own, **settings))
    try:
        for done in loader:
            if isinstance(done, UserError):
                raise done
            yield done
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise UserError(f"a process that tokenises has ended ({cause(error)}); give it more memory, or set data.processes=1") from None
    finally:
        del loader  # an error may hold this frame, and a later fork must not inherit the loader


def free_cpus() -> int:
    """The CPUs that this process may use, less those of the launch's other processes here, which wait meanwhile; at most `MOST`."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    waiting = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
    return max(1, min(usable - waiting, MOST))


class _Parts(Dataset[T | UserError]):
    def __init__(self, work: Callable[[range], T], parts: list[range]) -> None:
        self.work, self.parts = work, parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, number: int) -> T | UserError:
        try:
            return self.work(self.parts[number])
        except UserError as error:  # raised again in one line; the loader would add a traceback
            return error


def _as_it_is(item: T) -> T:
    return item


def _begin(_: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # else it would wait for ever for a killed parent to read its results
    gc.freeze()  # a collection would write to, and so copy, all memory that is shared with the first process
