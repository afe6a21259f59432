"""The contract of every drafter on every family: training and decoding compute the same.

Shape suffixes: B batch, T positions, D width, N tree nodes, V vocabulary, K depth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DRAFTERS, FAMILIES, LAYERS, STRANGERS, VOCAB, backbone, random_drafter, read, texts, tiny
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.checkpoint import load_drafter
from headstart.heads.own_readout import OwnReadoutDrafter

CLOSE = {"atol": 3e-5, "rtol": 1e-4}
EXACTLY = {"atol": 1e-10, "rtol": 1e-10}
"""In fp64."""
VARIANTS: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in DRAFTERS + STRANGERS] + [
    ("eagle3", {"draft_vocab_size": 23}),
    ("eagle3", {"taps": [0, 1, 4, LAYERS], "depth": 3, "intermediate_size": 20}),
    ("eagle3", {"taps": [5]}),
    ("block", {"depth": 3, "layers": 2, "correction": "none"}),
    ("block", {"depth": 3, "layers": 2, "causal": True}),
    ("block", {"depth": 3, "layers": 1, "correction": "recurrent", "correction_rank": 6, "anchor_share": 1.0}),
    ("hydra", {"prefix_attention": False, "layers": 1, "draft_vocab_size": 23}),
    ("eagle3", {"layers": 2}),
    ("eagle3", {"norm_before_residual": True, "qk_norm": True}),
    ("eagle3", {"layers": 2, "sliding_window": 5}),
    ("eagle3", {"fc_norm": True, "norm_output": True, "sliding_window": 6}),
    ("eagle", {"depth": 3}),
    ("medusa", {"layers": 3, "depth": 2}),
    ("mtp", {"shared": False}),
    ("medusa", {"draft_vocab_size": 23}),
    ("mlp", {"tie_weights": True, "inner_dim": 20, "scale_input": False, "draft_vocab_size": 23}),
    ("draft_model", {"parallel": True, "depth": 4}),
]
NAMES = [kind.rpartition(".")[2] + "".join(f"-{name}" for name in arguments) for kind, arguments in VARIANTS]
each_drafter = pytest.mark.parametrize("kind,arguments", VARIANTS, ids=NAMES)


def each_drafter_on_each_family(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.matrix(pytest.mark.parametrize("family", FAMILIES)(each_drafter(test)))


@functools.cache
def backbone_in_fp64(family: str) -> Backbone:
    return Backbone(tiny(family).double())


def made(
    family: str, kind: str, arguments: dict[str, Any], on_which: Callable[[str], Backbone] = backbone
) -> tuple[Backbone, Drafter]:
    on = on_which(family)
    drafter = random_drafter(kind, on, **arguments).to(on.dtype)
    if drafter.vocabulary is not None:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[: len(drafter.vocabulary)]
        assert isinstance(drafter, OwnReadoutDrafter)
        weights = [layer.weight.clone() for layer in drafter.output_layers()]
        drafter.use_vocabulary(ids)
        assert torch.equal(drafter.vocabulary, ids.sort().values)
        for layer, weight in zip(drafter.output_layers(), weights, strict=True):
            assert torch.equal(layer.weight, on.unembed.weight[drafter.vocabulary])
            layer.weight.copy_(weight)
    return on, drafter


def part(features: Features, start: int, end: int) -> Features:
    taps = None if features.taps is None else {tap: x[:, start:end] for tap, x in features.taps.items()}
    return Features(features.tokens_BT[:, start:end], features.hidden_BTD[:, start:end], taps)


def ragged(features: Features, lengths: list[int]) -> Features:
    """The first positions of each row; the rest is filled with garbage."""
    longest = max(lengths)
    there = torch.arange(longest) < torch.tensor(lengths)[:, None]

    def spoil(x_BTD: Tensor) -> Tensor:
        return torch.where(there[..., None], x_BTD[:, :longest], 7.0)

    taps = None if features.taps is None else {tap: spoil(x) for tap, x in features.taps.items()}
    tokens = torch.where(there, features.tokens_BT[:, :longest], 0)
    return Features(tokens, spoil(features.hidden_BTD), taps, document_BT=torch.where(there, 0, -1))


def draft(drafter: Drafter, state: Any, tokens: Sequence[Tensor], parents: Sequence[Tensor]) -> list[Tensor]:
    """Logits of each depth ``[B, N or 1, DV]``, drafted below the given nodes (the roots first)."""
    state, logits = drafter.reserve(state, 256), []
    for k, (tokens_BN, parents_BN) in enumerate(zip(tokens, parents, strict=True)):
        if not drafter.all_depths_at_once:
            hidden, state = drafter.step(state, tokens_BN, parents_BN, k)
        elif not k:
            hidden_BKD, state = drafter.step(state, tokens_BN, parents_BN, 0)
        logits.append(drafter.readout(hidden_BKD[:, k : k + 1] if drafter.all_depths_at_once else hidden, k, tokens_BN))
    return logits


def chain(drafter: Drafter, state: Any, tokens_BK: Tensor) -> list[Tensor]:
    """Logits of each depth, drafted along the given tokens (the root first)."""
    tokens = tokens_BK.split(1, 1)
    return [logits[:, 0] for logits in draft(drafter, state, tokens, [torch.zeros_like(one) for one in tokens])]


@each_drafter_on_each_family
def test_forward_is_begin_and_steps(family: str, kind: str, arguments: dict[str, Any]) -> None:
    on, drafter = made(family, kind, arguments)
    T, K = 20, drafter.trained_depth
    features = read(on, texts(2, T), drafter)
    taught = drafter(features)
    assert [x.shape[:2] for x in taught] == [(2, T - 2 - k) for k in range(K)]
    for t in (0, 1, 7, T - 2 - K):
        drafted = chain(drafter, drafter.begin(part(features, 0, t + 1)), features.tokens_BT[:, t + 1 : t + 1 + K])
        for k in range(K):
            parents = features.tokens_BT[:, t + 1 + k]
            torch.testing.assert_close(drafter.readout(taught[k][:, t], k, parents), drafted[k], **CLOSE)
            assert drafted[k].shape == (2, VOCAB if drafter.vocabulary is None else len(drafter.vocabulary))


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@each_drafter
def test_short_sequences_give_what_they_hold(kind: str, arguments: dict[str, Any], length: int) -> None:
    on, drafter = made("llama", kind, arguments)
    taught = drafter(read(on, texts(2, length), drafter))
    assert [x.shape[1] for x in taught] == [max(length - 2 - k, 0) for k in range(drafter.trained_depth)]


@each_drafter_on_each_family
def test_the_prefix_comes_in_any_pieces(family: str, kind: str, arguments: dict[str, Any]) -> None:
    on, drafter = made(family, kind, arguments)
    features, next_BK = read(on, texts(2, 15), drafter), texts(2, drafter.depth, seed=5)
    whole = chain(drafter, drafter.begin(features), next_BK)
    for cuts in ([9], [1], list(range(1, 15)), [4, 5, 14]):
        state = None
        for start, end in zip([0, *cuts], [*cuts, 15], strict=True):
            if state is not None:  # drafting in between leaves no trace in the state
                chain(drafter, state, texts(2, drafter.depth, seed=end))
            state = drafter.begin(part(features, start, end), drafter.reserve(state, 256) if state is not None else None)
        for one, other in zip(whole, chain(drafter, state, next_BK), strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


@each_drafter_on_each_family
def test_rows_are_independent_of_each_other(family: str, kind: str, arguments: dict[str, Any]) -> None:
    """Two rounds of ragged rows, one of which adds no token to some rows and one token to others."""
    on, drafter = made(family, kind, arguments)
    features, next_BK = read(on, texts(4, 22), drafter), texts(4, drafter.depth, seed=5)
    first, second, third = [9, 1, 14, 6], [3, 5, 0, 1], [0, 1, 2, 4]
    state = drafter.begin(ragged(features, first))
    chain(drafter, state, texts(4, drafter.depth, seed=6))
    ends = torch.tensor(first)
    for brought in (second, third):
        place_BT = torch.arange(max(brought))
        index = (ends[:, None] + place_BT).clamp(max=21)
        new = features.gather(index, place_BT < torch.tensor(brought)[:, None])
        state = drafter.begin(new, drafter.reserve(state, 256) if state is not None else None)
        ends += torch.tensor(brought)
    together = chain(drafter, state, next_BK)
    for row in range(4):
        mine = read(on, features.tokens_BT[row : row + 1, : int(ends[row])], drafter)
        for one, other in zip(chain(drafter, drafter.begin(mine), next_BK[row : row + 1]), together, strict=True):
            torch.testing.assert_close(one[0], other[row], **CLOSE)


@each_drafter_on_each_family
def test_a_tree_is_its_paths(family: str, kind: str, arguments: dict[str, Any]) -> None:
    """Siblings, cousins and grandchildren drafted together equal each path drafted alone, in ragged rows.

    In fp64, since some heads amplify rounding: EAGLE-1 on Gemma-3 by up to 1e-4 in fp32.
    """
    on, drafter = made(family, kind, arguments, backbone_in_fp64)
    lengths, N = [9, 4], 5
    features = read(on, texts(2, 9), drafter)
    make = torch.Generator().manual_seed(3)
    tokens = [texts(2, 1, seed=8)] + [torch.randint(VOCAB, (2, N), generator=make) for _ in range(drafter.depth - 1)]
    parents = [torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, N, dtype=torch.int64)]
    parents += [torch.randint(N, (2, N), generator=make) for _ in range(drafter.depth - 2)]
    logits = draft(drafter, drafter.begin(ragged(features, lengths)), tokens, parents)
    logits = [one.expand(-1, tokens_BN.shape[1], -1) for one, tokens_BN in zip(logits, tokens, strict=True)]
    for row in range(2):
        mine = read(on, features.tokens_BT[row : row + 1, : lengths[row]], drafter)
        for leaf in range(N):
            nodes = [leaf]
            for k in range(drafter.depth - 1, 0, -1):
                nodes.insert(0, int(parents[k][row, nodes[0]]))
            path = torch.stack([tokens[k][row, n] for k, n in enumerate(nodes)])[None]
            for k, alone in enumerate(chain(drafter, drafter.begin(mine), path)):
                torch.testing.assert_close(alone[0], logits[k][row, nodes[k]], **EXACTLY)


@pytest.mark.matrix("kind", cells=len(DRAFTERS))
@each_drafter
def test_drafting_far_past_the_first_buffers(kind: str, arguments: dict[str, Any]) -> None:
    on, drafter = made("llama", kind, arguments)
    features, next_BK = read(on, texts(1, 200), drafter), texts(1, drafter.depth, seed=5)
    state = drafter.begin(part(features, 0, 61))
    for end in range(62, 201, 3):
        chain(drafter, state, next_BK)
        state = drafter.begin(part(features, end - 1 if end == 62 else end - 3, end), drafter.reserve(state, end + 20))
    for one, other in zip(chain(drafter, state, next_BK), chain(drafter, drafter.begin(part(features, 0, 200)), next_BK), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@each_drafter_on_each_family
def test_packed_documents_are_what_they_are_alone(family: str, kind: str, arguments: dict[str, Any]) -> None:
    on, drafter = made(family, kind, arguments)
    lengths = [7, 11, 3]
    parts = [read(on, texts(1, length, seed=i), drafter) for i, length in enumerate(lengths)]
    taps = None if parts[0].taps is None else {tap: torch.cat([p.taps[tap] for p in parts if p.taps], 1) for tap in parts[0].taps}
    document = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)] + [torch.full((2,), -1)])[None]

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, torch.full_like(x[:, :2], 3)], 1)

    packed = Features(
        padded(torch.cat([p.tokens_BT for p in parts], 1)),
        padded(torch.cat([p.hidden_BTD for p in parts], 1)),
        None if taps is None else {tap: padded(x) for tap, x in taps.items()},
        document_BT=document,
    )
    together, start = drafter(packed), 0
    for features, length in zip(parts, lengths, strict=True):
        for k, alone in enumerate(drafter(features)):
            torch.testing.assert_close(together[k][:, start : start + alone.shape[1]], alone, **CLOSE)
        start += length


@each_drafter_on_each_family
def test_saved_and_loaded_it_drafts_the_same(family: str, kind: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    on, drafter = made(family, kind, arguments)
    drafter.save_pretrained(tmp_path / "heads", {"note": "kept"})
    loaded = load_drafter(tmp_path / "heads", on)
    features, next_BK = read(on, texts(2, 9), drafter), texts(2, drafter.depth, seed=5)
    assert type(loaded) is type(drafter) and (loaded.depth, loaded.taps, loaded.arguments) == (
        drafter.depth,
        drafter.taps,
        drafter.arguments,
    )
    for one, other in zip(chain(drafter, drafter.begin(features), next_BK), chain(loaded, loaded.begin(features), next_BK), strict=True):
        assert torch.equal(one, other)
    assert not loaded.training and not any(weight.requires_grad for weight in loaded.parameters())
    if drafter.vocabulary is not None:
        assert loaded.vocabulary is not None and torch.equal(loaded.vocabulary, drafter.vocabulary)


@each_drafter
def test_every_weight_learns_and_none_of_the_backbones(kind: str, arguments: dict[str, Any]) -> None:
    on = backbone("llama")
    drafter = random_drafter(kind, on, **arguments).requires_grad_(True)
    features = read(on, texts(2, 12), drafter)
    hidden = drafter(features)
    sum(drafter.readout(x, k, features.tokens_BT[:, k + 1 : -1]).square().sum() for k, x in enumerate(hidden)).backward()
    for name, weight in drafter.named_parameters():
        assert weight.grad is not None and weight.grad.abs().max() > 0, name
    shared = {id(weight) for weight in on.model.parameters()}
    assert not shared & {id(weight) for weight in drafter.parameters()}
    assert not shared & {id(tensor) for tensor in drafter.state_dict(keep_vars=True).values()}
