"""Block heads against a plain reference, their corrections in trees, and the layouts they are saved in.

Shape suffixes: B batch, T positions, D width, N elements of a block, K depth, H heads, C head width.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, LAYERS, VOCAB, backbone, random_drafter, read, texts
from safetensors.torch import load_file
from test_contract import CLOSE
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Anchors, Features
from headstart.heads.block import Block, _taps
from headstart.heads.layers.block_attention import lay_out
from headstart.heads.methods import build_drafter
from headstart.inference.contract import chain, draft

CORRECTIONS = ["none", "markov", "recurrent"]


def made(on: Backbone, correction: str, **arguments: Any) -> Block:
    drafter = random_drafter("block", on, correction=correction, correction_rank=6, **arguments)
    assert isinstance(drafter, Block)
    return drafter


def naive(drafter: Block, features: Features, row: int, t: int) -> list[Tensor]:
    """Logits of every depth at anchor t, computed element by element from the weights as they are saved."""
    on, config, weights = drafter.backbone, drafter.layer_config, drafter.tensors()
    C, H, G = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    base, tokens = config.rope_parameters["rope_theta"], features.tokens_BT[row]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps) ** -0.5 * weights[name]

    def turn(x_HC: Tensor, position: int) -> Tensor:
        angle = position * base ** (-torch.arange(0, C, 2).float() / C)
        a, b = x_HC[:, : C // 2], x_HC[:, C // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    assert features.taps is not None
    taps = [torch.cat([features.taps[tap][row, j] for tap in drafter.taps]) for j in range(t + 1)]
    context = [norm(weights["fc.weight"] @ tap, "hidden_norm.weight") for tap in taps]
    K = drafter.config.depth
    masked = drafter.config.correction == "none"
    block = [on.embed(tokens[t + 1])] + [on.embed(torch.tensor(drafter.mask_token))] * (K if masked else K - 1)
    for i in range(drafter.config.layers):
        name = f"layers.{i}.self_attn."
        inputs = [norm(x, f"layers.{i}.input_layernorm.weight") for x in block]
        sources = [*context, *inputs]
        keys = [norm((weights[name + "k_proj.weight"] @ x).view(G, C), name + "k_norm.weight") for x in sources]
        keys = [turn(key, position) for position, key in enumerate(keys)]
        values = [(weights[name + "v_proj.weight"] @ x).view(G, C) for x in sources]
        after = []
        for j, x in enumerate(inputs):
            query = turn(norm((weights[name + "q_proj.weight"] @ x).view(H, C), name + "q_norm.weight"), t + 1 + j)
            first = max(0, t + 2 + j - (drafter.config.sliding_window or 99))
            seen, mixed = slice(first, len(context) + j + 1 if drafter.config.causal else None), []
            for h in range(H):
                g = h // (H // G)
                shares = torch.stack([query[h] @ key[g] / C**0.5 for key in keys[seen]]).softmax(0)
                mixed.append(sum(share * value[g] for share, value in zip(shares, values[seen], strict=True)))
            y = block[j] + weights[name + "o_proj.weight"] @ torch.cat(mixed)
            z, mlp = norm(y, f"layers.{i}.post_attention_layernorm.weight"), f"layers.{i}.mlp."
            gate = torch.nn.functional.silu(weights[mlp + "gate_proj.weight"] @ z)
            after.append(y + weights[mlp + "down_proj.weight"] @ (gate * (weights[mlp + "up_proj.weight"] @ z)))
        block = after
    hidden = [norm(x, "norm.weight") for x in block][1 if masked else 0 :]
    logits = [on.readout(x) for x in hidden]
    if drafter.config.correction == "markov":
        w1, w2 = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
        logits = [x + w2 @ w1[tokens[t + 1 + k]] for k, x in enumerate(logits)]
    if drafter.config.correction == "recurrent":
        logits = logits[:1] + [x + domino(drafter, hidden[k], tokens[t + 1 : t + 2 + k]) for k, x in enumerate(logits) if k]
    return logits


def domino(drafter: Block, hidden_D: Tensor, path_K: Tensor) -> Tensor:
    """The correction of one depth, by torch's own GRU over the path."""
    weights = drafter.tensors()
    gru = torch.nn.GRU(drafter.backbone.dim, weights["prefix_gru.weight_hh_l0"].shape[1], bias=False, batch_first=True)
    gru.load_state_dict({name: weights[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")})
    _, state = gru(drafter.backbone.embed(path_K)[None])
    mixed = torch.nn.functional.silu(weights["embed_proj.0.weight"] @ torch.cat([hidden_D, state[0, 0]]))
    return weights["embed_proj.2.weight"] @ mixed


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_is_what_the_plain_reference_says(family: str, correction: str) -> None:
    on = backbone(family)
    window = {"qwen3": 5, "gemma3": 6}.get(family)
    drafter = made(on, correction, depth=3, layers=2, taps=[1, 4], causal=family == "qwen3", sliding_window=window)
    features, at = read(on, texts(2, 11), drafter), Anchors(torch.tensor([1, 0, 1]), torch.tensor([7, 0, 3]))
    hidden = drafter(features, at)
    for m, (row, t) in enumerate(zip(at.row_M.tolist(), at.position_M.tolist(), strict=True)):
        for k, expected in enumerate(naive(drafter, features, row, t)):
            parent = features.tokens_BT[row, t + 1 + k]
            torch.testing.assert_close(drafter.readout(hidden[k][m], k, parent), expected, **CLOSE)


@pytest.mark.parametrize("window", [None, 7])
def test_long_rows_are_computed_in_chunks_with_the_same_gradients(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, packed documents among them, and recomputed layers give the result and the gradients of one piece."""
    on = backbone("llama")
    document_BT = torch.tensor([[0] * 30, [0] * 9 + [1] * 14 + [2] * 5 + [-1] * 2])
    results = []
    for elements, recompute in ((10**6, False), (8, False), (8, True)):
        for bound in ("LEAST", "MOST"):
            monkeypatch.setattr(f"headstart.heads.layers.block_attention.{bound}", elements)
        drafter = made(on, "markov", depth=4, layers=2, sliding_window=window).requires_grad_(True)
        if recompute:
            drafter.recompute()
        features = read(on, texts(2, 30), drafter)
        features = Features(features.tokens_BT, features.hidden_BTD, features.taps, document_BT=document_BT)
        hidden = torch.stack(drafter(features, Anchors(torch.tensor([1, 0, 1, 1, 0]), torch.tensor([22, 5, 3, 10, 27]))))
        (hidden * torch.arange(hidden.numel()).view(hidden.shape).sin()).sum().backward()
        results.append([hidden.detach(), *(weight.grad for weight in drafter.parameters() if weight.grad is not None)])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_with_a_window_a_chunk_of_a_long_row_has_few_keys() -> None:
    """Two rows of 8,192 positions, an anchor at every fourth: keys of a window and of the anchors computed together, not of the row."""
    T, window = 8192, 512
    at = Anchors(torch.arange(2).repeat_interleave(T // 4), torch.arange(0, T, 4).repeat(2))
    tokens_BT = torch.zeros(2, T, dtype=torch.int64)
    whole, near = (lay_out(at, tokens_BT, None, 8, False, bound).chunks for bound in (None, window))
    assert [chunk[:2] for chunk in whole] == [chunk[:2] for chunk in near] and len(near) == 64
    assert max(high - low for _, _, low, high in near) <= window + 4 * 32 < max(high - low for _, _, low, high in whole) / 10


@pytest.mark.parametrize("correction", ["markov", "recurrent"])
def test_drafts_follow_their_path_in_a_tree(correction: str) -> None:
    """A node's logits depend on its parent; with a GRU, on the whole path. The block itself is computed once."""
    on = backbone("llama")
    drafter = made(on, correction, depth=3)
    state = drafter.begin(read(on, texts(1, 9), drafter))
    tokens = [torch.tensor([[5]]), torch.tensor([[7, 8]]), torch.tensor([[9, 9]])]  # two cousins of one token
    parents = [torch.tensor([[0]]), torch.tensor([[0, 0]]), torch.tensor([[0, 1]])]
    _, below, deeper = draft(drafter, state, tokens, parents)
    assert not torch.allclose(below[:, 0], below[:, 1])
    alike = torch.allclose(deeper[:, 0], deeper[:, -1])
    assert alike == (correction == "markov"), "the parents are the same, the paths are not"
    calls: list[int] = []
    first = drafter.layers[0]
    first.register_forward_pre_hook(lambda *_: calls.append(1))
    inner, drafter._draft = drafter._draft, lambda *inputs: calls.append(1) or inner(*inputs)  # type: ignore[method-assign]
    chain(drafter, state, texts(1, 3))
    assert len(calls) == 1


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_it_is_saved_as_engines_load_it(correction: str, tmp_path: Path) -> None:
    on = backbone("qwen3")
    drafter = made(on, correction, depth=4, layers=2, taps=[2, 4], mask_token=3)
    drafter.save_pretrained(tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    D, C = on.dim, drafter.layer_config.head_dim
    assert tensors["fc.weight"].shape == (D, 2 * D) and tensors["hidden_norm.weight"].shape == tensors["norm.weight"].shape == (D,)
    assert tensors["layers.1.self_attn.q_norm.weight"].shape == tensors["layers.1.self_attn.k_norm.weight"].shape == (C,)
    assert config["model_type"] == "qwen3" and config["num_hidden_layers"] == 2 and config["num_target_layers"] == LAYERS
    assert config["dflash_config"]["target_layer_ids"] == [1, 3] and config["dflash_config"]["mask_token_id"] == 3
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4] and config["sample_from_anchor"] is (correction != "none")
    common = ("layers.", "fc.", "norm.", "hidden_norm.")
    extra = {name: tuple(tensor.shape) for name, tensor in tensors.items() if not name.startswith(common)}
    if correction == "none":
        assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 5 and not extra
    elif correction == "markov":
        assert config["architectures"] == ["Qwen3DSparkModel"] and config["block_size"] == 4 and config["markov_rank"] == 6
        assert config["confidence_head_with_markov"] is False and config["mask_token_id"] == 3 and config["target_layer_ids"] == [1, 3]
        assert extra == {"markov_head.markov_w1.weight": (VOCAB, 6), "markov_head.markov_w2.weight": (VOCAB, 6)}
    else:
        G, domino_config = config["dflash_config"]["gru_hidden_dim"], config["dflash_config"]
        assert config["block_size"] == 4 and domino_config["projector_type"] == "domino" and domino_config["emb_dim"] == 6
        assert extra == {
            "prefix_gru.weight_ih_l0": (3 * G, D), "prefix_gru.weight_hh_l0": (3 * G, G),
            "embed_proj.0.weight": (6, D + G), "embed_proj.2.weight": (VOCAB, 6),
        }  # fmt: skip


def test_start_values() -> None:
    """Layers start as the backbone's last ones, with the input norm folded into the projections; corrections without effect."""
    on = backbone("llama")
    drafter, plain = (build_drafter("block", on, {"layers": 2, "correction": correction}) for correction in ("markov", "none"))
    assert isinstance(drafter, Block)
    layer, theirs = drafter.layers[0], on.layers[-2]
    folded = theirs.self_attn.v_proj.weight * theirs.input_layernorm.weight
    torch.testing.assert_close(layer.self_attn.v_proj.weight, folded)
    torch.testing.assert_close(layer.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    torch.testing.assert_close(drafter.norm.weight, on.base.norm.weight)
    assert not drafter.markov_head.markov_w2.weight.any() and plain.state_dict().keys() < drafter.state_dict().keys()
    qwen = build_drafter("block", backbone("qwen3"), {"layers": 1})
    assert isinstance(qwen, Block)
    torch.testing.assert_close(qwen.layers[0].self_attn.q_norm.weight, backbone("qwen3").layers[-1].self_attn.q_norm.weight)


@pytest.mark.parametrize(
    "layers,taps", [(36, (2, 10, 18, 26, 34)), (16, (2, 5, 8, 11, 14)), (6, (2, 3, 4)), (3, (2,)), (2, (1,)), (1, (1,))]
)
def test_default_taps(layers: int, taps: tuple[int, ...]) -> None:
    assert _taps(None, layers) == taps
