"""A folder of features: what the backbone knew of every training sample, to be trained from without running it again.

``manifest.json`` says what the features depend on (the backbone by the fingerprint of its weights, taps, what is kept and how,
a hash of every sample) and which samples each shard holds. ``shard-00003-of-00020.safetensors`` is its samples one behind the
other, with the manifest's hash in its header. A shard is renamed into place when it is whole, so what has its name is whole.

Samples are kept as they read alone: packing, batches, their order and the number of processes are the trainer's business.
"""
from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.checkpoint import same_weights
from headstart.support.dtypes import dtype_name
from headstart.support.errors import UserError
from headstart.support.files import value_hash, write_json
from headstart.training.data.batch_sampler import digest
from headstart.training.data.data import Sample
from headstart.training.features.codec import CacheFormat, Encoded
from headstart.training.recipe.recipe import Cache, Data, to_dict

FORMAT = 1
MANIFEST = "manifest.json"
MAKE_SAMPLES = (
    "train", "split", "subset", "limit", "eval", "eval_split", "eval_rows", "format", "column", "max_length", "packing", "overlong",
    "loss_on",
)  # fmt: skip
"""Keys of ``data`` by which samples can differ: they tell why."""
Contents = dict[str, dict[str, Any]]
"""``reading``: what the features of any text depend on. ``samples``: which texts. ``made``: what those were made by."""


def contents(form: CacheFormat, backbone: Backbone) -> Contents:
    """Of features of any texts."""
    return {
        "reading": {f"backbone {key}": value for key, value in backbone.contract().items()}
        | {
            "backbone.dtype": dtype_name(backbone.dtype),
            "cache.dtype": form.store,
            "cache.teacher": f"topk {form.top}" if form.top else "hidden",
            "taps": list(form.taps),
        }
    }


def contents_of(samples: list[Sample], form: CacheFormat, backbone: Backbone, tokenizer: PreTrainedTokenizerBase, data: Data) -> Contents:
    """Of the features of these samples, made of that data."""
    template = data.chat_template or tokenizer.chat_template
    vocabulary = sorted(tokenizer.get_vocab().items())
    return contents(form, backbone) | {
        "samples": {"count": len(samples), "tokens": sum(len(sample.tokens) for sample in samples), "hash": digest(samples)},
        "made": {f"data.{key}": value for key, value in to_dict(data).items() if key in MAKE_SAMPLES}
        | {"chat template": value_hash(template) if template else None, "tokenizer": value_hash(vocabulary)},
    }


def difference(found: Contents, expected: Contents) -> str | None:
    """What is not as it should be, in words; None if nothing. More taps than are asked for do no harm."""
    for key, value in expected["reading"].items():
        got = found["reading"].get(key)
        if key == "backbone weights":
            same = same_weights(got, value)
        else:
            same = set(value) <= set(got or ()) if key == "taps" else got == value
        if not same:
            return _said(key, got, value)
    if expected.get("samples", {}).get("hash") == found.get("samples", {}).get("hash"):
        return None
    for key, value in expected["made"].items():
        if found["made"].get(key) != value:
            return _said(key, found["made"].get(key), value)
    return _said("the rows of data.train", found["samples"], expected["samples"])


def _said(key: str, found: Any, expected: Any) -> str:
    if key == "backbone weights":   # sixty-four numbers say less than where they differ first
        pairs = list(zip(found or [], expected, strict=False))
        found, expected = next((pair for pair in pairs if not same_weights([pair[0]], [pair[1]])), (found, expected))
    return f"{key}: found {found!r}, expected {expected!r}"


@dataclass(frozen=True)
class Manifest:
    folder: Path
    mode: str
    """``full`` or ``lru``."""
    contents: Contents
    shards: tuple[tuple[int, int], ...] = ()
    """First sample of each, and the one behind its last."""

    @cached_property
    def id(self) -> str:
        return value_hash([FORMAT, self.mode, self.contents, self.shards])

    def shard(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}-of-{len(self.shards):05d}.safetensors"

    def write(self) -> None:
        """Into its folder, whole or not at all."""
        content = {"format": FORMAT, "mode": self.mode, "contents": self.contents, "shards": self.shards, "id": self.id}
        write_json(self.folder / MANIFEST, content, indent=1)

    def require(self, expected: Contents, mode: str) -> None:
        """Raise UserError unless this is a cache of that."""
        what = f"cache.mode: found {self.mode!r}, expected {mode!r}" if self.mode != mode else difference(self.contents, expected)
        if what is not None:
            raise UserError(f"{self.folder} is a cache of something else: {what}; restore that, or choose another cache.dir")

    def missing(self) -> list[int]:
        return [number for number in range(len(self.shards)) if not self.shard(number).exists()]


def read_manifest(folder: Path) -> Manifest | None:
    """None where there is none. Raises UserError for one that cannot be read."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise UserError(f"{path} is of format {content['format']}; this version reads format {FORMAT}: write the cache again")
        shards = tuple((first, end) for first, end in content["shards"])
        found = Manifest(folder, content["mode"], content["contents"], shards)
        if found.id != content["id"]:
            raise ValueError("its id does not fit its contents")
        return found
    except FileNotFoundError:
        if folder.is_dir() and any(folder.glob("*.safetensors")):
            raise UserError(f"{folder} holds shards but no {MANIFEST}: no cache that can be read; choose another cache.dir") from None
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); delete {folder} and write the cache again") from None


def plan(samples: Sequence[Sample], form: CacheFormat, shard_mb: int) -> tuple[tuple[int, int], ...]:
    """Which samples each shard holds: as many as have about that size."""
    shards, first, size = [], 0, 0
    for i, sample in enumerate(samples):
        size += size_of(sample, form)
        if size >= shard_mb * 2**20 or i + 1 == len(samples):
            shards.append((first, i + 1))
            first, size = i + 1, 0
    return tuple(shards)


def size_of(sample: Sample, form: CacheFormat) -> int:
    return form.size(len(sample.tokens), int(sample.loss_mask[1:].sum()))


class Shards:
    """Reads samples out of the shards of a whole cache. Raises UserError at once for a shard that is missing or another's."""

    OPEN = 64
    """Files held open at most."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.ends = [end for _, end in manifest.shards]
        self.files: dict[int, tuple[Any, list[int], list[int]]] = {}
        if missing := manifest.missing():
            names = f"{manifest.shard(missing[0]).name}{', ...' if len(missing) > 1 else ''}"
            raise UserError(
                f"{manifest.folder} is not finished: found {len(self.ends) - len(missing)} shards, expected {len(self.ends)} "
                f"(missing: {names}); run headstart cache with this recipe to go on with it"
            )
        for number in range(len(self.ends)):
            open_shard(manifest, number)

    def sample(self, index: int) -> Encoded:
        """One sample, on the CPU."""
        number = bisect.bisect_right(self.ends, index)
        file, tokens, learned = self._file(number)
        place = index - self.manifest.shards[number][0]
        return {
            name: file.get_slice(name)[slice(*_range(name, place, tokens, learned))]
            for name in file.keys()  # noqa: SIM118  (a file is no mapping)
        }

    def _file(self, number: int) -> tuple[Any, list[int], list[int]]:
        """With where each sample's positions, and its learned ones, begin."""
        if number in self.files:
            self.files[number] = self.files.pop(number)   # the last one used stands last
        else:
            file = open_shard(self.manifest, number)
            starts = [[0, *file.get_tensor(name).cumsum(0).tolist()] for name in ("tokens", "learned")]
            self.files[number] = (file, *starts)
            if len(self.files) > self.OPEN:
                del self.files[next(iter(self.files))]
        return self.files[number]


def _range(name: str, place: int, tokens: list[int], learned: list[int]) -> tuple[int, int]:
    """Rows of an array that are the sample's: one a sample, one a learned position, or one a position."""
    if name in ("tokens", "learned") or name.endswith(".channel"):
        return place, place + 1
    starts = learned if name.startswith("top.") else tokens
    return starts[place], starts[place + 1]


def open_shard(manifest: Manifest, number: int) -> Any:
    """A shard's file. Raises UserError if it is damaged or another cache's."""
    path = manifest.shard(number)
    try:
        file = safe_open(path, "pt")
        header = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it and run headstart cache with this recipe again") from None
    if (found := header.get("cache")) != manifest.id:
        raise UserError(
            f"{path.name} in {manifest.folder} is a shard of another cache: found {found}, expected {manifest.id}; "
            "delete it and run headstart cache with this recipe again"
        )
    return file


def form_of(cache: Cache, backbone: Backbone, taps: tuple[int, ...]) -> CacheFormat:
    """What a recipe wants kept, for a drafter that reads those taps."""
    top = min(cache.top_k, backbone.vocab) if cache.teacher == "topk" else None
    return CacheFormat(tuple(sorted(taps)), backbone.dim, backbone.vocab, backbone.dtype, cache.dtype, top)


def written_form(form: CacheFormat, manifest: Manifest) -> CacheFormat:
    """The form as it is on disk, where there may be more taps than are asked for."""
    return replace(form, taps=tuple(manifest.contents["reading"]["taps"]))
