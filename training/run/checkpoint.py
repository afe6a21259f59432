"""The saved state of a run, ``<save.dir>/state/step-00000200/``, from which it resumes bit-exactly.

``tensors.safetensors`` holds the weights, their average and the optimiser's moments under flat names; ``state.json`` holds everything
else and the checksum of the tensors. No pickles. A state is written under a temporary name and renamed when complete; the checksum
detects later damage, in which case the previous state is used.

No random state is saved: every step is seeded from (seed, step, process), and the data order is a function of (seed, epoch). A run may
therefore be resumed with another number of processes.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from headstart.chat.template import template_hash
from headstart.heads.backbone.fingerprint import tokenizer_digest
from headstart.heads.base import Drafter
from headstart.support.devices import versions
from headstart.support.errors import UserError
from headstart.support.files import atomic, discard, discard_unfinished, file_hash, flush, value_hash
from headstart.support.json_text import flattened, parse_json
from headstart.training.data.tokenise import chat_settings
from headstart.training.features.codec import without_prefix
from headstart.training.recipe.recipe import Recipe, to_dict
from headstart.training.run.optimizer import Average
from headstart.training.run.processes import distribute_like, full_tensor

FORMAT = 4
"""Version of the content of ``state.json`` and of the tensors' names."""
MAY_DIFFER = (
    "train.steps", "train.epochs", "train.micro_batch", "train.non_finite", "save.", "log.", "eval.", "regenerate.", "backbone.shard",
    "cache.dir", "cache.shard_mb", "cache.between_epochs", "data.images", "data.template_time", "data.processes",
)  # fmt: skip
"""Recipe keys that may change on resuming, since they do not affect the optimiser steps."""


def provenance(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> dict[str, Any]:
    """Return the provenance that is constant during a run. ``ends``: the tokens at which the backbone's decoding stops."""
    chat = chat_settings(recipe.data, ends)
    return {
        "recipe": to_dict(recipe),
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": template_hash(chat.template_of(tokenizer)),
        "chat": chat.to_card(tokenizer),
        "command": shlex.join(sys.argv),
        "commit": _commit(),
        "versions": versions("torch", "transformers", "accelerate"),
    }


def _commit() -> str | None:
    """Return the git commit of this source, with ``-dirty`` if files were changed; None outside a repository."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True)
class State:
    folder: Path
    step: int
    progress: dict[str, Any]
    """Content of ``state.json``."""
    tensors: dict[str, Tensor]


def write_state(save_dir: Path, step: int, tensors: dict[str, Tensor], progress: dict[str, Any], keep: int) -> Path:
    """Write the state of a step atomically, then delete all but the ``keep`` newest."""
    folder = save_dir / "state" / f"step-{step:08d}"
    discard_unfinished(folder.with_name("step-*"))
    discard(folder)  # damaged: the run would have gone on from an intact state of this step
    with atomic(folder, folder=True) as temporary:
        save_file(tensors, temporary / "tensors.safetensors")
        content = {"format": FORMAT, "step": step, **progress, "sha256": file_hash(temporary / "tensors.safetensors")}
        _write_content(temporary / "state.json", content)
        for path in [*temporary.iterdir(), temporary]:
            flush(path)
    flush(folder.parent)
    for old in _steps(save_dir)[max(keep, 1) :]:
        shutil.rmtree(old)
    return folder


def add_results(save_dir: Path, step: int, results: Mapping[str, dict[str, Any]], evaluated: bool) -> None:
    """Add the results of evaluations, by drafter, to the saved state of a step, atomically. ``evaluated``: none is missing."""
    file = save_dir / "state" / f"step-{step:08d}" / "state.json"
    content = json.loads(file.read_text())
    for name, found in results.items():
        content["heads"][name] |= found
    with atomic(file) as temporary:
        _write_content(temporary, content | {"evaluated": evaluated})
        flush(temporary)


def find_state(save_dir: Path) -> Path | None:
    """Return the folder of the newest intact state, with a warning for each damaged one; None without states. Raises UserError."""
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
    """Read an intact state. Raises UserError if another version wrote it."""
    progress = json.loads((folder / "state.json").read_text())
    if (found := progress.get("format")) != FORMAT:
        fault = f"{folder} was saved by another version of Headstart (format {found}, this one reads {FORMAT})"
        raise UserError(f"{fault}: resume it with that version, or choose another save.dir")
    return State(folder, progress["step"], progress, load_file(folder / "tensors.safetensors"))


def require_same_recipe(state: State, recipe: dict[str, Any]) -> None:
    """Raise UserError if the saved run's recipe differs in keys other than `MAY_DIFFER`."""
    before, now = flattened(state.progress["recipe"]), flattened(json.loads(json.dumps(recipe)))
    keys = sorted(key for key in {*before, *now} if before.get(key) != now.get(key) and not key.startswith(MAY_DIFFER))
    if keys:
        changes = ", ".join(f"{key} (was {before.get(key)!r}, now {now.get(key)!r})" for key in keys)
        raise UserError(f"{state.folder} was trained by another recipe: {changes}; restore it, or choose another save.dir")


def pack(drafter: Drafter, optimizer: torch.optim.Optimizer, average: Average | None = None) -> dict[str, Tensor]:
    """Return weights, average and optimiser moments under flat names, as unsharded copies on the CPU."""
    tensors: dict[str, Tensor] = {f"drafter/{name}": tensor for name, tensor in drafter.tensors().items()}
    tensors |= {f"average/{name}": tensor for name, tensor in (average.weights if average else {}).items()}
    adapted = {f"adapter/{name}": weight for name, weight in drafter.backbone.trainable.items()}
    tensors |= adapted
    for name, parameter in [*drafter.named_parameters(), *adapted.items()]:
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{name}"] = value
    return {name: full_tensor(tensor.detach()).to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def unpack_drafter(drafter: Drafter, tensors: dict[str, Tensor]) -> None:
    """Load the drafter's weights and its draft vocabulary, and the backbone's adapter."""
    drafter.load_tensors(without_prefix(tensors, "drafter/"))
    adapter, saved = drafter.backbone.trainable, without_prefix(tensors, "adapter/")
    assert saved.keys() == adapter.keys()
    for name, weight in adapter.items():
        weight.detach().copy_(saved[name])


def unpack_optimizer(trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load the moments of all parameters; parameter groups and learning rates are those of the recipe."""
    places = {parameter: i for i, parameter in enumerate(weight for group in optimizer.param_groups for weight in group["params"])}
    state: dict[int, dict[str, Tensor]] = {}
    for flat, tensor in without_prefix(tensors, "optimizer/").items():
        key, name = flat.split("/", 1)
        state.setdefault(places[trained[name]], {})[key] = distribute_like(tensor, trained[name])
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _steps(save_dir: Path) -> list[Path]:
    return sorted((save_dir / "state").glob("step-*"), reverse=True)


def _fault(folder: Path) -> str | None:
    """Describe the damage of a state; None if it is intact."""
    try:
        progress = parse_json((folder / "state.json").read_text("utf-8"), "state.json")
        checksum = file_hash(folder / "tensors.safetensors")
    except OSError as error:
        return f"{Path(error.filename).name} cannot be read"
    except ValueError:
        return "state.json is not JSON"
    if not isinstance(progress, dict) or progress.get("sha256") != checksum:
        return "the checksum of tensors.safetensors is not the one in state.json"
    if progress.get("format") == FORMAT and progress.get("hash") != _content_hash(progress):
        return "state.json is not as it was written"
    return None


def _write_content(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps({**content, "hash": _content_hash(content)}, indent=1))


def _content_hash(content: dict[str, Any]) -> str:
    return value_hash({key: value for key, value in json.loads(json.dumps(content)).items() if key != "hash"})
