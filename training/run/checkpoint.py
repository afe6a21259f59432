"""The state of a run, so that a killed one goes on as if it had not been: ``<save.dir>/state/step-00000200/``.

``tensors.safetensors`` holds the drafter's weights, their average and the optimiser's moments under flat names, ``state.json`` the rest and
the checksum of the tensors. No pickles. A state is written under a temporary name and renamed, so a folder named ``step-*``
is whole unless something else has damaged it; that is found by the checksum, and the state before it is taken.

Random numbers need no saving: the loop seeds every step from (seed, step, process), and the data order is a function of
(seed, epoch). So a run may also be resumed on another number of processes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.support.files import atomic, discard_unfinished, file_hash
from headstart.training.run.average import Average
from headstart.training.run.sharding import part_like, whole

MAY_DIFFER = (
    "train.steps", "train.epochs", "train.micro_batch", "train.non_finite", "save.", "log.", "eval.", "regenerate.", "backbone.shard",
    "cache.dir", "cache.mode", "cache.disk_gb", "cache.shard_mb",
)  # fmt: skip
"""Keys of a recipe that may change when a run is resumed: they do not change what an optimiser step is."""


@dataclass(frozen=True)
class State:
    folder: Path
    step: int
    notes: dict[str, Any]
    tensors: dict[str, Tensor]


def write_state(save_dir: Path, step: int, tensors: dict[str, Tensor], notes: dict[str, Any], keep: int) -> Path:
    """Write the state of that step, atomically, and drop all but the ``keep`` newest."""
    folder = save_dir / "state" / f"step-{step:08d}"
    discard_unfinished(folder.with_name("step-*"))
    with atomic(folder, folder=True) as temporary:
        save_file(tensors, temporary / "tensors.safetensors")
        content = {"step": step, **notes, "sha256": file_hash(temporary / "tensors.safetensors")}
        (temporary / "state.json").write_text(json.dumps(content, indent=1))
        for path in temporary.iterdir():
            _flush(path)
    _flush(folder.parent)
    for old in _steps(save_dir)[max(keep, 1):]:
        shutil.rmtree(old)
    return folder


def find_state(save_dir: Path) -> Path | None:
    """Folder of the newest intact state; None where there is none at all.

    Says which damaged ones it passes over, and raises UserError when every one is damaged.
    """
    folders = _steps(save_dir)
    for i, folder in enumerate(folders):
        fault = _fault(folder)
        if fault is None:
            return folder
        if i + 1 < len(folders):
            print(f"warning: {folder} is damaged ({fault}); trying the one before it, {folders[i + 1].name}", file=sys.stderr)
        else:
            raise UserError(f"{folder} is damaged ({fault}) and no earlier state is intact; delete {folder.parent} to start again")
    return None


def read_state(folder: Path) -> State:
    notes = json.loads((folder / "state.json").read_text())
    return State(folder, notes["step"], notes, load_file(folder / "tensors.safetensors"))


def require_same_recipe(state: State, recipe: dict[str, Any]) -> None:
    """Raise UserError if what is to be resumed was another experiment."""
    before, now = _flat(state.notes["recipe"]), _flat(json.loads(json.dumps(recipe)))
    keys = sorted(key for key in {*before, *now} if before.get(key) != now.get(key) and not key.startswith(MAY_DIFFER))
    if keys:
        changes = ", ".join(f"{key} (was {before.get(key)!r}, now {now.get(key)!r})" for key in keys)
        raise UserError(f"{state.folder} was trained by another recipe: {changes}; restore it, or choose another save.dir")


def pack(drafter: Drafter, optimizer: torch.optim.Optimizer, average: Average | None = None) -> dict[str, Tensor]:
    """Weights, their average and moments under flat names, as whole copies on the CPU."""
    tensors = {f"drafter/{name}": tensor for name, tensor in drafter.tensors().items()}
    tensors |= {f"average/{name}": tensor for name, tensor in (average.weights if average else {}).items()}
    for name, parameter in drafter.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{name}"] = value
    return {name: whole(tensor.detach()).to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def unpack_drafter(drafter: Drafter, tensors: dict[str, Tensor]) -> None:
    """The weights and, where there is one, the draft vocabulary."""
    drafter.load_tensors({name.removeprefix("drafter/"): tensor for name, tensor in tensors.items() if name.startswith("drafter/")})


def unpack_average(average: Average, tensors: dict[str, Tensor]) -> None:
    average.load({name.removeprefix("average/"): tensor for name, tensor in tensors.items() if name.startswith("average/")})


def unpack_optimizer(drafter: Drafter, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The moments of every parameter; groups and learning rates are the recipe's, not the file's."""
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    moments: dict[str, dict[str, Tensor]] = {}
    for flat, tensor in tensors.items():
        if flat.startswith("optimizer/"):
            _, key, name = flat.split("/", 2)
            moments.setdefault(name, {})[key] = tensor
    own = optimizer.state_dict()
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        i: {key: part_like(tensor, p) for key, tensor in moments[names[p]].items()} for i, p in enumerate(trained) if names[p] in moments
    }
    optimizer.load_state_dict({"state": state, "param_groups": own["param_groups"]})


def _steps(save_dir: Path) -> list[Path]:
    """Newest first."""
    return sorted((save_dir / "state").glob("step-*"), reverse=True)


def _fault(folder: Path) -> str | None:
    """What is wrong with a state on disk."""
    try:
        notes = json.loads((folder / "state.json").read_text())
        found = file_hash(folder / "tensors.safetensors")
    except OSError as error:
        return f"{Path(error.filename).name} cannot be read"
    except ValueError:
        return "state.json is not JSON"
    if not isinstance(notes, dict) or notes.get("sha256") != found:
        return "the checksum of tensors.safetensors is not the one in state.json"
    return None


def _flush(path: Path) -> None:
    """To the disk itself: a rename may otherwise survive a power cut that the file does not."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys, dotted."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
