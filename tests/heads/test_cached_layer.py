"""A decoder layer with its cache gives, at accepted positions and at drafted nodes, what it gives when trained: causal attention.

Shape suffixes: B batch, T positions, N nodes, D width.
"""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from headstart.heads.kv.cached_layers import CachedLayer
from headstart.heads.kv.draft_cache import DraftCache
from headstart.heads.layers.causal_attention import divide
from headstart.heads.layers.decoder_layer import Attention, DecoderLayer, NormedAttention, Rotary
from headstart.heads.mtp import GatedAttention

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=4
)
LENGTHS = (9, 6)


@pytest.fixture
def cached() -> CachedLayer:
    torch.manual_seed(0)
    return CachedLayer(DecoderLayer(CONFIG).requires_grad_(False), Rotary(CONFIG))


def states(seed: int = 1) -> Tensor:
    return torch.randn(len(LENGTHS), max(LENGTHS), CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))


def filled(cached: CachedLayer, state_BTD: Tensor, pieces: tuple[int, ...]) -> DraftCache:
    """The cache after the rows' positions, fed in pieces of those lengths (rows right-padded)."""
    lengths_B, start = torch.tensor(LENGTHS), 0
    cache = cached.empty(torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)).reserve(max(LENGTHS) + 4)
    for count in pieces:
        counts_B = (lengths_B - start).clamp(min=0, max=count)
        offsets_BT = cached.kept_offsets(cache, count, counts_B)
        piece_BTD = state_BTD[torch.arange(len(LENGTHS))[:, None], (start + offsets_BT).clamp(max=max(LENGTHS) - 1)]
        cache = cached.extend(cache, cached.layer.inputs(piece_BTD), offsets_BT, counts_B)
        start += count
    return cache


def trained(cached: CachedLayer, state_TD: Tensor) -> Tensor:
    """The layer's output at every position of one sequence, as in training."""
    blocks = divide(None, (1, CONFIG.num_attention_heads, len(state_TD)), state_TD.device)
    return cached.layer.forward_train([state_TD[None]], [], cached.rotary, blocks)[0][0]


@pytest.mark.parametrize("pieces", [(9,), (4, 5), (1,) * 9])
@pytest.mark.parametrize("offload", [False, True])
def test_the_last_position_attends_to_its_sequence(cached: CachedLayer, pieces: tuple[int, ...], offload: bool) -> None:
    cached.limit(None, offload=offload)
    state_BTD = states()
    cache = filled(cached, state_BTD, pieces)
    last_B1D = torch.stack([state_BTD[b, length - 1 : length] for b, length in enumerate(LENGTHS)])
    output_B1D = cached.attend_last(cache, cached.layer.inputs(last_B1D), last_B1D)
    for b, length in enumerate(LENGTHS):
        torch.testing.assert_close(output_B1D[b, 0], trained(cached, state_BTD[b, :length])[-1])


def test_a_window_holds_sinks_and_the_last_positions(cached: CachedLayer) -> None:
    """With room for a row's positions a window changes nothing; a shorter one changes the row that is longer than it."""
    state_BTD = states()
    last_B1D = torch.stack([state_BTD[b, length - 1 : length] for b, length in enumerate(LENGTHS)])
    outputs = {}
    for window in (None, 8, 3):
        cached.limit(window, sink=2)
        outputs[window] = cached.attend_last(filled(cached, state_BTD, (9,)), cached.layer.inputs(last_B1D), last_B1D)
    torch.testing.assert_close(outputs[8], outputs[None])
    assert not torch.allclose(outputs[3], outputs[None])


@pytest.mark.parametrize("pieces", [(9,), (4, 5), (1,) * 9])
@pytest.mark.parametrize("window", [None, 8, 3])
def test_new_positions_attend_to_the_kept_ones_before_them(cached: CachedLayer, pieces: tuple[int, ...], window: int | None) -> None:
    """The outputs at new positions are the causal layer's; with a short window, over the positions that it keeps at the end of a piece."""
    cached.limit(window, sink=2)
    state_BTD, start = states(), 0
    lengths_B = torch.tensor(LENGTHS)
    cache = cached.empty(torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)).reserve(max(LENGTHS) + 4)
    for count in pieces:
        counts_B = (lengths_B - start).clamp(min=0, max=count)
        offsets_BT = cached.kept_offsets(cache, count, counts_B)
        places_BT = start + offsets_BT
        piece_BTD = state_BTD[torch.arange(len(LENGTHS))[:, None], places_BT.clamp(max=max(LENGTHS) - 1)]
        x_BTX = cached.layer.inputs(piece_BTD)
        cache = cached.extend(cache, x_BTX, offsets_BT, counts_B)
        output_BTD = cached.attend_new(cache, x_BTX, piece_BTD, offsets_BT, counts_B)
        assert output_BTD.isfinite().all()
        for b, t in ((b, t) for b in range(len(LENGTHS)) for t in range(places_BT.shape[1]) if offsets_BT[b, t] < counts_B[b]):
            place, end = int(places_BT[b, t]), start + int(counts_B[b])
            kept = [p for p in range(place + 1) if window is None or p < 2 or p >= end - window]
            if place in kept:
                torch.testing.assert_close(output_BTD[b, t], alone(cached, state_BTD[b], kept))
        start += count


def alone(cached: CachedLayer, state_TD: Tensor, kept: list[int]) -> Tensor:
    """The output at the last of these positions of one sequence, attending to all of them."""
    cos, sin = cached.rotary.table(len(state_TD), state_TD.device)
    rotation = cos[kept][None, None], sin[kept][None, None]
    x_1TD = cached.layer.inputs(state_TD[None, kept])
    mask_1TT = torch.ones(1, len(kept), len(kept), dtype=torch.bool)
    query, *past = cached.layer.self_attn.project(x_1TD, rotation)
    return cached.layer.attend(query, state_TD[None, kept], x_1TD, tuple(past), mask_1TT)[0, -1]


def test_drafted_nodes_attend_to_the_sequence_and_their_ancestors(cached: CachedLayer) -> None:
    """Two children of the root, then a child of the second: each node's output is that of its own path appended to the row."""
    state_BTD, node_BND = states(), states(2)[:, :3]
    cache = filled(cached, state_BTD, (9,))
    first = cached.nodes_below(cache, None, torch.tensor([[0, 0]]).expand(len(LENGTHS), 2), 0)
    first_B2D, cache = cached.attend_nodes(cache, cached.layer.inputs(node_BND[:, :2]), node_BND[:, :2], first, 0)
    second = cached.nodes_below(cache, first, torch.tensor([[1]]).expand(len(LENGTHS), 1), 1)
    second_B1D, _ = cached.attend_nodes(cache, cached.layer.inputs(node_BND[:, 2:]), node_BND[:, 2:], second, 1)
    for b, length in enumerate(LENGTHS):
        for path, output_D in (([0], first_B2D[b, 0]), ([1], first_B2D[b, 1]), ([1, 2], second_B1D[b, 0])):
            torch.testing.assert_close(output_D, trained(cached, torch.cat([state_BTD[b, :length], node_BND[b, path]]))[-1])


@pytest.mark.parametrize("attention", [Attention, NormedAttention, GatedAttention])
@pytest.mark.parametrize("rotated", [4, 2])
def test_queries_and_keys_are_rotated_together_as_apart(attention: type[Attention], rotated: int) -> None:
    """Also where only a part of each head is rotated."""
    torch.manual_seed(0)
    layer, x_BTD = attention(CONFIG, CONFIG.hidden_size), states()
    part = LlamaConfig.from_dict(CONFIG.to_dict() | {"head_dim": rotated})
    rotation = Rotary(part)(3, x_BTD.shape[1], x_BTD.device)
    together, apart = layer.project(x_BTD, rotation), (layer.queries(x_BTD, rotation), *layer.keys_values(x_BTD, rotation))
    assert [part.shape[1] for part in together] == [4, 2, 2] and all(map(torch.equal, together, apart))
    assert torch.equal(together[0][..., rotated:], layer.norm_queries(layer.split_queries(x_BTD))[..., rotated:])
