"""What a feature cache holds besides its samples, since training from it does not run the backbone: features of a few tokens
for the start values of fresh heads, and features of held-out rows to evaluate on.

It is one file, ``supplement.safetensors``.

Shape suffixes: T positions, D width, N tokens of the probe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from headstart.heads.backbone.features import Features
from headstart.heads.layers.start_values import probe_tokens
from headstart.support.files import locked
from headstart.training.data.batches import collate, samples_hash
from headstart.training.data.kept import Splits
from headstart.training.data.sample import Sample
from headstart.training.features.codec import CacheFormat, Record, with_teacher
from headstart.training.features.manifest import Manifest, save_tensors
from headstart.training.features.source import FeatureSource

FILE = "supplement.safetensors"
EVALUATED_TOKENS = 16_384
"""Tokens of held-out rows that are kept at most."""


@dataclass(frozen=True)
class Supplement:
    """The contents of a cache's supplement."""

    form: CacheFormat
    tensors: Record
    held_out: str
    """Hash of the held-out rows."""
    lacks_last: bool
    """See `FeatureSource.lacks_last`."""

    def probe(self) -> Features:
        """Return the features of `probe_tokens`, with all taps that are here."""
        parts = {name.removeprefix("probe."): tensor[None] for name, tensor in self.tensors.items() if name.startswith("probe.")}
        taps = {int(name.removeprefix("tap.")): tensor for name, tensor in parts.items() if name.startswith("tap.")}
        return Features(parts["tokens"], parts["hidden"], taps)

    def read_held_out(self, samples: Sequence[Sample], device: torch.device) -> Iterator[Features]:
        """Yield the features of each held-out row; none if others are here."""
        chosen = evaluated(samples)
        if samples_hash(chosen) != self.held_out:
            return
        for i in range(len(chosen)):
            yield self.form.decode(self._held_out(i), collate(chosen, [[i]]).to(device), self.form.taps)

    def _held_out(self, number: int) -> Record:
        prefix = f"held.{number}."
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


def read_supplement(manifest: Manifest, form: CacheFormat) -> Supplement | None:
    """Read a cache's supplement; None if it has none."""
    path = manifest.folder / FILE
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        header = file.metadata() or {}
    if header.get("cache") != manifest.id:
        return None
    return Supplement(form, load_file(path), header["held_out"], header["lacks_last"] == "True")


def write_supplement(manifest: Manifest, form: CacheFormat, source: FeatureSource, splits: Splits) -> None:
    """Write a cache's supplement, unless it is there."""
    path = manifest.folder / FILE
    with locked(manifest.folder / ".locks" / "supplement", "cache.dir", wait=True):
        if read_supplement(manifest, form) is not None:
            return
        held_out = evaluated(splits.eval)
        probed = source.probe(probe_tokens(source.backbone))
        tensors: Record = {"probe.tokens": probed.tokens_BT[0], "probe.hidden": probed.hidden_BTD[0]}
        tensors |= {f"probe.tap.{tap}": tensor[0] for tap, tensor in (probed.taps or {}).items()}
        for i in range(len(held_out)):
            features = with_teacher(source.read(collate(held_out, [[i]]).to(source.backbone.device)), source.backbone)
            tensors |= {f"held.{i}.{name}": tensor for name, tensor in form.encode(features).items()}
            tensors[f"held.{i}.ids"] = features.tokens_BT[0]
        header = {"cache": manifest.id, "held_out": samples_hash(held_out), "lacks_last": str(source.lacks_last)}
        save_tensors({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, header)


def evaluated(samples: Sequence[Sample]) -> list[Sample]:
    """Return the held-out rows that are evaluated on stored features: the first ones, of `EVALUATED_TOKENS` at most, at least one."""
    ends = accumulate(len(sample.tokens) for sample in samples)
    return [sample for i, (sample, end) in enumerate(zip(samples, ends, strict=False)) if i == 0 or end <= EVALUATED_TOKENS]


def chosen_texts(samples: Sequence[Sample], positions: int) -> list[int]:
    """Return the samples of about so many positions that start values are fitted to: of a mix, some of each part."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    before = accumulate((len(samples[i].tokens) - 2 for i in order), initial=0)  # whose neighbours are known too
    return [i for i, count in zip(order, before, strict=False) if count < positions]


def nearest_taps(features: Features, taps: tuple[int, ...]) -> Features:
    """Return the features with these taps alone; one that is not there has the values of the nearest that is."""
    held = features.taps or {}
    return replace(features, taps={tap: held[min(held, key=lambda one: abs(one - tap))] for tap in taps} or None)
