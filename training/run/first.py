"""Work that one process of each machine does first, so that the others find what it has kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from headstart.support.errors import UserError, cause

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
