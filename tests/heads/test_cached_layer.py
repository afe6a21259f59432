"""A decoder layer with its cache gives, at new positions, what causal attention gives.

Shape suffixes: B batch, T positions, D width.
"""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from headstart.heads.kv.cached_layers import CachedLayer
from headstart.heads.layers.decoder_layer import DecoderLayer, Rotary

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
