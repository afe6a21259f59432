"""EAGLE-3's training in memory linear in the length: same results and gradients as with all scores at once, in any blocks.

Shape suffixes: B batch, T positions, D width.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import backbone, random_drafter, read, texts
from guess import Largest
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.eagle3 import Eagle3
from headstart.heads.layers import causal_attention as causal
from headstart.heads.layers.causal_attention import attend_past, divide
from headstart.heads.layers.decoder_layer import rotate

DOCUMENTS: dict[str, list[list[int]] | None] = {
    "one": None,
    "packed": [[7, 11, 3, 9], [1, 1, 26, 2]],
    "padded": [[30], [13]],
    "packed and padded": [[15, 10], [4, 4, 4]],
}
T = 30


def documents(lengths: list[list[int]] | None) -> Tensor | None:
    """Document numbers 0, 1, ... in runs along each row, then padding."""
    if lengths is None:
        return None
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return torch.stack([torch.cat([row, row.new_full((T - len(row),), -1)]) for row in rows])


def whole(drafter: Eagle3, features: Features) -> list[Tensor]:
    """`Eagle3.forward` with all scores of a pass at once."""
    layer, attn = drafter.midlayer, drafter.midlayer.self_attn
    embedded, state = drafter.backbone.embed(features.tokens_BT), drafter.states(features)
    length = state.shape[1]
    apart = torch.zeros(1, length, length, dtype=torch.bool)
    if features.document_BT is not None and bool((features.document_BT > 0).any()):
        apart = features.document_BT[:, :, None] != features.document_BT[:, None, :]
    passes: list[tuple[Tensor, Tensor]] = []
    out = []
    for k in range(drafter.trained_depth):
        n = max(length - 2 - k, 0)
        state, rotation = state[:, :n], drafter.cached.rotary(k, n, state.device)
        pair = layer.inputs(embedded[:, k + 1 : k + 1 + n], state)
        query = rotate(attn.split(attn.q_proj(pair), attn.num_heads), rotation)
        passes.append(tuple(x.repeat_interleave(attn.num_heads // attn.num_kv, 1) for x in layer.keys_values(pair, rotation)))
        (keys, values), *later = ((key[:, :, :n], value[:, :, :n]) for key, value in passes)
        scores = (query @ keys.mT).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1) | apart[:, None, :n, :n], float("-inf"))
        alone = [(query * key).sum(-1, keepdim=True) for key, _ in later]
        weights = (torch.cat([scores, *alone], -1) * attn.head_dim**-0.5).softmax(-1)
        mixed = weights[..., :n] @ values + sum(weights[..., n + j : n + j + 1] * value for j, (_, value) in enumerate(later))
        out.append(layer.finish(state, mixed, pair))
        state = drafter.next_state(out[-1])
    return out


def learned(drafter: Eagle3, out: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of a random linear function of all states."""
    drafter.zero_grad()
    make = torch.Generator().manual_seed(0)
    sum((x * torch.randn(x.shape, generator=make)).sum() for x in out).backward()
    return {name: weight.grad.clone() for name, weight in drafter.named_parameters() if weight.grad is not None}


def case(family: str, lengths: list[list[int]] | None, positions: int = T) -> tuple[Eagle3, Features]:
    on = backbone(family)
    drafter = random_drafter("eagle3", on, depth=4)
    assert isinstance(drafter, Eagle3)
    features = read(on, texts(2, positions), drafter)
    return drafter.requires_grad_(True), Features(features.tokens_BT, features.hidden_BTD, features.taps, document_BT=documents(lengths))


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have blocks of this many queries."""

    def of(count: int) -> None:
        for bound in ("LEAST", "MOST"):
            monkeypatch.setattr(causal, bound, count)

    return of


def close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys() and len(actual) > 8
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=2e-6 * float(gradient.abs().max()), rtol=1e-5, msg=name)


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [1, 4, 13, 64])
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_blocks_are_whole_scores(family: str, lengths: Any, rows: int, queries: Callable[[int], None]) -> None:
    """Forward pass and gradients, with grouped heads (llama) and without, in blocks of any size, documents anywhere in them."""
    queries(rows)
    drafter, features = case(family, lengths)
    out, expected = drafter(features), whole(drafter, features)
    for one, other in zip(out, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    close(learned(drafter, out), learned(drafter, expected))


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_blocks_with_a_window(lengths: Any, rows: int, queries: Callable[[int], None]) -> None:
    """A query attends to the last few positions of its document; in pass 2 it stands two further on, so to two fewer. Gradients too."""
    queries(rows)
    document_BT, window, n = documents(lengths), 7, T - 3
    blocks = divide(document_BT, (2, 4, T), torch.device("cpu"), window)
    assert all(high - low < rows + window for *_, low, high in blocks.upto(n))
    make = torch.Generator().manual_seed(0)
    query, by_mixed = (torch.randn(2, 4, n, 3, generator=make).requires_grad_() for _ in range(2))
    keys, values = (torch.randn(2, 2, n, 3, generator=make).requires_grad_() for _ in range(2))
    barred = torch.ones(n, n, dtype=torch.bool).triu(1) | torch.ones(n, n, dtype=torch.bool).tril(2 - window)
    if document_BT is not None and bool((document_BT > 0).any()):
        barred = barred | (document_BT[:, :n, None] != document_BT[:, None, :n])[:, None]
    scores = (query @ keys.repeat_interleave(2, 1).mT * 3**-0.5).masked_fill(barred, float("-inf"))
    expected = scores.softmax(-1) @ values.repeat_interleave(2, 1), scores.logsumexp(-1)
    actual = attend_past(query, keys, values, blocks.at_pass(2))
    losses = [(mixed * by_mixed).sum() + logsum.sum() for mixed, logsum in (actual, expected)]
    gradients = [torch.autograd.grad(loss, (query, keys, values)) for loss in losses]
    for one, other in zip((*actual, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_blocks_take_their_documents_keys_alone(queries: Callable[[int], None]) -> None:
    queries(4)
    lengths = [[7, 11, 3, 9], [12, 8, 10]]
    blocks = divide(documents(lengths), (2, 4, T), torch.device("cpu"))
    lows = {0: 0, 4: 0, 8: 0, 12: 7, 16: 7, 20: 18, 24: 20, 28: 20}
    assert blocks.bounds == tuple((first, min(first + 4, T), low, min(first + 4, T)) for first, low in lows.items())
    assert list(blocks.upto(9)) == [(0, 4, 0, 4), (4, 8, 0, 8), (8, 9, 0, 9)]
    assert divide(documents([[30], [13]]), (2, 4, T), torch.device("cpu")).starts_BT is None  # padding lies after everything that counts


def saved(drafter: Eagle3, features: Features) -> int:
    """Bytes that the forward pass keeps for backward, each storage once, without the weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in drafter.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = drafter(features)
    assert alive
    return sum(kept.values())


def made_up(drafter: Eagle3, length: int) -> Features:
    """Random features, without running the backbone."""
    make = torch.Generator().manual_seed(0)
    D = drafter.backbone.dim
    taps = {tap: torch.randn(1, length, D, generator=make) for tap in drafter.taps}
    return Features(torch.randint(61, (1, length), generator=make), torch.randn(1, length, D, generator=make), taps)


def test_memory_is_linear_in_the_length() -> None:
    drafter, _ = case("llama", None)
    short, long = (saved(drafter, made_up(drafter, length)) for length in (512, 2048))
    assert 3.9 * short < long < 4.1 * short
    whole_scores = 4 * 4 * 2048**2  # one pass's, four heads in fp32
    assert long < 0.5 * whole_scores


def test_scores_are_bounded() -> None:
    """Temporary memory too: no block has more scores than the minimum number of queries needs."""
    drafter, _ = case("llama", None)
    features = made_up(drafter, 1500)
    with Largest() as largest:
        sum(x.sum() for x in drafter(features)).backward()
    assert largest.numbers <= 4 * causal.LEAST * 1500


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_checkpointing_changes_no_gradient(lengths: Any) -> None:
    drafter, features = case("llama", lengths)
    plain = learned(drafter, drafter(features))
    drafter.recompute()
    checkpointed = learned(drafter, drafter(features))
    assert plain.keys() == checkpointed.keys() and all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_checkpointing_keeps_less() -> None:
    drafter, _ = case("llama", None)
    features = made_up(drafter, 256)
    before = saved(drafter, features)
    drafter.recompute()
    with torch.no_grad():
        drafter(features)  # nothing to keep, nothing to checkpoint
    assert saved(drafter, features) < 0.4 * before
