"""A folder that another trainer wrote: its configuration, and its tensors by name, read when they are asked for.

Weights are read from safetensors files, in shards too, or from pickles with ``weights_only``, which builds tensors and runs no code.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.inference.serving.quantize import dequantized
from headstart.support import json_text
from headstart.support.errors import UserError
from headstart.support.files import file_hash
from headstart.support.hub import find_folder, inside

FILES = ("*.json", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.model", "*.txt", "*.jinja")
"""What is downloaded of a repository."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PICKLES = ("*.bin", "*.pt", "*.pth")
NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "mask_embedding.pt")
"""Files that trainers and engines put beside the weights."""


@dataclass(frozen=True)
class Foreign:
    """A folder's ``config.json``, and the files and shapes of its tensors."""

    path: str
    """As the user named it."""
    folder: Path
    config: Mapping[str, Any]
    files: Mapping[str, Path]
    """The file of every tensor."""
    shapes: Mapping[str, tuple[int, ...]]
    loaded: Mapping[str, Tensor]
    """Tensors in memory: those of pickles, which are read as a whole, and of quantised files."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return these tensors, on the CPU."""
        found: dict[str, Tensor] = {}
        by_file: dict[Path, list[str]] = {}
        for name in names:
            if name in self.loaded:
                found[name] = self.loaded[name]
            else:
                by_file.setdefault(self.files[name], []).append(name)
        for path, wanted in by_file.items():
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in wanted}
        return found

    def names(self, start: str = "") -> list[str]:
        """Return the names of the tensors that begin with ``start``."""
        return [name for name in self.shapes if name.startswith(start)]

    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of each weights file, by its name."""
        return {path.name: file_hash(path) for path in sorted(set(self.files.values()))}

    def where(self, name: str) -> str:
        """Describe where a tensor is, for messages."""
        return f"{name} {list(self.shapes[name])} in {self.path}"


def read_foreign(path: str) -> Foreign:
    """Read the configuration and the tensors' names and shapes of a folder or hub id. Raises UserError for missing or damaged files."""
    folder = find_folder(path, "heads", FILES)
    config = read_json(folder / "config.json")
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    loaded: dict[str, Tensor] = {}
    for file in _weight_files(folder, path):
        if file.suffix == ".safetensors":
            held: Mapping[str, tuple[int, ...]] = _safetensors_shapes(file)
        else:
            tensors = _unpickled(file)
            held = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            loaded |= tensors
        if twice := sorted(files.keys() & held.keys()):
            raise UserError(f"{path} has the tensor {twice[0]} in {files[twice[0]].name} and in {file.name}; keep one of the files")
        files |= dict.fromkeys(held, file)
        shapes |= held
    found = Foreign(path, folder, config, files, shapes, loaded)
    return _in_full_precision(found) if config.get("quantization_config") else found


def _in_full_precision(foreign: Foreign) -> Foreign:
    """Return the folder with the weights that 8-bit ones stand for, in fp32. Raises UserError for quantisations other than Headstart's."""
    try:
        tensors = dequantized(foreign.config, foreign.read(foreign.shapes))
    except UserError as error:
        raise UserError(f"{foreign.path}: {error}; import the heads that were quantised") from None
    return replace(foreign, shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()}, loaded=tensors)


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError for a missing or damaged file."""
    if not file.is_file():
        raise UserError(f"{file.parent} has no {file.name}; give a folder or hub id of trained heads")
    return json_text.read_json(file, "fetch the heads again")


def _weight_files(folder: Path, path: str) -> list[Path]:
    """List the weights files: those of an index if there is one, else all safetensors, else all pickles."""
    for name in INDEXES:
        if (folder / name).is_file():
            shards = read_json(folder / name).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
                raise UserError(f"{folder / name} has no weight_map of tensors to files; fetch the heads again")
            return [_shard(folder, shard, name) for shard in sorted(set(shards.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        files = sorted({file for pattern in PICKLES for file in folder.glob(pattern)} - {folder / name for name in NOT_WEIGHTS})
    for file in files:
        inside(folder, file.name)
    if not files:
        raise UserError(f"{path} has no weights: no .safetensors, .bin or .pt file; fetch the heads again")
    return files


def _shard(folder: Path, name: str, index: str) -> Path:
    if Path(name).name != name:
        raise UserError(f"{index} in {folder} names the file {name!r} outside of it; fetch the heads from a source that you trust")
    if not inside(folder, name).is_file():
        raise UserError(f"{folder} lacks {name}, which {index} names; fetch the heads again")
    return folder / name


def _safetensors_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is truncated or damaged ({' '.join(str(error).split())[:200]}); fetch the heads again") from None


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):   # of pickle protocols, where the error says it
            found = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        cause = " ".join(str(error).split())[:120]
        raise UserError(f"{file} is no file of tensors alone, or damaged ({cause}); nothing else is unpickled: fetch it again") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    odd = [name for name, tensor in found.items() if not isinstance(tensor, Tensor)] if isinstance(found, dict) else [""]
    if odd:
        raise UserError(f"{file} holds other things than named tensors{f' ({odd[0]})' if odd[0] else ''}; give heads saved as a state dict")
    return {str(name): tensor for name, tensor in found.items()}
