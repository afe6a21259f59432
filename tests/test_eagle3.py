"""EAGLE-3 against a plain reference: training-time test position by position, and properties of its weights.

Shape suffixes: B batch, T positions, D width, H heads, C head width.
"""

from __future__ import annotations

import copy

import pytest
import torch
from families import FAMILIES, backbone, random_drafter, read, texts
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.eagle3 import Eagle3, _taps
from headstart.heads.layers.decoder_layer import OTHER_STREAM_SCALE
from headstart.heads.methods import build_drafter

CLOSE = {"atol": 3e-5, "rtol": 1e-4}


def naive_eagle3(drafter: Eagle3, features: Features) -> list[Tensor]:
    """Training-time test, one position at a time: position t of pass k sees the first pass's keys 0..t and its own later ones."""
    layer, attn, config = drafter.midlayer, drafter.midlayer.self_attn, drafter.layer_config
    C, H, KV = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    base = config.rope_parameters["rope_theta"]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean() + config.rms_norm_eps) ** -0.5 * weight

    def turn(x_HC: Tensor, position: int) -> Tensor:
        angle = position * base ** (-torch.arange(0, C, 2).float() / C)
        a, b = x_HC[:, : C // 2], x_HC[:, C // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    assert features.taps is not None
    out = []
    for row, tokens in enumerate(features.tokens_BT):
        T = len(tokens)
        states = [drafter.fc.weight @ torch.cat([features.taps[tap][row, t] for tap in drafter.taps]) for t in range(T)]
        keys: list[list[Tensor]] = []
        values: list[list[Tensor]] = []
        rows: list[list[Tensor]] = []
        for k in range(drafter.trained_depth):
            pairs = [
                torch.cat(
                    [
                        norm(features_embed(drafter, tokens[t + 1 + k]), layer.input_layernorm.weight),
                        norm(states[t], layer.hidden_norm.weight),
                    ]
                )
                for t in range(T - 2 - k)
            ]
            keys.append([turn((attn.k_proj.weight @ pair).view(KV, C), t + k) for t, pair in enumerate(pairs)])
            values.append([(attn.v_proj.weight @ pair).view(KV, C) for pair in pairs])
            new = []
            for t, pair in enumerate(pairs):
                query = turn((attn.q_proj.weight @ pair).view(H, C), t + k)
                seen = [(0, j) for j in range(t + 1)] + [(j, t) for j in range(1, k + 1)]
                mixed = []
                for h in range(H):
                    g = h // (H // KV)
                    weights = torch.stack([query[h] @ keys[i][j][g] / C**0.5 for i, j in seen]).softmax(0)
                    mixed.append(sum(w * values[i][j][g] for w, (i, j) in zip(weights, seen, strict=True)))
                x = states[t] + attn.o_proj.weight @ torch.cat(mixed)
                new.append(x + layer.mlp(norm(x, layer.post_attention_layernorm.weight)))
            states = new
            rows.append(new)
        out.append([torch.stack(x) for x in rows])
    return [torch.stack([row[k] for row in out]) for k in range(drafter.trained_depth)]


def fresh(on: Backbone, **arguments: int) -> Eagle3:
    drafter = build_drafter("eagle3", on, arguments)
    assert isinstance(drafter, Eagle3)
    return drafter


def features_embed(drafter: Drafter, token: Tensor) -> Tensor:
    return drafter.backbone.embed(token[None])[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_eagle3_is_taught_as_the_plain_reference_says(family: str) -> None:
    on = backbone(family)
    drafter = random_drafter("eagle3", on, depth=4)
    assert isinstance(drafter, Eagle3)
    features = read(on, texts(2, 11), drafter)
    for k, (one, other) in enumerate(zip(drafter(features), naive_eagle3(drafter, features), strict=True)):
        torch.testing.assert_close(one, other, **CLOSE)
        normed = torch.nn.functional.rms_norm(other, (on.dim,), drafter.norm.weight, drafter.layer_config.rms_norm_eps)
        torch.testing.assert_close(drafter.readout(one, k), normed @ drafter.lm_head.weight.T, **CLOSE)


@pytest.mark.parametrize(
    "layers,taps", [(32, (2, 16, 29)), (36, (2, 18, 33)), (12, (2, 6, 9)), (6, (1, 3, 5)), (4, (1, 2, 3)), (2, (1,)), (1, (1,))]
)
def test_default_taps(layers: int, taps: tuple[int, ...]) -> None:
    """``(2, L//2, L-3)``, as in every engine; other taps only where that does not give three layers."""
    assert _taps(None, layers) == taps


def test_the_layer_starts_as_the_backbones_last() -> None:
    """Weights that read the state are copied from that layer; a layer of another shape or width keeps its random initialisation."""
    on = backbone("llama")
    drafter, last, D = fresh(on), on.layers[-1], on.dim
    layer = drafter.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        reads = getattr(layer.self_attn, name).weight
        assert torch.equal(reads[:, D:], getattr(last.self_attn, name).weight) and 0 < reads[:, :D].abs().max() < OTHER_STREAM_SCALE
    assert torch.equal(layer.self_attn.o_proj.weight, last.self_attn.o_proj.weight)
    assert torch.equal(layer.mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(layer.hidden_norm.weight, last.input_layernorm.weight) and torch.equal(drafter.norm.weight, on.base.norm.weight)
    assert torch.equal(layer.input_layernorm.weight, torch.ones(D))
    for other in (fresh(on, intermediate_size=40), fresh(backbone("gpt2")), fresh(backbone("gemma3"))):
        assert torch.equal(other.midlayer.hidden_norm.weight, torch.ones(D)) and torch.equal(other.norm.weight, torch.ones(D))
    qwen = backbone("qwen3")   # it normalises queries and keys, which a head does not
    layer, last = fresh(qwen).midlayer, qwen.layers[-1]
    assert torch.equal(layer.self_attn.v_proj.weight[:, D:], last.self_attn.v_proj.weight)
    assert layer.self_attn.q_proj.weight.abs().max() < 1 < last.self_attn.q_proj.weight.abs().max()


def test_draft_vocabulary_follows_the_device() -> None:
    drafter = random_drafter("eagle3", backbone("llama"), draft_vocab_size=23)
    moved = copy.deepcopy(drafter).to("meta")
    assert moved.vocabulary is not None and moved.vocabulary.device == moved.lm_head.weight.device


def test_rotation_is_the_same_in_bf16() -> None:
    """Trained in fp32, run in bf16: angles come from unrounded frequencies."""
    drafter, cpu = random_drafter("eagle3", backbone("llama")), torch.device("cpu")
    other = copy.deepcopy(drafter).to(torch.bfloat16)
    for one, two in zip(drafter.cached.rotary(3, 100, cpu), other.cached.rotary(3, 100, cpu), strict=True):
        assert torch.equal(one, two.float())
