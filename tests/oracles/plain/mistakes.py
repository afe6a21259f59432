"""Mistakes in the files of heads: what they say that cannot be right, what differs from the original heads, and other readings of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import combinations, permutations
from typing import Any

import torch
from torch import Tensor

from headstart.support.errors import UserError
from plain.base import VOCABULARY, Reading, Target
from plain.layer import Rope, read_rope, stated_thetas

ROUNDING = 2.0**-7
"""Relative difference that storing fp32 weights in bfloat16 makes."""
THETAS = (10000.0, 500000.0, 1000000.0)
PROJECTIONS = ("fc.weight", "eh_proj.weight")
"""Layers that fuse several streams, in an order that exporters get wrong."""
PAIRS = (("mlp.gate_proj.weight", "mlp.up_proj.weight"), ("self_attn.k_proj.weight", "self_attn.v_proj.weight"))
NOT_AS = "is not as in the original heads: missing, damaged, of another training or another vocabulary"
Other = tuple[str, Reading]
"""A likely cause, and the reading under which the files would be right."""


# Before anything is run.


def faults_of(reading: Reading, target: Target) -> list[str]:
    """Return what is wrong with heads by themselves or on this backbone, with the likely cause, in one line each."""
    faults, config = list(reading.remarks), reading.config
    vocab, width = config.get("vocab_size"), config.get("hidden_size")
    if reading.method != "draft-model" and isinstance(vocab, int) and vocab != target.vocab:
        faults.append(f"another vocabulary: config.json states {vocab} tokens, the backbone has {target.vocab}")
    if reading.method not in ("draft-model", "eagle3") and isinstance(width, int) and width != target.dim:
        faults.append(f"another backbone: config.json states hidden_size {width}, the backbone has {target.dim}")
    if len(thetas := set(stated_thetas(config))) > 1:
        faults.append(f"rope: config.json states two bases, {' and '.join(f'{theta:g}' for theta in sorted(thetas))}; engines read either")
    faults += _vocabulary_faults(reading, target.vocab)
    faults += [fault for fault in reading.faults if fault.split()[1] not in VOCABULARY or not faults]
    for name, tensor in reading.tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            faults.append(f"tensor {name} holds {'NaN' if bool(tensor.isnan().any()) else 'infinity'}: damaged or half-written weights")
    return faults


def _vocabulary_faults(reading: Reading, vocab: int) -> list[str]:
    """Return what is wrong with a draft vocabulary: d2t should hold offsets to ascending tokens, those that t2d marks."""
    d2t, t2d, head = (reading.tensors.get(name) for name in (*VOCABULARY, "lm_head.weight"))
    if d2t is None:
        rows = vocab if head is None else len(head)
        fault = f"d2t is missing, but only {rows} of {vocab} tokens are drafted: engines take draft token i for token i"
        return [fault] if rows < vocab else []
    if t2d is not None and len(t2d) != vocab:
        return [f"another vocabulary: t2d marks tokens of a vocabulary of {len(t2d)}, the backbone has {vocab}"]
    tokens = d2t.long() + torch.arange(len(d2t))
    marked = tokens if t2d is None else t2d.nonzero().flatten()
    rising = bool((tokens.diff() > 0).all()) and 0 <= int(tokens.min()) and int(tokens.max()) < vocab
    if (len(d2t) > 1 and torch.equal(d2t.long(), marked)) or (t2d is None and not rising and bool((d2t.diff() > 0).all())):
        return ["d2t holds token ids (cumulative), but engines read offsets: the id of draft token i is i + d2t[i]"]
    if not bool(d2t.any()) and len(d2t) < vocab and not (t2d is not None and torch.equal(marked, tokens)):
        return ["d2t is all zero, so engines take draft token i for token i: it was not filled, or its loading was skipped"]
    if not rising:
        return [f"d2t does not lead to ascending tokens of the backbone's {vocab}: damaged, of another vocabulary, or no offsets"]
    return [] if torch.equal(marked, tokens) else ["d2t and t2d disagree about which tokens are drafted: one is of another vocabulary"]


def differences(reading: Reading, original: Reading) -> Iterator[Other]:
    """Yield the parts of both that are not as in the original heads, each with the reading that takes it from there."""
    if reading.taps != original.taps:
        yield f"the layers read are not those of the original heads: {list(reading.taps)}", replace(reading, taps=original.taps)
    if reading.layer is not None and original.layer is not None and reading.layer != original.layer:
        odd = [one.name for one in fields(reading.layer) if getattr(reading.layer, one.name) != getattr(original.layer, one.name)]
        yield f"config: {', '.join(odd)} of the layers {NOT_AS}", replace(reading, layer=original.layer)
    for name in sorted((set(reading.options) & set(original.options)) - {"model", "rest"}):
        if reading.options[name] != original.options[name]:
            cause = f"config: {name} is {reading.options[name]}, of the original heads {original.options[name]}"
            yield cause, replace(reading, options={**reading.options, name: original.options[name]})
    drafted = original.vocabulary
    for name in sorted(set(reading.tensors) & set(original.tensors)):
        mine, theirs = reading.tensors[name], original.tensors[name]
        if drafted is not None and "d2t" not in reading.tensors and len(theirs) == len(drafted) < len(mine):
            mine = mine[drafted]  # an output layer that was written over the whole vocabulary
        if not same(mine, theirs):
            yield f"tensor {name} {NOT_AS}", _with(reading, {name: theirs})


def same(a: Tensor, b: Tensor) -> bool:
    """Compare two tensors, allowing for their storage in bfloat16."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point() or not b.is_floating_point():
        return torch.equal(a.long(), b.long())
    return bool(((a.float() - b.float()).abs() <= ROUNDING * b.float().abs() + 1e-6).all())


# Other readings.


def other_readings(reading: Reading, target: Target, original: Reading | None) -> Iterator[Other]:
    """Yield the readings to try, simple mistakes first; with ``original`` also its parts in place of these."""
    if reading.method == "draft-model":
        return
    for source in (_layer_ids, _vocabulary, _turned, _orders, _norms, _pairs, _ropes, _switches, _shared, _interleaved):
        yield from source(reading, target)
    if original is not None and original.method == reading.method:
        yield from _of_original(reading, original)


def _with(reading: Reading, tensors: Mapping[str, Tensor]) -> Reading:
    return replace(reading, tensors={**reading.tensors, **tensors})


def _layer_ids(reading: Reading, target: Target) -> Iterator[Other]:
    L, taps = target.num_layers, reading.taps
    others = [tuple(tap + shift for tap in taps) for shift in (1, -1, 2, -2)] + [(2, L // 2, L - 3)] * (len(taps) == 3)
    for other in dict.fromkeys(others):
        if taps and other != taps and 0 <= min(other) and max(other) <= L:
            cause = f"shifted layer ids: the folder reads the backbone after layers {list(taps)}, the heads fit {list(other)}"
            yield f"{cause} (one convention counts layers passed, the other names layers from 0)", replace(reading, taps=other)


def _vocabulary(reading: Reading, target: Target) -> Iterator[Other]:
    d2t, t2d = reading.tensors.get("d2t"), reading.tensors.get("t2d")
    if d2t is not None:
        offsets = d2t.long() - torch.arange(len(d2t))
        yield "d2t holds token ids (cumulative), but engines read offsets", _with(reading, {"d2t": offsets})
        yield "d2t holds differences between tokens, but engines read offsets", _with(reading, {"d2t": d2t.long().cumsum(0)})
    if t2d is not None and t2d.dim() == 1:
        marked = t2d.nonzero().flatten()
        cause = "d2t is missing" if d2t is None else "d2t is not that of these heads, t2d is"
        yield cause, _with(reading, {"d2t": marked - torch.arange(len(marked))})


def _turned(reading: Reading, target: Target) -> Iterator[Other]:
    shapes = reading.shapes
    turned = {n: t.T for n, t in reading.tensors.items() if t.dim() == 2 and n in shapes and tuple(t.shape) == shapes[n][::-1] != shapes[n]}
    square = {n: t.T for n, t in reading.tensors.items() if t.dim() == 2 and t.shape[0] == t.shape[1] and n.endswith("_proj.weight")}
    for tensors in (turned, *({name: tensor} for name, tensor in square.items())):
        if tensors:
            yield f"transposed: {', '.join(sorted(tensors))}", _with(reading, tensors)


def _orders(reading: Reading, target: Target) -> Iterator[Other]:
    for name, tensor in reading.tensors.items():
        parts = 2 if reading.method in ("eagle", "mtp") else len(reading.taps)
        if not name.endswith(PROJECTIONS) or tensor.dim() != 2 or not 2 <= parts <= 4 or tensor.shape[1] % parts:
            continue
        columns = tensor.chunk(parts, 1)
        for order in list(permutations(range(parts)))[1:]:
            what = "the hidden state before the embedding" if parts == 2 else f"its parts in the order {list(order)}"
            yield f"{name} takes {what}", _with(reading, {name: torch.cat([columns[i] for i in order], 1)})


def _norms(reading: Reading, target: Target) -> Iterator[Other]:
    """Swap two norms: of every layer alike, or any two of the first layer and outside the layers."""
    norms = {name: tensor for name, tensor in reading.tensors.items() if "norm" in name and tensor.dim() == 1}
    inside = sorted({name.split(".", 2)[2] for name in norms if name.startswith("layers.")})
    for one, other in combinations(inside, 2):
        alike = [(name, name.removesuffix(one) + other) for name in norms if name.startswith("layers.") and name.split(".", 2)[2] == one]
        yield from _swapped(reading, [pair for pair in alike if pair[1] in norms], "norms")
    first = [name for name in sorted(norms) if not name.startswith("layers.") or name.startswith("layers.0.")]
    for pair in combinations(first, 2):
        yield from _swapped(reading, [pair], "norms")


def _pairs(reading: Reading, target: Target) -> Iterator[Other]:
    for one, other in PAIRS:
        found = [(name, name.removesuffix(one) + other) for name in reading.tensors if name.endswith(one)]
        yield from _swapped(reading, [pair for pair in found if pair[1] in reading.tensors], "tensors")


def _swapped(reading: Reading, pairs: list[tuple[str, str]], what: str) -> Iterator[Other]:
    tensors = reading.tensors
    if pairs and all(tensors[one].shape == tensors[other].shape for one, other in pairs):
        swapped = {one: tensors[other] for one, other in pairs} | {other: tensors[one] for one, other in pairs}
        yield f"swapped {what}: {' and '.join(pairs[0])} stand for each other", _with(reading, swapped)


def _ropes(reading: Reading, target: Target) -> Iterator[Other]:
    if reading.layer is None:
        return
    mine = reading.layer.rope
    try:
        others = [read_rope(target.config.to_dict())]
    except UserError:  # the backbone's is of a kind that heads here do not have
        others = []
    others += [replace(mine, theta=theta) for theta in THETAS] + [Rope(mine.theta, share=mine.share)]
    for other in others:
        if other != mine:
            cause = f"rope of another base or scaling: the folder states {mine}, the heads fit {other}"
            yield cause, replace(reading, layer=replace(reading.layer, rope=other))


def _switches(reading: Reading, target: Target) -> Iterator[Other]:
    for name, value in reading.options.items():
        needs = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}.get(name)
        if isinstance(value, bool) and name not in ("qk_norm", "tied") and (value or needs is None or needs in reading.tensors):
            cause = f"config: {name} is {str(value).lower()}, the heads fit {str(not value).lower()}"
            yield cause, replace(reading, options={**reading.options, name: not value})
    if reading.layer is None:
        return
    stated = target.config.to_dict().get("rms_norm_eps")
    changed: dict[str, Any] = {"eps": float(stated)} if stated and stated != reading.layer.eps else {}
    if any(reading.layer.windows):
        changed["windows"] = (None,) * reading.layer.layers
    for name, value in changed.items():
        cause = f"config: {name} is {getattr(reading.layer, name)}, the heads fit {value}"
        yield cause, replace(reading, layer=replace(reading.layer, **{name: value}))


def _shared(reading: Reading, target: Target) -> Iterator[Other]:
    for name, what in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "output layer")):
        if name in reading.tensors and name in reading.optional:
            left = {other: tensor for other, tensor in reading.tensors.items() if other != name}
            yield f"another vocabulary: {name} is not the backbone's {what}", replace(reading, tensors=left)


def _interleaved(reading: Reading, target: Target) -> Iterator[Other]:
    """Read queries and keys as rotated in neighbouring pairs, as in Meta's own checkpoints of Llama."""
    C = 0 if reading.layer is None else reading.layer.head_dim
    sorted_rows: dict[str, Tensor] = {}
    for name, tensor in reading.tensors.items():
        if C and name.endswith(("q_proj.weight", "k_proj.weight")) and len(tensor) % C == 0:
            order = torch.cat([torch.arange(0, C, 2), torch.arange(1, C, 2)])
            sorted_rows[name] = tensor.unflatten(0, (-1, C))[:, order].flatten(0, 1)
    if sorted_rows:
        yield "queries and keys are stored for rotation in neighbouring pairs (Meta's layout)", _with(reading, sorted_rows)


def _of_original(reading: Reading, original: Reading) -> Iterator[Other]:
    """Take one part from the original heads: a field of the configuration, a tensor, or all that differ."""
    odd = list(differences(reading, original))
    missing = {name: tensor for name, tensor in original.tensors.items() if name not in reading.tensors}
    odd += [(f"tensor {name} {NOT_AS}", _with(reading, {name: tensor})) for name, tensor in missing.items()]
    yield from odd
    if len(odd) > 1:
        yield f"several parts differ from the original heads: {'; '.join(cause for cause, _ in odd[:3])}", original
