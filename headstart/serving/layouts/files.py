"""Folders of heads: reading the configuration and the tensors of one, and writing a new one as a whole.

Weights are read from safetensors files, in shards too, or from pickles with ``weights_only``, which builds tensors and runs no code.
"""

import json
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headstart.heads.backbone.adapter import ADAPTER_CONFIG
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.support.errors import UserError, cause
from headstart.support.files import atomic
from headstart.support.hub import find_folder, inside
from headstart.support.json_text import read_json

PROVENANCE = "headstart_export.json"
"""File of an exported folder that says what was exported, for `headstart verify`."""
DOWNLOADED = ("*.json", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.model", "*.txt", "*.jinja")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PICKLES = ("*.bin", "*.pt", "*.pth")
NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "mask_embedding.pt")
"""Files that trainers and engines put beside the weights."""
AGAIN = "half-written, or copied in part; fetch or export it again"


class DamagedError(UserError):
    """A folder that is not what was written: a file is missing, cut short or contradicts another. The message names it and the cause."""


@dataclass(frozen=True)
class Files:
    """A folder's ``config.json``, and the files and shapes of its tensors, which are read when they are asked for."""

    path: str
    """As the user named it."""
    folder: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    homes: Mapping[str, Path] = field(default_factory=dict)
    """The file of every tensor."""
    loaded: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors in memory: those of pickles, which are read as a whole, and of quantised files."""

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return these tensors, or all, on the CPU. Raises DamagedError."""
        wanted = list(self.shapes if names is None else names)
        found = {name: self.loaded[name] for name in wanted if name in self.loaded}
        for path in dict.fromkeys(self.homes[name] for name in wanted if name not in found):
            with _opened(path) as file:
                found |= {name: file.get_tensor(name) for name in wanted if self.homes.get(name) == path}
        return found

    def names(self, start: str = "") -> list[str]:
        """Return the names of the tensors that begin with ``start``."""
        return [name for name in self.shapes if name.startswith(start)]


def read_files(path: str | Path) -> Files:
    """Read the configuration and the tensors' names and shapes of a folder or hub id. Raises UserError, for damage DamagedError."""
    folder = find_folder(path, "heads", DOWNLOADED)
    if left := sorted(path.name for path in folder.iterdir() if path.name.startswith(".") and path.name.endswith(".tmp")):
        raise DamagedError(f"{folder} holds the temporary file {left[0]}: writing it was interrupted (half-written); export it again")
    if (ggufs := sorted(folder.glob("*.gguf"))) and not (folder / "config.json").exists():
        return _of_gguf(str(path), ggufs[0])
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists():
        kind = "a PEFT adapter of a language model (adapter_config.json), as Uno's heads are, and drafts with the whole backbone"
        raise UserError(f"{path} holds {kind}, which heads here do not: import heads of another method; a fine-tune is a backbone.adapter")
    config = _json(folder / "config.json")
    homes: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    loaded: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        if file.suffix == ".safetensors":
            with _opened(file) as opened:
                held = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        else:
            loaded |= (tensors := _unpickled(file))
            held = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if twice := sorted(homes.keys() & held.keys()):
            raise UserError(f"{path} has the tensor {twice[0]} in {homes[twice[0]].name} and in {file.name}; keep one of the files")
        homes |= dict.fromkeys(held, file)
        shapes |= held
    files = Files(str(path), folder, config, shapes, homes, loaded)
    if stated_format(config) is None:
        return files
    tensors = dequantized(config, files.read())
    return replace(files, shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()}, loaded=tensors)


def _of_gguf(path: str, file: Path) -> Files:
    """Return the metadata of a GGUF file, without its architecture's prefix, and its tensors as they are stored or in fp32."""
    found = find_gguf(str(file))
    assert found is not None
    import gguf

    tensors = {}
    for stored in gguf.GGUFReader(file).tensors:
        kind = stored.tensor_type.name
        values = stored.data if kind in ("I32", "I64") else gguf.quants.dequantize(stored.data, stored.tensor_type)
        tensors[stored.name] = torch.from_numpy(values.copy()).to({"F16": torch.float16, "BF16": torch.bfloat16}.get(kind))
    config = {key.removeprefix(f"{found.architecture}."): value for key, value in found.header.metadata.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Files(path, file.parent, config, shapes, dict.fromkeys(tensors, file), tensors)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise DamagedError(f"{file.parent} has no {file.name}: half-written, or not a folder of heads; give one, or export them again")
    try:
        return read_json(file, "it may be half-written: fetch or export it again")
    except UserError as error:
        raise DamagedError(str(error)) from None


def _weight_files(folder: Path) -> list[Path]:
    """List the weights files: those of an index if there is one, else all safetensors, else all pickles."""
    for index in INDEXES:
        if (folder / index).is_file():
            shards = _json(folder / index).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
                raise DamagedError(f"{folder / index} has no weight_map of tensors to files; {AGAIN}")
            for name in sorted(set(shards.values())):
                if Path(name).name != name:
                    raise UserError(f"{index} in {folder} names the file {name!r} outside of it; fetch the heads from one that you trust")
                if not inside(folder, name).is_file():
                    raise DamagedError(f"{folder} lacks {name}: {index} lists {name}, which is not in the folder (half-written); {AGAIN}")
            return [folder / name for name in sorted(set(shards.values()))]
    found = sorted(folder.glob("*.safetensors"))
    found = found or sorted({file for pattern in PICKLES for file in folder.glob(pattern)} - {folder / name for name in NOT_WEIGHTS})
    if not found:
        raise DamagedError(f"{folder} has a config.json but no weights (*.safetensors, *.bin, *.pt): {AGAIN}")
    return [inside(folder, file.name) for file in found]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises DamagedError, also for what is wrong with it while it is open."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise _cut_short(file, error) from None


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):  # of pickle protocols, where the error says it
            found = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise _cut_short(file, error) from None
    except (pickle.UnpicklingError, ValueError) as error:
        fault = f"{file} is no file of tensors alone, or damaged ({cause(error, 120)})"
        raise UserError(f"{fault}; nothing else is unpickled: fetch it again") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    odd = [name for name, tensor in found.items() if not isinstance(tensor, Tensor)] if isinstance(found, dict) else [""]
    if odd:
        raise UserError(f"{file} holds other things than named tensors{f' ({odd[0]})' if odd[0] else ''}; give heads saved as a state dict")
    return {str(name): tensor for name, tensor in found.items()}


def _cut_short(file: Path, error: Exception) -> DamagedError:
    return DamagedError(f"{file} is cut short: it is truncated or damaged ({cause(error, 200)}), {AGAIN}")


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = "model.safetensors", pickled: str | None = None
) -> None:
    """Write ``config.json`` and the tensors into an existing folder; ``pickled``: a second file of them, which is no safetensors.

    Raises UserError for a tensor that holds a NaN or an infinite value.
    """
    require_finite(tensors)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}  # safetensors refuses shared memory
    with atomic(folder / file) as temporary:  # which gives it the usual permissions
        save_file(tensors, temporary, metadata={"format": "pt"})
    if pickled is not None:
        torch.save(tensors, folder / pickled)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` when the block ends and is removed on an error.

    Raises UserError if ``folder`` exists and is not an empty folder, or cannot be written.
    """
    require_new(folder)
    try:
        with atomic(folder, folder=True) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:  # such as a full disk
        raise UserError(f"cannot write {folder} ({cause(error, 200)}); nothing is written: make room or choose another folder") from None


def require_new(folder: Path) -> None:
    """Raise UserError if ``folder`` exists and is not an empty folder, or if it lies inside a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; give a new one")
    if files := [parent for parent in folder.absolute().parents if parent.is_file()]:
        raise UserError(f"{folder} cannot be written: {files[0]} is a file; give a new folder")


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError naming the first tensor that holds a NaN or an infinite value."""
    for name, tensor in tensors.items():
        values = tensor.float() if tensor.element_size() == 1 else tensor  # isfinite takes no 8-bit floats
        if tensor.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise UserError(f"tensor {name} holds NaN or infinite values, so it is damaged or training diverged; nothing is written")


# Weights in 4 or 8 bits, in the layout of compressed-tensors, and the fp32 weights that they stand for: ``weight`` (8 bits a value) or
# ``weight_packed`` and ``weight_shape`` (several values in each int32) stand beside ``weight_scale``.

READ = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
"""Formats of compressed-tensors that are read: values of one number each with a scale."""
ASYMMETRIC = ("_zero_point", "_g_idx")
PARTS = ("_scale", "_shape", *ASYMMETRIC)
"""Ends of the names of what stands beside a weight's values."""
GIVE = "give the heads that were quantised"


def stated_format(config: Mapping[str, Any]) -> str | None:
    """Return how the weights of a folder are quantised; None: not at all. Raises UserError for a way that is not read here."""
    stated = config.get("quantization_config")
    if not stated:
        return None
    how, method = stated.get("format"), stated.get("quant_method")
    sparse = (stated.get("sparsity_config") or {}).get("format") not in (None, "dense")
    if method != "compressed-tensors" or how not in READ or sparse or stated.get("transform_config"):
        named = f"{method} {how or ''}".strip() + (" with other weights left out or rotated" if how in READ else "")
        raise UserError(f"the heads are quantised by {named}; read are compressed-tensors' {', '.join(READ)}: {GIVE}")
    return str(how)


def dequantized(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a quantised folder with the weights that the values stand for, in fp32; others are as they are.

    Values of 4 or 8 bits with a scale per tensor, row or block of a row. Raises UserError for any others.
    """
    assert stated_format(config) is not None
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        base = name.removesuffix("_packed")
        scaled = next((name.removesuffix(end) for end in PARTS if name.endswith(end)), None)
        if f"{base}_scale" in tensors:
            values = tensor if name == base else _unpacked(name, tensor, tensors.get(f"{base}_shape"))
            found[base] = values.float() * _spread(name, tensors[f"{base}_scale"], values.shape)
        elif scaled is None or f"{scaled}_scale" not in tensors:
            found[name] = tensor
        elif name.endswith(ASYMMETRIC) and bool(tensor.any()):
            raise UserError(f"{name}: values with zero points or in the order of activations are not read; {GIVE}")
    return found


def _unpacked(name: str, packed_OP: Tensor, shape: Tensor | None) -> Tensor:
    """Return the whole numbers of a weight, of which each int32 holds 4 or 8, the first one in its lowest bits."""
    rows, width = (0, 0) if shape is None or len(shape) != 2 else shape.tolist()
    bits = next((bits for bits in (8, 4) if packed_OP.shape == (rows, -(-width * bits // 32))), None)
    if bits is None or packed_OP.dtype != torch.int32:
        raise UserError(f"{name} {list(packed_OP.shape)} holds no values of 4 or 8 bits for a weight of {rows} x {width}; {GIVE}")
    parts = packed_OP[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32) & (1 << bits) - 1
    return parts.flatten(1)[:, :width] - (1 << bits - 1)


def _spread(name: str, scale: Tensor, shape: torch.Size) -> Tensor:
    """Return a weight's scales, one for each value or one that fits all of a dimension."""
    scale = scale.float().reshape(scale.shape if scale.dim() == 2 else (-1, 1))
    if scale.dim() != len(shape) or any(size % count for size, count in zip(shape, scale.shape, strict=True)):
        raise UserError(f"{name}: {list(scale.shape)} scales do not divide a weight of {list(shape)} evenly; {GIVE}")
    for dim, size in enumerate(shape):
        scale = scale.repeat_interleave(size // scale.shape[dim], dim) if scale.shape[dim] > 1 else scale
    return scale
