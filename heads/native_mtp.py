"""Write trained multi-token prediction modules into a copy of the backbone's checkpoint, where serving engines read them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headstart.heads.backbone.native_mtp import checkpoint_folder
from headstart.heads.backbone.weight_files import weight_files
from headstart.heads.mtp import Mtp
from headstart.support.errors import UserError
from headstart.support.files import atomic
from headstart.support.json_text import read_json

NEW_FILE = "model-mtp.safetensors"
"""File of the modules' weights in a checkpoint of several files that has none of them yet."""
INDEX = "model.safetensors.index.json"


def write_back(drafter: Mtp, folder_out: str | Path) -> None:
    """Write a copy of the backbone's checkpoint with the modules' weights, under the names of the drafter's layout.

    Weights that the checkpoint has are replaced, in their dtype; others are added, and the configuration states the number of modules.
    Raises UserError if the folder is not empty, or if the backbone has an adapter.
    """
    source, out = checkpoint_folder(drafter.backbone), Path(folder_out)
    if drafter.backbone.adapter is not None:
        raise UserError("the backbone has an adapter, which its checkpoint lacks: merge it, save the merged model and train on that")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; give a new one for the copy of {source}")
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in drafter.tensors().items()}
    with atomic(out, folder=True) as copy:
        shutil.copytree(source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "*.bin", "*.pt", "*.pth"))
        _write_tensors(copy, tensors)
        _state_count(copy / "config.json", drafter.layout.count_key, len(drafter.mtps))


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace the tensors that the folder's files hold and add the others."""
    files = weight_files(folder)
    new = {name: tensor for name, tensor in tensors.items() if name not in files}
    index = folder / INDEX
    home = folder / NEW_FILE if index.is_file() else next(iter(files.values()))
    targets = {name: files.get(name, home) for name in tensors}
    like = _dtype(next(iter(files.values())))
    for path in sorted({*targets.values()}):
        _rewrite(path, {name: tensors[name] for name, target in targets.items() if target == path}, like)
    if new and index.is_file():
        listed = read_json(index, "fetch the checkpoint again")
        listed["weight_map"] |= dict.fromkeys(new, NEW_FILE)
        if "total_size" in listed.get("metadata", {}):
            listed["metadata"]["total_size"] += sum(tensor.numel() for tensor in new.values()) * like.itemsize
        index.write_text(json.dumps(listed, indent=2) + "\n")


def _rewrite(path: Path, tensors: Mapping[str, Tensor], like: torch.dtype) -> None:
    """Write a file's tensors with these replaced or added, each in the dtype that it has there or else in ``like``."""
    held: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    if path.is_file():
        with safe_open(path, framework="pt") as file:
            held, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or metadata  # noqa: SIM118
    held |= {name: tensor.to(held[name].dtype if name in held else like) for name, tensor in tensors.items()}
    with atomic(path) as temporary:
        save_file(held, temporary, metadata=metadata)


def _dtype(path: Path) -> torch.dtype:
    """The dtype of a file's first tensor of floating-point numbers."""
    with safe_open(path, framework="pt") as file:
        tensors = (file.get_tensor(name) for name in file.keys())  # noqa: SIM118
        return next(tensor.dtype for tensor in tensors if tensor.is_floating_point())


def _state_count(path: Path, key: str, count: int) -> None:
    """State the number of modules in the checkpoint's configuration, unless it states as many already."""
    config = read_json(path, "fetch the checkpoint again")
    text = config.get("text_config", config)
    if (text.get(key) or 0) < count:
        text[key] = count
        path.write_text(json.dumps(config, indent=2) + "\n")
