"""What the files of exported heads say, against the backbone and against the original heads, before anything is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from headstart.inference.serving.reference.layer import LayerShape
from headstart.inference.serving.reference.reading import VOCABULARY, Reading
from headstart.inference.serving.reference.rope import stated_thetas
from headstart.inference.serving.reference.target import Target

ROUNDING = 2.0**-7
"""Relative difference that storing fp32 weights in bfloat16 makes."""


def faults_of(reading: Reading, target: Target, config: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with heads by themselves or on this backbone, with the likely cause, in one line each."""
    faults = [*reading.remarks, *_backbone_faults(reading, target, config), *vocabulary_faults(reading, target.vocab)]
    faults += [fault for fault in reading.faults if fault.split()[1] not in VOCABULARY or not faults]
    for name, tensor in reading.tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            faults.append(f"tensor {name} holds {'NaN' if bool(tensor.isnan().any()) else 'infinity'}: damaged or half-written weights")
    return faults


def _backbone_faults(reading: Reading, target: Target, config: Mapping[str, Any]) -> list[str]:
    stated: Mapping[str, Any] = config.get("transformer_layer_config") or config.get("text_config") or config
    faults = []
    vocab, width = stated.get("vocab_size"), stated.get("hidden_size")
    if reading.method != "draft-model" and isinstance(vocab, int) and vocab != target.vocab:
        faults.append(f"another vocabulary: config.json states {vocab} tokens, the backbone has {target.vocab}")
    if reading.method not in ("draft-model", "eagle3") and isinstance(width, int) and width != target.dim:
        faults.append(f"another backbone: config.json states hidden_size {width}, the backbone has {target.dim}")
    if len(thetas := set(stated_thetas(stated))) > 1:
        faults.append(f"rope: config.json states two bases, {' and '.join(f'{theta:g}' for theta in sorted(thetas))}; engines read either")
    return faults


def vocabulary_faults(reading: Reading, vocab: int) -> list[str]:
    """Return what is wrong with a draft vocabulary: d2t should hold offsets to ascending tokens, those that t2d marks."""
    d2t, t2d = (reading.tensors.get(name) for name in VOCABULARY)
    rows = next((len(tensor) for name, tensor in reading.tensors.items() if name == "lm_head.weight"), None)
    if d2t is None:
        if rows is not None and rows < vocab:
            return [f"d2t is missing, but only {rows} of {vocab} tokens are drafted: engines take draft token i for token i"]
        return []
    marked = None if t2d is None or t2d.dim() != 1 else t2d.nonzero().flatten()
    tokens = d2t.long() + torch.arange(len(d2t))
    faults = []
    if len(d2t) > 1 and _ascending(d2t) and (marked is None or torch.equal(d2t.long(), marked)) and int(tokens.max()) >= len(d2t):
        faults.append("d2t holds token ids (cumulative), but engines read offsets: the id of draft token i is i + d2t[i]")
    elif not bool(d2t.any()) and len(d2t) < vocab and (marked is None or not torch.equal(marked, tokens)):
        faults.append("d2t is all zero, so engines take draft token i for token i: it was not filled, or its loading was skipped")
    elif bool((tokens < 0).any()) or bool((tokens >= vocab).any()):
        faults.append(f"d2t leads outside the backbone's vocabulary of {vocab}: d2t of another vocabulary, or no offsets")
    elif not _ascending(tokens):
        faults.append("d2t does not lead to ascending tokens: damaged, or of another vocabulary")
    if t2d is not None and len(t2d) != vocab:
        faults.append(f"another vocabulary: t2d marks tokens of a vocabulary of {len(t2d)}, the backbone has {vocab}")
    elif not faults and marked is not None and not torch.equal(marked, tokens):
        faults.append("d2t and t2d disagree about which tokens are drafted: one of them is of another vocabulary")
    return faults


def _ascending(values: Tensor) -> bool:
    return bool((values.diff() > 0).all())


def changes(reading: Reading, original: Reading, quantised: bool = False) -> list[str]:
    """Return what differs from the original heads, in one line each, with the pattern that the difference has.

    ``quantised``: the weights of linear layers are rounded, and only the others are compared.
    """
    if reading.method != original.method:
        return [f"the folder holds {reading.method} heads, the original ones are {original.method}"]
    found = []
    if reading.taps != original.taps:
        theirs = f"the original heads after {list(original.taps)}"
        found.append(f"shifted layer ids: the folder reads the backbone after layers {list(reading.taps)}, {theirs}")
    if reading.layer is not None and original.layer is not None:
        found += _layer_changes(reading.layer, original.layer)
    for name in sorted(set(reading.options) & set(original.options) - {"model", "family"}):
        if reading.options[name] != original.options[name]:
            found.append(f"config: {name} is {reading.options[name]!r}, of the original heads {original.options[name]!r}")
    compared = {name: tensor for name, tensor in reading.tensors.items() if not (quantised and name.endswith("_proj.weight"))}
    drafted = original.vocabulary
    if drafted is not None and "d2t" not in compared:   # output layers that were written over the whole vocabulary
        outputs = {name for name, tensor in original.tensors.items() if tensor.dim() == 2 and len(tensor) == len(drafted)}
        compared |= {name: tensor[drafted] for name, tensor in compared.items() if name in outputs and len(tensor) > int(drafted.max())}
    return found + _tensor_changes(compared, original.tensors)


def _layer_changes(layer: LayerShape, original: LayerShape) -> list[str]:
    found = []
    for one in fields(LayerShape):
        mine, theirs = getattr(layer, one.name), getattr(original, one.name)
        if mine == theirs:
            continue
        if one.name == "rope":
            found.append(f"rope of another base or scaling: the folder states {mine}, the original heads {theirs}")
        else:
            found.append(f"config: {one.name} is {mine}, of the original heads {theirs}")
    return found


def _tensor_changes(tensors: Mapping[str, Tensor], original: Mapping[str, Tensor]) -> list[str]:
    odd = [name for name in sorted(set(tensors) & set(original)) if not same(tensors[name], original[name])]
    found = []
    while odd:
        name = odd.pop(0)
        tensor, wanted = tensors[name], original[name]
        twin = next((other for other in odd if same(tensor, original[other]) and same(tensors[other], wanted)), None)
        if twin is not None:
            odd.remove(twin)
            found.append(f"swapped tensors: {name} and {twin} stand for each other")
        elif tensor.dim() == 2 and same(tensor, wanted.T):
            found.append(f"{name} is transposed")
        elif name in VOCABULARY and tensor.shape != wanted.shape:
            found.append(f"another vocabulary: {name} is {list(tensor.shape)}, of the original heads {list(wanted.shape)}")
        elif name in VOCABULARY:
            found.append(f"{name} is not that of the original heads: another vocabulary, or not offsets")
        elif (order := _order(tensor, wanted)) is not None:
            found.append(f"{name} has its columns' parts in the order {order}")
        else:
            found.append(f"{name} is not that of the original heads: damaged, or of another training")
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Compare two tensors, allowing for their storage in bfloat16."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point() or not b.is_floating_point():
        return torch.equal(a.long(), b.long())
    return bool(((a.float() - b.float()).abs() <= ROUNDING * b.float().abs() + 1e-6).all())


def _order(tensor: Tensor, original: Tensor) -> list[int] | None:
    """Return in which order a matrix has the parts of the original's columns, each as wide as the matrix is high."""
    if tensor.dim() != 2 or tensor.shape != original.shape or tensor.shape[1] not in [len(tensor) * parts for parts in range(2, 6)]:
        return None
    parts = original.split(len(original), 1)
    orders = permutations(range(len(parts)))
    return next((list(order) for order in orders if same(tensor, torch.cat([parts[i] for i in order], 1))), None)
