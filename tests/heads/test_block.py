"""Block heads against a plain reference, their corrections in trees, and the layouts they are saved in.

Shape suffixes: B batch, T positions, D width, K depth.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import backbone, random_drafter, read, texts, tiny
from test_contract import CLOSE

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Anchors, Features
from headstart.heads.block import Block
from headstart.heads.layers.block_attention import lay_out
from headstart.heads.layers.block_parts import block_taps
from headstart.heads.methods import build_drafter
from headstart.inference.contract import chain, draft, part
from headstart.support.errors import UserError


def made(on: Backbone, correction: str, **arguments: Any) -> Block:
    drafter = random_drafter("block", on, correction=correction, correction_rank=6, **arguments)
    assert isinstance(drafter, Block)
    return drafter


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


@pytest.mark.parametrize("correction", ["markov", "recurrent", "selector"])
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
    assert alike == (correction != "recurrent"), "the parents are the same, the paths are not"
    calls: list[int] = []
    first = drafter.layers[0]
    first.register_forward_pre_hook(lambda *_: calls.append(1))
    inner, drafter._draft = drafter._draft, lambda *inputs: calls.append(1) or inner(*inputs)  # type: ignore[method-assign]
    chain(drafter, state, texts(1, 3))
    assert len(calls) == 1


def test_the_selector_orders_the_likeliest_tokens_alone() -> None:
    """The largest logits are those of the k candidates, with their scores; in training the others' gradients are those of plain logits."""
    torch.manual_seed(2)
    drafter = made(backbone("llama"), "selector", selector_candidates=5).requires_grad_(True)
    plain, selector = made(backbone("llama"), "none"), drafter.candidate_selector
    hidden_MD, parents_M = torch.randn(7, 32) * 3, texts(1, 7)[0]
    unary_MV, found_MV = plain.readout(hidden_MD, 0), drafter.readout(hidden_MD, 0, parents_M)
    candidates_MK = unary_MV.topk(5).indices
    wanted_MK = unary_MV.gather(1, candidates_MK)
    for m, tokens_K in enumerate(candidates_MK.tolist()):
        context_R = selector.predecessor_codebook[parents_M[m]] * selector.hidden_projection(hidden_MD[m])
        for i, token in enumerate(tokens_K):
            wanted_MK[m, i] += context_R.dot(selector.successor_codebook[token])
    torch.testing.assert_close(found_MV.gather(1, candidates_MK), wanted_MK)
    assert (wanted_MK.argmax(1) > 0).any() and torch.equal(found_MV.topk(5).indices.sort().values, candidates_MK.sort().values)
    others_MV = torch.ones_like(unary_MV, dtype=torch.bool).scatter(1, candidates_MK, False)
    torch.testing.assert_close(found_MV[others_MV], torch.minimum(unary_MV, wanted_MK.amin(1, keepdim=True))[others_MV])
    leaf_MV = unary_MV.detach().requires_grad_(True)
    selector(leaf_MV, hidden_MD, parents_M).sum().backward()
    assert torch.equal(leaf_MV.grad, torch.ones_like(leaf_MV)) and bool(selector.successor_codebook.grad.any())


def test_a_convolution_stays_within_its_block_and_starts_as_nothing() -> None:
    on, arguments = backbone("llama"), {"depth": 3, "layers": 2, "correction": "none", "causal": True}
    plain, drafter = (build_drafter("block", on, {**arguments, "convolution": convolution}) for convolution in (False, True))
    drafter.load_state_dict({**drafter.state_dict(), **plain.state_dict()})
    features, roots_BK = read(on, texts(2, 9), plain), texts(2, 3, seed=4)
    for one, other in zip(*(chain(heads, heads.begin(features), roots_BK) for heads in (plain, drafter)), strict=True):
        torch.testing.assert_close(one, other)
    mixed = random_drafter("block", on, **arguments, convolution=True).layers[0].attention_conv
    x_MND = torch.randn(2, 4, 32)
    later_MND = torch.cat([x_MND[:, :2], x_MND[:, 2:] + 1], 1)
    one, other = (mixed(x, x, 1) for x in (x_MND, later_MND))
    assert torch.equal(one[:, :2], other[:, :2]) and not torch.isclose(one[:, 2:], other[:, 2:]).all()
    torch.testing.assert_close(one[:, 0], x_MND[:, 0] * (mixed.base_kernel[1, 0] + added(mixed, x_MND[:, 0])))
    with pytest.raises(UserError, match=r"drafter\.convolution=true is of widths that 16 divides; the backbone's is 24: set it to false"):
        build_drafter("block", Backbone(tiny("llama", hidden_size=24)), {"convolution": True})


def added(convolution: Any, x_MD: torch.Tensor) -> torch.Tensor:
    """The part of the first tap's kernel, after the sublayer, that depends on its input: rows 4 and 5 of the projection, of 16 channels."""
    return (x_MD @ convolution.kernel_projection.weight[4:6].mT).repeat_interleave(16, 1)


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
    assert block_taps(None, layers) == taps


@pytest.mark.parametrize("correction", ["none", "markov", "recurrent"])
def test_a_sliding_window_of_a_block(correction: str) -> None:
    """What lies before it changes no draft, in whatever pieces a text comes; `limit` narrows it; no more than a window is kept."""
    drafter = random_drafter("block", backbone("llama"), depth=4, layers=1, correction=correction, sliding_window=10)
    tokens_BT, next_BK = texts(2, 60), texts(2, 4, seed=5)
    features = read(backbone("llama"), tokens_BT, drafter)
    assert features.taps is not None
    far = {tap: torch.cat([x[:, :40] + 1, x[:, 40:]], 1) for tap, x in features.taps.items()}
    near = {tap: torch.cat([x[:, :57] + 1, x[:, 57:]], 1) for tap, x in features.taps.items()}
    drafts = [chain(drafter, drafter.begin(replace(features, taps=taps)), next_BK) for taps in (features.taps, far, near)]
    state = drafter.begin(part(features, 0, 33))
    for start, end in ((33, 34), (34, 47), (47, 60)):
        state = drafter.begin(part(features, start, end), drafter.reserve(state, end + 20))
    drafts.append(chain(drafter, drafter.reserve(state, 80), next_BK))
    assert {cache.ring.slots for cache in state.caches} == {10}  # type: ignore[attr-defined]
    for one, other, third, pieces in zip(*drafts, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
        torch.testing.assert_close(one, pieces, **CLOSE)
        assert not torch.allclose(one, third)
    drafter.limit(4)
    assert not any(map(torch.allclose, drafts[0], chain(drafter, drafter.begin(features), next_BK)))
