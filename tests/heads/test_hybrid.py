"""Backbones with recurrent layers: each path of a tree is computed as if alone, and the output equals transformers'.

Shape suffixes: L layers, B batch, H heads, N tree nodes, K key width, V value width (vocabulary for logits), C channels.
"""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from families import VOCAB, Scripted, build, left_padded, prompts, random_drafter, say, texts, unpadded
from test_tree import random_tree
from torch import Tensor
from transformers import DynamicCache

from headstart import Backbone, SpeculativeModel
from headstart.heads.backbone.recurrent import Added, Nodes, States, convolution_places, delta_rule
from headstart.inference.capture.capture import Capturer
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.tree import CandidateTree, TreeShape
from headstart.support.errors import UserError
from headstart.support.pytree import list_tensors

L, A = "linear_attention", "full_attention"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
SIZES |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
DENSE = SIZES | {"num_hidden_layers": 6, "layer_types": [L, L, A, L, A, L], "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", DENSE | {"num_experts": 0}),
    "qwen3_next_moe": ("Qwen3Next", DENSE | EXPERTS),
    "qwen3_5": ("Qwen3_5Text", DENSE),
    "olmo_hybrid": ("OlmoHybrid", DENSE | {"num_key_value_heads": 4}),
}
LENGTH = 12
LOOSE = 4e-3
"""Tolerance for logits of size 5 in fp32: OLMo-Hybrid itself differs this much between one pass and token by token."""
SEEDS = [5, 77, -3, 2**63 + 11, 0]


@functools.cache
def hybrid(family: str) -> Backbone:
    return Backbone(build(*CONFIGS[family]))


def lines(tree: CandidateTree, row: int, node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, tree.parents[row][path[0]])
    return path


def random_nodes(B: int, N: int) -> tuple[Nodes, Tensor]:
    """Random nodes of two heads, and a state; float64."""
    rand = functools.partial(torch.randn, dtype=torch.float64)
    key = torch.nn.functional.normalize(rand(B, 2, N, 5), dim=-1)
    return Nodes(rand(B, 2, N, 5), key, rand(B, 2, N, 3), -3 * rand(B, 2, N).abs(), 2 * rand(B, 2, N).sigmoid()), rand(B, 2, 5, 3)


@pytest.mark.parametrize("size", [1, 2, 9, 40])
def test_the_rule_over_a_tree_is_the_rule_token_by_token(size: int) -> None:
    torch.manual_seed(size)
    tree = random_tree(size, 50, seed=size)
    _, depths_BN, seen_BNM = tree.tensors(torch.device("cpu"))
    nodes, state_BHKV = random_nodes(*seen_BNM.shape[:2])
    out_BHNV, update_BHNV, decay_BHN = delta_rule(nodes, state_BHKV, seen_BNM)
    inputs, window = torch.randn(3, 4, size, dtype=torch.float64), torch.randn(3, 4, 2, dtype=torch.float64)
    places_BNJ = convolution_places(seen_BNM, depths_BN, 3)
    added = Added(nodes.key_BHNK[None], update_BHNV[None], decay_BHN[None], inputs[None], seen_BNM, places_BNJ)
    before = States(state_BHKV[None], window[None])
    for row, parents in enumerate(tree.parents):
        for node in range(len(parents)):
            state, path = state_BHKV[row], lines(tree, row, node)
            for one in path:
                key = nodes.key_BHNK[row, :, one]
                state = state * nodes.decay_BHN[row, :, one, None, None].exp()
                known = torch.einsum("hkv,hk->hv", state, key)
                fresh = nodes.beta_BHN[row, :, one, None] * (nodes.value_BHNV[row, :, one] - known)
                state = state + key[..., None] * fresh[:, None]
            read = torch.einsum("hkv,hk->hv", state, nodes.query_BHNK[row, :, node])
            torch.testing.assert_close(out_BHNV[row, :, node], read, atol=1e-12, rtol=1e-12)
            after = before.behind(added, torch.tensor([node if other == row else 0 for other in range(3)]))
            torch.testing.assert_close(after.state_LBHKV[0, row], state, atol=1e-12, rtol=1e-12)
            assert torch.equal(after.window_LBCW[0, row], torch.cat([window[row], inputs[row][:, path]], -1)[:, -2:])


def read_prompts(of: Backbone, rows: list[Tensor]) -> tuple[Reader, Any, Any]:
    reader, lengths_B = Reader(of, (1, 4), Capturer("off", torch.device("cpu"))), torch.tensor([len(row) for row in rows])
    padded = torch.stack([torch.cat([row, row.new_full((int(lengths_B.max()) - len(row),), 7)]) for row in rows])
    return reader, *reader.prompts(padded, lengths_B)


@pytest.mark.matrix(cells=2)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_tree_is_read_as_its_paths(family: str) -> None:
    """Logits and features of every node against the model's own pass over the sequence that ends there."""
    on, rows, tree = hybrid(family), prompts((9, 2, 9)), random_tree(17, VOCAB, seed=2)
    reader, _, cache = read_prompts(on, rows)
    forwards = [vars(module).get("forward") for module in on.model.modules()]
    features, logits_BNV, _ = reader.tree(cache, tree)
    assert [vars(module).get("forward") for module in on.model.modules()] == forwards, "the model is left as it was"
    assert features.taps is not None
    for row, parents in enumerate(tree.parents):
        for node in range(len(parents)):
            path = [tree.tokens[row][one] for one in lines(tree, row, node)]
            text = torch.cat([rows[row], torch.tensor(path)])[None]
            torch.testing.assert_close(logits_BNV[row, node], on.model(text).logits[0, -1], atol=LOOSE, rtol=1e-3)
            fresh = on.read(text, taps=(1, 4))
            assert fresh.taps is not None
            torch.testing.assert_close(features.taps[4][row, node], fresh.taps[4][0, -1], atol=LOOSE, rtol=1e-3)


def test_prompts_of_any_lengths_are_read_as_if_alone() -> None:
    on, rows = hybrid("qwen3_next"), prompts((9, 1, 14, 9, 2))
    _, features, cache = read_prompts(on, rows)
    assert features.document_BT is not None and features.lengths_B.tolist() == cache.lengths_B.tolist() == [9, 1, 14, 9, 2]
    for row, text in enumerate(rows):
        _, mine, fresh = read_prompts(on, [text])
        torch.testing.assert_close(features.hidden_BTD[row, : len(text)], mine.hidden_BTD[0], atol=1e-5, rtol=1e-4)
        for one, other in zip(list_tensors(cache.states), list_tensors(fresh.states), strict=True):
            torch.testing.assert_close(one[:, row], other[:, 0], atol=1e-5, rtol=1e-4)
        for number in (2, 4):
            for one, other in zip(cache.layer(number), fresh.layer(number), strict=True):
                torch.testing.assert_close(one[row, :, : len(text)], other[0], atol=1e-5, rtol=1e-4)


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("manner", ["eagle3", "nearly"])
def test_sampled_text_is_that_of_autoregressive_decoding(manner: str) -> None:
    """A batch of five whose rows end at different times, and one row alone with its seed; a small batch lets rows join."""
    on, rows = hybrid("qwen3_next"), left_padded(prompts())
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": True, "eos_token_id": [4, 5, 15]}
    plain = unpadded(say(SpeculativeModel(on), rows, seed=SEEDS, **options), rows)
    assert len({tuple(text).index(0) if 0 in text[-LENGTH:] else len(text) for text in plain}) > 1, "rows leave"
    of = SpeculativeModel(on, Scripted(on, plain, manner) if manner in ("oracle", "nearly") else random_drafter(manner, on))
    for extra in ({"tree": TreeShape(9, 1)}, {"batch_size": 2}):
        out = say(of, rows, seed=SEEDS, return_dict_in_generate=True, **options, **extra)
        assert unpadded(out.sequences, rows) == plain and (out.tau > 1.3 or manner != "nearly"), "drafts are accepted"
    one = on.model.generate(prompts()[3][None], custom_generate=of.generate, seed=SEEDS[3], **options)[0].tolist()
    assert one == plain[3][: len(one)] and not any(plain[3][len(one) :])


def test_the_rule_beside_no_other_layers_is_refused() -> None:
    """Other recurrences: docs/families.md, by test_families.py."""
    with pytest.raises(UserError, match="Qwen3NextForCausalLM has layers of kind 'linear_attention' beside no others"):
        Backbone(build("Qwen3Next", DENSE | {"layer_types": [L] * 6, "num_experts": 0}))


def test_what_would_carry_a_state_across_is_refused() -> None:
    """A mask of packed documents, and a cache without room for recurrent states."""
    on, tokens = hybrid("qwen3_next"), texts(1, 6)
    attention_mask = {"full_attention": torch.ones(1, 6, 6, dtype=torch.bool).tril()}
    for cache, mask in ((None, attention_mask), (DynamicCache(), None)):
        with pytest.raises(UserError, match="Qwen3NextForCausalLM has recurrent layers.*data.packing=false"):
            on.read(tokens, cache, None, mask)


def test_in_bf16_a_tree_is_close_to_its_paths() -> None:
    on, tree = Backbone(build(*CONFIGS["qwen3_next"]).to(torch.bfloat16)), random_tree(9, VOCAB, seed=2, rows=1)
    reader, _, cache = read_prompts(on, prompts((9,)))
    _, logits_BNV, added = reader.tree(cache, tree)
    text = torch.cat([prompts((9,))[0], torch.tensor([tree.tokens[0][one] for one in lines(tree, 0, 8)])])
    expected = on.model(text[None]).logits[0, -1]
    assert logits_BNV.dtype == torch.bfloat16 and (logits_BNV[0, 8] - expected).abs().max() < 0.15 * expected.abs().max()
    cache.keep([lines(tree, 0, 8)], added)
    assert {one.dtype for one in list_tensors(cache.states)} == {torch.float64, torch.bfloat16}


def test_a_copy_reads_with_layers_of_its_own() -> None:
    heads = SpeculativeModel(hybrid("qwen3_5"), random_drafter("medusa", hybrid("qwen3_5")), capture="off")
    row = left_padded(prompts((9,)))
    for other in (copy.deepcopy(heads), pickle.loads(pickle.dumps(heads))):
        assert torch.equal(say(other, row, max_new_tokens=8), say(heads, row, max_new_tokens=8))
