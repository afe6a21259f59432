"""Agreement of a run's processes, and what one reports when another one is gone."""

from __future__ import annotations

import os
import re

import torch
from accelerate import Accelerator
from torch.distributed import ProcessGroup

from headstart.support.errors import UserError

LOST = re.compile(r"connection (closed|reset|refused|was likely closed)|broken pipe|gloo/transport|NCCL|timed? ?out|recvValue failed", re.I)
"""In messages of collective operations, which raise plain RuntimeErrors for most faults of a connection."""


def any_of(accelerator: Accelerator, flag: bool, group: ProcessGroup | None = None) -> bool:
    """Return True if the flag is set in any process, after all have called this. ``group``: one of CPUs; None: the run's own."""
    if accelerator.num_processes == 1:
        return flag
    flags = torch.tensor([float(flag)], device=accelerator.device if group is None else "cpu")
    torch.distributed.all_reduce(flags, group=group)
    return bool(flags.item())


def lost_process(error: RuntimeError, save_dir: str) -> UserError | None:
    """Return what to report if a collective operation failed because another process is gone; None for any other error."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or not (isinstance(error, torch.distributed.DistError) or LOST.search(str(error))):
        return None
    cause = re.sub(r"^\[[^\]]*\] ", "", str(error).strip()).split("\n")[0].split(". ")[0][:200]   # without the place in gloo's source
    return UserError(
        f"another process of this run has ended or does not answer ({cause}); its own message says why. "
        f"The same command goes on from what was last saved in {save_dir}"
    )
