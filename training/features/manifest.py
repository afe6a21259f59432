"""A feature cache on disk: the backbone's hidden states of all training samples, to train without running it again.

``manifest.json`` lists what the features depend on (a fingerprint of the backbone's weights, taps, format, a hash of all samples)
and the samples of each shard. ``shard-00003-of-00020.safetensors`` holds its samples concatenated, with the manifest's id in its
header. Shards are renamed into place when complete.

Features are those of each sample alone, so packing, batches, their order and the number of processes may change.
"""

import bisect
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from headstart.chat.template import template_hash
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.fingerprint import same_weights
from headstart.support.devices import dtype_name
from headstart.support.errors import UserError
from headstart.support.files import value_hash, write_json
from headstart.support.hub import inside
from headstart.support.json_text import read_json
from headstart.training.data.batches import samples_hash
from headstart.training.data.samples import Sample
from headstart.training.data.tokenise import chat_settings
from headstart.training.features.codec import CacheFormat, Record
from headstart.training.recipe.recipe import Data, to_dict

FORMAT = 4
MANIFEST = "manifest.json"
MAX_OPEN = 64
"""Shards that a reader holds open."""
SAMPLE_KEYS = (
    "train", "split", "subset", "limit", "eval", "eval_split", "eval_rows", "format", "column", "columns", "images", "max_length",
    "packing", "overlong", "loss_on", "template_kwargs", "template_time",
)  # fmt: skip
"""Keys of ``data`` that determine the samples; stored so that an error can name the one that changed."""
Contents = dict[str, dict[str, Any]]
"""``features``: dependencies of all features; ``samples``: their count and hash; ``data``: the settings that determine them."""


def contents_of(samples: list[Sample], form: CacheFormat, backbone: Backbone, tokenizer: PreTrainedTokenizerBase, data: Data) -> Contents:
    """Describe what a cache of these samples' features depends on."""
    template = template_hash(chat_settings(data).template_of(tokenizer))
    vocabulary = sorted(tokenizer.get_vocab().items())
    return {
        "features": {f"backbone {key}": value for key, value in backbone.contract().items()}
        | {
            "backbone.dtype": dtype_name(backbone.dtype),
            "backbone.adapter": backbone.adapter_digest,
            "cache.dtype": form.dtype,
            "taps": list(form.taps),
        },
        "samples": {"count": len(samples), "tokens": sum(len(sample.tokens) for sample in samples), "hash": samples_hash(samples)},
        "data": {f"data.{key}": value for key, value in to_dict(data).items() if key in SAMPLE_KEYS}
        | {"chat template": template, "tokenizer": value_hash(vocabulary)},
    }


def difference(actual: Contents, expected: Contents) -> str | None:
    """Describe the first difference; None if there is none. Extra taps are allowed."""
    for key, value in expected["features"].items():
        other = actual["features"].get(key)
        if key == "backbone weights":
            same = same_weights(other, value)
        else:
            same = set(value) <= set(other or ()) if key == "taps" else other == value
        if not same:
            return _describe(key, other, value)
    if expected["samples"]["hash"] == actual["samples"]["hash"]:
        return None
    for key, value in expected["data"].items():
        if actual["data"].get(key) != value:
            return _describe(key, actual["data"].get(key), value)
    return _describe("the rows of data.train", actual["samples"], expected["samples"])


def _describe(key: str, actual: Any, expected: Any) -> str:
    if key == "backbone weights":  # report only the first differing pair of the fingerprints' 64 values
        pairs = list(zip(actual or [], expected, strict=False))
        actual, expected = next((pair for pair in pairs if not same_weights([pair[0]], [pair[1]])), (actual, expected))
    return f"{key}: found {actual!r}, expected {expected!r}"


@dataclass(frozen=True)
class Manifest:
    folder: Path
    contents: Contents
    shards: tuple[tuple[int, int], ...]
    """(first sample, last sample + 1) of each shard."""

    @cached_property
    def id(self) -> str:
        return value_hash([FORMAT, self.contents, self.shards])

    @property
    def taps(self) -> tuple[int, ...]:
        """Those that are stored, which may be more than a recipe asks for."""
        return tuple(self.contents["features"]["taps"])

    def shard(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}-of-{len(self.shards):05d}.safetensors"

    def write(self) -> None:
        write_json(self.folder / MANIFEST, {"format": FORMAT, "contents": self.contents, "shards": self.shards, "id": self.id}, indent=1)

    def require(self, expected: Contents) -> None:
        """Raise UserError unless the cache has these contents."""
        changed = difference(self.contents, expected)
        if changed is not None:
            raise UserError(f"{self.folder} is a cache of something else: {changed}; restore that, or choose another cache.dir")

    def missing(self) -> list[int]:
        """Return the numbers of the shards not written yet."""
        return [number for number in range(len(self.shards)) if not self.shard(number).exists()]


def read_manifest(folder: Path) -> Manifest | None:
    """Read a cache's manifest; None if there is none. Raises UserError if it cannot be read."""
    path = folder / MANIFEST
    if not path.exists():
        if folder.is_dir() and any(folder.glob("*.safetensors")):
            raise UserError(f"{folder} holds shards but no {MANIFEST}: no cache that can be read; choose another cache.dir")
        return None
    try:
        content = read_json(path, f"delete {folder} and write the cache again")
        if content["format"] != FORMAT:
            raise UserError(f"{path} is of format {content['format']}; this version reads format {FORMAT}: write the cache again")
        manifest = Manifest(folder, content["contents"], tuple((first, end) for first, end in content["shards"]))
        if manifest.id != content["id"]:
            raise ValueError("its id does not match its contents")
        return manifest
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); delete {folder} and write the cache again") from None


def cached_time(folder: Path) -> str | None:
    """Return the instant that a cache's chat template printed, if there is a cache and the template prints dates."""
    manifest = read_manifest(folder)
    return None if manifest is None else manifest.contents["data"].get("data.template_time")


def plan_shards(samples: Sequence[Sample], form: CacheFormat, shard_mb: int) -> tuple[tuple[int, int], ...]:
    """Divide the samples into shards; each ends with the sample that reaches ``shard_mb``."""
    shards, first, size = [], 0, 0
    for i, sample in enumerate(samples):
        size += form.size(len(sample.tokens))
        if size >= shard_mb * 2**20 or i + 1 == len(samples):
            shards.append((first, i + 1))
            first, size = i + 1, 0
    return tuple(shards)


class ShardReader:
    """Reads samples of a complete cache. The constructor raises UserError if a shard is missing, damaged or of another cache."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.ends = [end for _, end in manifest.shards]
        if missing := manifest.missing():
            names = f"{manifest.shard(missing[0]).name}{', ...' if len(missing) > 1 else ''}"
            found = f"found {len(self.ends) - len(missing)} shards, expected {len(self.ends)} (missing: {names})"
            raise UserError(f"{manifest.folder} is not finished: {found}; run headstart cache with this recipe to go on with it")
        for number in range(len(self.ends)):
            open_shard(manifest, number)
        self._open = lru_cache(MAX_OPEN)(self._opened)

    def sample(self, index: int) -> Record:
        """Return the record of one sample, on the CPU."""
        number = bisect.bisect_right(self.ends, index)
        file, starts = self._open(number)
        i = index - self.manifest.shards[number][0]
        row, positions = slice(i, i + 1), slice(starts[i], starts[i + 1])
        per_sample = [name for name in file.keys() if name == "tokens" or name.endswith(".channel")]  # noqa: SIM118  (not a mapping)
        return {name: file.get_slice(name)[row if name in per_sample else positions] for name in file.keys()}  # noqa: SIM118

    def _opened(self, number: int) -> tuple[Any, list[int]]:
        """Return an open file, and the start of each sample's positions."""
        file = open_shard(self.manifest, number)
        return file, [0, *file.get_tensor("tokens").cumsum(0).tolist()]


def open_shard(manifest: Manifest, number: int) -> Any:
    """Open a shard. Raises UserError if it is damaged or of another cache."""
    path = inside(manifest.folder, manifest.shard(number).name)
    try:
        file = safe_open(path, "pt")
        header = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it and run headstart cache with this recipe again") from None
    if (cache_id := header.get("cache")) != manifest.id:
        fault = f"{path.name} in {manifest.folder} is a shard of another cache: found {cache_id}, expected {manifest.id}"
        raise UserError(f"{fault}; delete it and run headstart cache with this recipe again")
    return file


def free_bytes(folder: Path) -> int:
    """Return the free space on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
