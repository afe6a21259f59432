"""The files of a folder with heads: ``config.json`` and weights, as safetensors or, without unpickling, as torch's own files."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.inference.serving.reference.packed import PARTS, require_known, unpack, whole_names
from headstart.support.errors import UserError
from headstart.support.hub import inside
from headstart.support.json_text import read_json

INDEX = "model.safetensors.index.json"
NOT_HEADS = frozenset({"mask_embedding.pt", "optimizer.pt", "scheduler.pt", "training_args.bin"})
"""Torch files that hold no weights of heads."""


class DamagedError(UserError):
    """A folder that is not what was written: a file is missing, cut short or not readable. The message names it and the likely cause."""


@dataclass(frozen=True)
class Files:
    """The configuration and the names of the tensors of a folder; tensors are read when they are asked for."""

    folder: Path
    config: dict[str, Any]
    homes: Mapping[str, Path]
    """The file of each tensor."""
    pickled: Mapping[str, Tensor] = field(default_factory=dict)
    """The tensors of a folder without safetensors."""

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(whole_names(self.homes) if self.quantised else self.homes)

    @property
    def quantised(self) -> str | None:
        """How the weights are stored in 8 bits; None: they are not. Raises UserError for a way that is not read here."""
        return require_known(self.config)

    def read(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Read these tensors, renamed: ``{new name: name in the file}``. Raises DamagedError."""
        tensors = {}
        for new, name in names.items():
            parts = {part: f"{name}{part}" for part in ("", *PARTS) if f"{name}{part}" in self.homes}
            if self.quantised and "_scale" in parts:
                tensors[new] = unpack({part: self._tensor(stored) for part, stored in parts.items()})
            else:
                tensors[new] = self._tensor(name)
        return tensors

    def _tensor(self, name: str) -> Tensor:
        if name in self.pickled:
            return self.pickled[name]
        try:
            with safe_open(self.homes[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (SafetensorError, OSError) as error:
            raise _cut_short(self.homes[name], error) from None


def read_files(folder: Path) -> Files:
    """Read the configuration and list the tensors. Raises UserError if there is no such folder, DamagedError for damaged files."""
    if not folder.is_dir():
        raise UserError(f"no folder at {folder}; give a folder with config.json and the weights of heads")
    left = sorted(path.name for path in folder.iterdir() if path.name.startswith(".") and path.name.endswith(".tmp"))
    if left:
        raise DamagedError(f"{folder} holds the temporary file {left[0]}: writing it was interrupted (half-written); export it again")
    config = _json(folder / "config.json")
    listed = _json(folder / INDEX).get("weight_map", {}) if (folder / INDEX).is_file() else {}
    for name in sorted(set(listed.values())):
        if not (folder / name).is_file() or Path(name).name != name:
            raise DamagedError(f"{folder / INDEX} lists {name}, which is not in the folder (half-written); export it again")
    homes: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        inside(folder, path.name)
        homes |= dict.fromkeys(_names(path), path)
    if lacking := sorted(set(listed) - set(homes)):
        raise DamagedError(f"{folder} lacks {lacking[0]}, which {INDEX} lists (half-written); export it again")
    if homes:
        return Files(folder, config, homes)
    pickled = _pickled(folder)
    if not pickled:
        raise DamagedError(f"{folder} has a config.json but no weights (*.safetensors, *.bin, *.pt): half-written; export it again")
    return Files(folder, config, dict.fromkeys(pickled, folder), pickled)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DamagedError(f"{path.parent} has no {path.name}: half-written, or not a folder of heads; export it again")
    try:
        return read_json(path, "it may be half-written: export it again")
    except UserError as error:
        raise DamagedError(str(error)) from None


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise _cut_short(path, error) from None


def _pickled(folder: Path) -> dict[str, Tensor]:
    """The tensors of torch files, which are read without running code: ``*.bin``, or else ``*.pt``."""
    for pattern in ("*.bin", "*.pt"):
        tensors: dict[str, Tensor] = {}
        for path in sorted(path for path in folder.glob(pattern) if path.name not in NOT_HEADS):
            inside(folder, path.name)
            try:
                held = torch.load(path, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError:
                fault = f"{path} holds more than tensors, and unpickling it could run code"
                raise UserError(f"{fault}; save its tensors as safetensors") from None
            except (RuntimeError, OSError, EOFError, zipfile.BadZipFile) as error:
                raise _cut_short(path, error) from None
            if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
                raise UserError(f"{path} is no dictionary of tensors; save the state_dict of the heads alone")
            tensors |= held
        if tensors:
            return tensors
    return {}


def _cut_short(path: Path, error: Exception) -> DamagedError:
    cause = " ".join(str(error).split())[:120]
    return DamagedError(f"{path} is cut short or not readable ({cause}): half-written, or copied in part; export it again")
