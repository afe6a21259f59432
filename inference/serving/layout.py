"""The contents of an exported folder, checked and written as a whole: ``config.json``, one file of weights, further files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headstart.support.errors import UserError
from headstart.support.files import atomic


@dataclass(frozen=True)
class Layout:
    """A folder for a serving engine, in memory."""

    config: dict[str, Any]
    """``config.json``."""
    tensors: dict[str, Tensor]
    weights_file: str
    """Name of the safetensors file of the tensors."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Further files by their path inside the folder, with forward slashes."""
    pickled_file: str | None = None
    """Name of a second file of the same tensors, written by ``torch.save`` for engines that read no safetensors."""


def write_layout(layout: Layout, folder: Path) -> None:
    """Write a new folder; it appears when it is complete. Raises UserError if it exists and is not empty, or for a NaN in a tensor."""
    with new_folder(folder) as temporary:
        write_files(layout, temporary)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` when the block ends and is removed on an error.

    Raises UserError if ``folder`` exists and is not an empty folder, or cannot be written.
    """
    require_new(folder)
    try:
        with atomic(folder, folder=True) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:   # such as a full disk
        cause = " ".join(str(error).split())[:200]
        raise UserError(f"cannot write {folder} ({cause}); nothing is written: make room or choose another folder") from None


def require_new(folder: Path) -> None:
    """Raise UserError if ``folder`` exists and is not an empty folder, or if it lies inside a file."""
    if folder.is_file() or folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not an empty folder; give a new one")
    if files := [parent for parent in folder.absolute().parents if parent.is_file()]:
        raise UserError(f"{folder} cannot be written: {files[0]} is a file; give a new folder")


def write_files(layout: Layout, folder: Path) -> None:
    """Write a layout's files into an existing folder and compare the weights with what is in the file then.

    Raises UserError for a tensor that holds a NaN or an infinite value.
    """
    require_finite(layout.tensors)
    tensors = _separate(layout.tensors)
    with atomic(folder / layout.weights_file) as file:   # which gives it the usual permissions
        save_file(tensors, file, metadata={"format": "pt"})
    if layout.pickled_file is not None:
        torch.save(tensors, folder / layout.pickled_file)
    for name, content in layout.files.items():
        path = folder / inside(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "config.json").write_text(json.dumps(layout.config, indent=2) + "\n", encoding="utf-8")
    _require_written(tensors, folder / layout.weights_file)


def inside(name: str) -> str:
    """Return ``name`` if it is a relative path that stays in its folder; anything else is our mistake."""
    path = PurePosixPath(name)
    assert not path.is_absolute() and path.parts and ".." not in path.parts, name
    return name


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError naming the first tensor that holds a NaN or an infinite value."""
    for name, tensor in tensors.items():
        values = tensor.float() if tensor.element_size() == 1 else tensor   # isfinite takes no 8-bit floats
        if tensor.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise UserError(f"tensor {name} holds NaN or infinite values, so it is damaged or training diverged; nothing is written")


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, contiguous, none sharing memory with another, which safetensors refuses."""
    own: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if pointer in seen or tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        seen.add(pointer)
    return own


def _require_written(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Hold that the file has exactly these tensors, by name and shape."""
    with safe_open(path, framework="pt") as file:
        written = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert written == {name: list(tensor.shape) for name, tensor in tensors.items()}, path
