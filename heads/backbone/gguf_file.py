"""GGUF files (llama.cpp's format) as backbones: found by their path, checked and described by their header.

transformers reads the weights, by the package ``gguf``, and they are dequantized: the backbone is an ordinary model, whose weights are
those of the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partialmethod
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from headstart.heads.backbone.fingerprint import bits_of
from headstart.support.devices import dtype_name
from headstart.support.errors import UserError, cause
from headstart.support.hub import cut_off, reaching, resolve
from headstart.support.text import gigabytes

if TYPE_CHECKING:
    from headstart.heads.backbone.gguf_header import GgufHeader

SUFFIX = ".gguf"
PIECE = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that is there and whole."""

    path: Path
    size: int
    """Its bytes."""
    header: GgufHeader

    @property
    def architecture(self) -> str:
        return str(self.header.metadata.get("general.architecture"))

    @cached_property
    def types(self) -> dict[str, int]:
        """Number of tensors of each type, that of most weights first."""
        weights: Counter[str] = Counter()
        for tensor in self.header.tensors.values():
            weights[tensor.type] += tensor.elements
        counts = Counter(tensor.type for tensor in self.header.tensors.values())
        return {kind: counts[kind] for kind, _ in weights.most_common()}

    @property
    def type(self) -> str:
        """The type of most weights, such as Q4_1."""
        return next(iter(self.types), "empty")

    @property
    def stored(self) -> list[str] | None:
        """Types of the embedding and the output layer (fingerprint.py), if either is stored in blocks."""
        embedding = self.header.tensors["token_embd.weight"].type if "token_embd.weight" in self.header.tensors else ""
        output = self.header.tensors["output.weight"].type if "output.weight" in self.header.tensors else embedding
        return [embedding, output] if bits_of(embedding) or bits_of(output) else None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the model as its contract names them, by the header alone; transformers takes seconds for a configuration."""
        width, embedding = self.header.metadata.get(f"{self.architecture}.embedding_length"), self.header.tensors.get("token_embd.weight")
        return {"hidden_size": width, "vocab_size": embedding.elements // width} if width and embedding else {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it is loaded in by default: that of its weights, or bf16 if they are quantized."""
        return {"F32": torch.float32, "F16": torch.float16}.get(self.type, torch.bfloat16)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of transformers' ``from_pretrained``."""
        return {"pretrained_model_name_or_path": str(self.path.parent), "gguf_file": self.path.name}

    def memory(self, dtype: torch.dtype) -> int:
        """Bytes of the dequantized weights."""
        return sum(tensor.elements for tensor in self.header.tensors.values()) * dtype.itemsize

    def described(self, dtype: torch.dtype) -> str:
        size, memory = (gigabytes(count) for count in (self.size, self.memory(dtype)))
        return f"{self.path.name}, {self.type}, {size}; dequantized to {dtype_name(dtype)} {memory} of memory"

    def describe_in(self, model: PreTrainedModel, path: str) -> None:
        """Let the model know where it is from, ``path`` or the file in that folder, and that it is dequantized."""
        model.config.name_or_path = str(self.path) if Path(path).is_dir() else path
        vars(model.config).pop("quantization_config", None)

    @property
    def provenance(self) -> dict[str, Any]:
        return {"file": self.path.name, "bytes": self.size, "architecture": self.architecture, "types": self.types}


@contextmanager
def quick_reader() -> Iterator[None]:
    """Within this context transformers reads a file in a fourth of the time, and shows no progress bar (`waiting` says how long it takes).

    The package makes a memmap of every token of a vocabulary, which takes four times as long as an array. transformers has it make the
    table of tensor names again for every module, in a time that grows with the square of the layers (6 s for 30): here it is made once.
    Without ``attention.head_count_kv`` it leaves the weights of a Llama in llama.cpp's order: here there are as many as heads.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            own = self.fields["general.architecture"].contents() if "general.architecture" in self.fields else ""
            if (heads := self.fields.get(f"{own}.attention.head_count")) is not None:
                self.fields.setdefault(f"{own}.attention.head_count_kv", heads)

        data = property(lambda self: self._data, lambda self, mapped: setattr(self, "_data", mapped.view(np.ndarray)))

    original = gguf.GGUFReader, gguf.get_tensor_name_map, tqdm.__init__
    gguf.GGUFReader, gguf.get_tensor_name_map = Reader, lru_cache(maxsize=4)(gguf.get_tensor_name_map)
    tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map, tqdm.__init__ = original


def find_gguf(path: str) -> GgufFile | None:
    """Return the GGUF file that a backbone's path names: a file, a folder that holds one and no safetensors, or ``USER/REPO/FILE.gguf``
    on the hub, which is downloaded; None for other backbones.

    Raises UserError for a file that is missing, damaged or one of several pieces, several files, and without the package ``gguf``.
    """
    file = _find(path)
    if file is None:
        return None
    require_package(path)
    status = file.stat()
    return _read(file, status.st_size, status.st_mtime_ns)


def require_package(path: str) -> None:
    """Raise UserError without the package ``gguf``."""
    if find_spec("gguf") is None:
        raise UserError(f"{path} is a GGUF file, which takes the package gguf: pip install 'headstart[gguf]'")


def _find(path: str) -> Path | None:
    place, named = Path(resolve(path)).expanduser(), path.lower().endswith(SUFFIX)
    try:
        folder = bool(path) and place.is_dir()
    except OSError:  # no name that a file can have
        return None
    if named and not folder:
        return place if place.is_file() else _fetched(path)
    if not folder or any(place.glob("*.safetensors")):
        return None
    files = sorted(file for file in place.iterdir() if file.suffix.lower() == SUFFIX)
    if len(files) > 1 and not PIECE.search(files[0].name):
        names = ", ".join(file.name for file in files[:8])
        raise UserError(f"{path} holds {len(files)} GGUF files; name one: {path}/FILE, or backbone.gguf_file=FILE (there are {names})")
    return files[0] if files else None


@lru_cache(maxsize=8)
def _fetched(path: str) -> Path:
    """Return the file ``USER/REPO/FILE.gguf`` of the hub, downloaded."""
    user, _, rest = path.partition("/")
    repo, _, name = rest.partition("/")
    if not name or user in ("", ".", "..", "~") or Path(user).exists():
        raise UserError(f"no GGUF file at {path!r}; give the path of a file, or USER/REPO/FILE.gguf on the hub")
    try:
        with reaching(f"{user}/{repo}"):
            return Path(hf_hub_download(f"{user}/{repo}", name))
    except Exception as error:  # of many libraries: no network, no such repository or file, no login
        away = cut_off(f"{user}/{repo}") or f"not on the hub ({cause(error, 200)})"
        raise UserError(f"no GGUF file at {path!r}: no such file here, and {away}; give the path of a file") from None


@lru_cache(maxsize=8)
def _read(file: Path, size: int, changed: int) -> GgufFile:
    """Read the header of a file of that size and time of change."""
    from headstart.heads.backbone.gguf_header import read_header  # here, since few backbones are such files

    try:
        header = read_header(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is no GGUF file that can be read: {cause(error, 200)}; fetch it again") from None
    if header.metadata.get("split.count", 1) not in (0, 1) or PIECE.search(file.name):
        raise UserError(f"{file} is a piece of a split file; join the pieces first: llama-gguf-split --merge FIRST_PIECE WHOLE.gguf")
    if size < header.end:
        raise UserError(f"{file} is cut short: it has {size:,} bytes of the {header.end:,} that its header states; fetch it again")
    return GgufFile(file, size, header)
