"""Other readings of the same files, each with the mistake that would explain it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any

import torch
from torch import Tensor

from headstart.inference.serving.reference.reading import Reading
from headstart.inference.serving.reference.rope import Rope, read_rope
from headstart.inference.serving.reference.target import Target
from headstart.inference.serving.verification.structure import same
from headstart.support.errors import UserError

THETAS = (10000.0, 500000.0, 1000000.0)
PROJECTIONS = ("fc.weight", "eh_proj.weight")
"""Layers that fuse several streams, in an order that exporters get wrong."""
PAIRS = (("mlp.gate_proj.weight", "mlp.up_proj.weight"), ("self_attn.k_proj.weight", "self_attn.v_proj.weight"))


@dataclass(frozen=True)
class Hypothesis:
    """A likely cause, and the reading under which the files would be right."""

    cause: str
    reading: Reading


def hypotheses(reading: Reading, target: Target, original: Reading | None) -> Iterator[Hypothesis]:
    """Yield the readings to try, simple mistakes first; with ``original`` also its parts in place of these."""
    if reading.method == "draft-model":
        return
    sources = (_layer_ids, _vocabulary, _turned, _orders, _norms, _pairs, _ropes, _switches, _shared, _interleaved)
    for source in sources:
        yield from source(reading, target)
    if original is not None and original.method == reading.method:
        yield from _of_original(reading, original)


def _with(reading: Reading, tensors: Mapping[str, Tensor]) -> Reading:
    return replace(reading, tensors={**reading.tensors, **tensors})


def _layer_ids(reading: Reading, target: Target) -> Iterator[Hypothesis]:
    L, taps = target.num_layers, reading.taps
    if not taps:
        return
    others = [tuple(tap + shift for tap in taps) for shift in (1, -1, 2, -2)]
    others += [(2, L // 2, L - 3)] if len(taps) == 3 else []
    for other in dict.fromkeys(others):
        if other != taps and 0 <= min(other) and max(other) <= L:
            cause = f"shifted layer ids: the folder reads the backbone after layers {list(taps)}, the heads fit {list(other)}"
            yield Hypothesis(f"{cause} (one convention counts layers passed, the other names layers from 0)", replace(reading, taps=other))


def _vocabulary(reading: Reading, target: Target) -> Iterator[Hypothesis]:
    d2t, t2d = reading.tensors.get("d2t"), reading.tensors.get("t2d")
    if d2t is not None:
        offsets = d2t.long() - torch.arange(len(d2t))
        yield Hypothesis("d2t holds token ids (cumulative), but engines read offsets", _with(reading, {"d2t": offsets}))
        summed = d2t.long().cumsum(0)
        yield Hypothesis("d2t holds differences between tokens, but engines read offsets", _with(reading, {"d2t": summed}))
    if t2d is not None and t2d.dim() == 1:
        marked = t2d.nonzero().flatten()
        cause = "d2t is missing" if d2t is None else "d2t is not that of these heads, t2d is"
        yield Hypothesis(cause, _with(reading, {"d2t": marked - torch.arange(len(marked))}))


def _turned(reading: Reading, target: Target) -> Iterator[Hypothesis]:
    shapes = reading.shapes
    turned = {n: t.T for n, t in reading.tensors.items() if t.dim() == 2 and n in shapes and tuple(t.shape) == shapes[n][::-1] != shapes[n]}
    square = {n: t.T for n, t in reading.tensors.items() if t.dim() == 2 and t.shape[0] == t.shape[1] and n.endswith("_proj.weight")}
    for tensors in (turned, *({name: tensor} for name, tensor in square.items())):
        if tensors:
            yield Hypothesis(f"transposed: {', '.join(sorted(tensors))}", _with(reading, tensors))


def _orders(reading: Reading, target: Target) -> Iterator[Hypothesis]:
    for name, tensor in reading.tensors.items():
        parts = 2 if reading.method in ("eagle", "mtp") else len(reading.taps)
        if not name.endswith(PROJECTIONS) or tensor.dim() != 2 or tensor.shape[1] % max(parts, 1) or not 2 <= parts <= 4:
            continue
        columns = tensor.chunk(parts, 1)
        for order in permutations(range(parts)):
            if order != tuple(range(parts)):
                what = "the hidden state before the embedding" if parts == 2 else f"its parts in the order {list(order)}"
                yield Hypothesis(f"{name} takes {what}", _with(reading, {name: torch.cat([columns[i] for i in order], 1)}))


def _norms(reading: Reading, target: Target) -> Iterator[Hypothesis]:
    """Swap two norms: of every layer alike, or any two of the first layer and outside the layers."""
    norms = {name: tensor for name, tensor in reading.tensors.items() if "norm" in name and tensor.dim() == 1}
    inside = sorted({name.split(".", 2)[2] for name in norms if name.startswith("layers.")})
    for one, other in combinations(inside, 2):
        alike = [(f"layers.{i}.{one}", f"layers.{i}.{other}") for i in range(1 << 10) if f"layers.{i}.{one}" in norms]
        yield from _swapped(reading, [pair for pair in alike if pair[1] in norms], "norms")
    first = [name for name in sorted(norms) if not name.startswith("layers.") or name.startswith("layers.0.")]
    for pair in combinations(first, 2):
        yield from _swapped(reading, [pair], "norms")


def _swapped(reading: Reading, pairs: list[tuple[str, str]], what: str) -> Iterator[Hypothesis]:
    tensors = reading.tensors
    if pairs and all(tensors[one].shape == tensors[other].shape for one, other in pairs):
        swapped = {one: tensors[other] for one, other in pairs} | {other: tensors[one] for one, other in pairs}
        yield Hypothesis(f"swapped {what}: {' and '.join(pairs[0])} stand for each other", _with(reading, swapped))


def _pairs(reading: Reading, target: Target) -> Iterator[Hypothesis]:
    for one, other in PAIRS:
        found = [(name, name.removesuffix(one) + other) for name in reading.tensors if name.endswith(one)]
        yield from _swapped(reading, [pair for pair in found if pair[1] in reading.tensors], "tensors")


def _ropes(reading: Reading, target: Target) -> Iterator[Hypothesis]:
    if reading.layer is None:
        return
    mine = reading.layer.rope
    try:
        others = [read_rope(target.config.to_dict())]
    except UserError:   # the backbone's is of a kind that heads here do not have
        others = []
    others += [replace(mine, theta=theta) for theta in THETAS] + [Rope(mine.theta, share=mine.share)]
    for other in others:
        if other != mine:
            cause = f"rope of another base or scaling: the folder states {mine}, the heads fit {other}"
            yield Hypothesis(cause, replace(reading, layer=replace(reading.layer, rope=other)))


def _switches(reading: Reading, target: Target) -> Iterator[Hypothesis]:
    for name, value in reading.options.items():
        needs = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}.get(name)
        if isinstance(value, bool) and name != "qk_norm" and (value or needs is None or needs in reading.tensors):
            cause = f"config: {name} is {str(value).lower()}, the heads fit {str(not value).lower()}"
            yield Hypothesis(cause, replace(reading, options={**reading.options, name: not value}))
    if reading.layer is None:
        return
    stated = target.config.to_dict().get("rms_norm_eps")
    changed: dict[str, Any] = {"eps": float(stated)} if stated and stated != reading.layer.eps else {}
    if any(reading.layer.windows):
        changed["windows"] = (None,) * reading.layer.layers
    for name, value in changed.items():
        cause = f"config: {name} is {getattr(reading.layer, name)}, the heads fit {value}"
        yield Hypothesis(cause, replace(reading, layer=replace(reading.layer, **{name: value})))


def _shared(reading: Reading, target: Target) -> Iterator[Hypothesis]:
    for name, what in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "output layer")):
        if name in reading.tensors and name in reading.optional:
            left = {other: tensor for other, tensor in reading.tensors.items() if other != name}
            yield Hypothesis(f"another vocabulary: {name} is not the backbone's {what}", replace(reading, tensors=left))


def _interleaved(reading: Reading, target: Target) -> Iterator[Hypothesis]:
    """Read queries and keys as rotated in neighbouring pairs, as in Meta's own checkpoints of Llama."""
    if reading.layer is None:
        return
    C, order = reading.layer.head_dim, _halves(reading.layer.head_dim)
    sorted_rows: dict[str, Tensor] = {}
    for name, tensor in reading.tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")) and len(tensor) % C == 0:
            sorted_rows[name] = tensor.unflatten(0, (-1, C))[:, order].flatten(0, 1)
    if sorted_rows:
        yield Hypothesis("queries and keys are stored for rotation in neighbouring pairs (Meta's layout)", _with(reading, sorted_rows))


def _halves(width: int) -> Tensor:
    return torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])


def _of_original(reading: Reading, original: Reading) -> Iterator[Hypothesis]:
    """Take one part from the original heads: a field of the configuration, a tensor, or all that differ."""
    not_as = "not as in the original heads: missing, damaged, or of another training"
    if reading.taps != original.taps:
        yield Hypothesis(f"the layers read are {not_as}", replace(reading, taps=original.taps))
    if reading.layer != original.layer:
        yield Hypothesis(f"the configuration of the layers is {not_as}", replace(reading, layer=original.layer))
    theirs = original.tensors
    odd = {name: theirs[name] for name in theirs if name not in reading.tensors or not same(reading.tensors[name], theirs[name])}
    for name, tensor in odd.items():
        yield Hypothesis(f"tensor {name} is {not_as}", _with(reading, {name: tensor}))
    if len(odd) > 1:
        listed = ", ".join(sorted(odd)[:3]) + (" and others" if len(odd) > 3 else "")
        yield Hypothesis(f"the tensors {listed} are {not_as}", _with(reading, odd))
    yield Hypothesis("several parts differ from the original heads", original)
