"""The header of a GGUF file (llama.cpp's format): metadata, and name, type and size of each tensor. No weights are read.

The package ``gguf`` reads it too, but makes an array of every token and merge of the vocabulary first, which takes seconds.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by the type of a value."""
TEXT, ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    type: str
    """ggml's name of how it is stored, such as F32, Q4_1 or Q6_K."""
    elements: int
    place: int
    """First byte in the file."""
    size: int
    """Bytes in the file."""


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Any]
    """Values by key; of arrays of text, which hold the vocabulary, the length, unless asked for."""
    tensors: dict[str, StoredTensor]
    end: int
    """Bytes that the file has by what its header says."""


def read_header(path: Path, texts: Container[str] = ()) -> GgufHeader:
    """Read a file's header, with the arrays of text of these keys. Raises ValueError for a file that is none, OSError if not readable."""
    if path.stat().st_size < 24:
        raise ValueError(f"{path.stat().st_size} bytes are no GGUF file")
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        try:
            return _Reader(data, texts).header()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ValueError(f"its header is cut short or damaged: {error}") from None


class _Reader:
    """Reads from the place that it has reached."""

    def __init__(self, data: mmap, texts: Container[str]) -> None:
        self.data, self.place, self.texts = data, 0, texts

    def header(self) -> GgufHeader:
        if self.data[:4] != MAGIC:
            raise ValueError(f"it begins with {self.data[:4]!r}, not with {MAGIC!r}")
        self.place = 4
        if (version := self.number("I")) not in VERSIONS:
            raise ValueError(f"it is of version {version}, or big-endian; little-endian files of version 2 and 3 are read")
        tensors, values = self.number("Q"), self.number("Q")
        metadata = {}
        for _ in range(values):
            key = self.text()
            metadata[key] = self.value(self.number("I"), key in self.texts)
        infos = [self.info() for _ in range(tensors)]
        alignment = int(metadata.get("general.alignment") or 32)
        start = -(-self.place // alignment) * alignment
        found = {name: StoredTensor(kind, elements, start + offset, size) for name, kind, elements, offset, size in infos}
        return GgufHeader(metadata, found, max([start, *(tensor.place + tensor.size for tensor in found.values())]))

    def number(self, form: str) -> Any:
        [value] = struct.unpack_from(f"<{form}", self.data, self.place)
        self.place += struct.calcsize(f"<{form}")
        return value

    def text(self) -> str:
        return self.skip(self.number("Q")).decode()

    def skip(self, length: int) -> bytes:
        self.place += length
        if self.place > len(self.data):
            raise struct.error(f"it ends before byte {self.place:,}")
        return self.data[self.place - length : self.place]

    def value(self, kind: int, whole: bool) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"its header holds a value of type {kind}")
        element, count = self.number("I"), self.number("Q")
        if element in SCALARS:
            form = f"<{count}{SCALARS[element]}"
            return list(struct.unpack(form, self.skip(struct.calcsize(form))))
        if element != TEXT:
            raise ValueError(f"its header holds an array of type {element}")
        if whole:
            return [self.text() for _ in range(count)]
        for _ in range(count):
            self.skip(self.number("Q"))
        return count

    def info(self) -> tuple[str, str, int, int, int]:
        """Return name, type, elements, offset and bytes of a tensor."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # checked before: see `gguf_file`

        name = self.text()
        shape = [self.number("Q") for _ in range(self.number("I"))]
        kind, offset = GGMLQuantizationType(self.number("I")), self.number("Q")
        elements, (block, size) = prod(shape), GGML_QUANT_SIZES[kind]
        return name, kind.name, elements, offset, elements // block * size
