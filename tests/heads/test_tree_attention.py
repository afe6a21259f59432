"""Attention of tree passes repeats no keys and values, gives what repeating gives, and leaves other calls of transformers alone."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from architectures import served
from families import prompts, tiny
from shrink import model_of, shrink
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.tree_attention import MAX_EXACT, MAX_QUERIES, attend, attend_as_queries, tree_attention


@pytest.mark.parametrize("additive", [False, True])
def test_both_ways_of_grouping_equal_repeated_keys(additive: bool) -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(2, 6, 5, 8).transpose(1, 1), torch.randn(2, 3, 17, 8), torch.randn(2, 3, 17, 8)
    allowed = torch.rand(2, 1, 5, 17) > 0.3
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min) if additive else allowed
    for scale in (None, 0.5):
        repeated = [part.repeat_interleave(2, 1) for part in (keys, values)]
        expected = scaled_dot_product_attention(query, *repeated, mask, scale=scale)
        for way in (attend, attend_as_queries):
            assert torch.allclose(way(query, keys, values, mask, scale), expected, atol=1e-6)


class Transposed(TorchFunctionMode):
    """Results of torch's kernel lie in another order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.transpose(1, 2).contiguous().transpose(1, 2) if func is scaled_dot_product_attention else result


def test_a_kernel_may_return_its_result_in_any_memory_order() -> None:
    """As CUDA kernels do."""
    query, keys, values = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 17, 8), torch.randn(2, 3, 17, 8)
    allowed = torch.rand(2, 1, 5, 17) > 0.3
    expected = attend_as_queries(query, keys, values, allowed, None)
    with Transposed():
        assert torch.equal(attend_as_queries(query, keys, values, allowed, None), expected)


def test_a_single_query_in_bf16_is_summed_in_fp32() -> None:
    """torch's bf16 kernel takes several times as long for it."""
    query, keys, values = (torch.randn(2, heads, count, 8).bfloat16() for heads, count in ((6, 1), (3, 17), (3, 17)))
    allowed = torch.rand(2, 1, 1, 17) > 0.3
    expected = scaled_dot_product_attention(query.float(), keys.float(), values.float(), allowed, enable_gqa=True)
    found = attend(query, keys, values, allowed)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.bfloat16())


class Attention(TorchFunctionMode):
    """Notes the shapes of queries, keys and values of torch's kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Size, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.seen.append(tuple(one.shape for one in args[:3]))
        return func(*args, **(kwargs or {}))


def test_keys_that_heads_share_are_not_repeated() -> None:
    on, length = Backbone(tiny("llama")), MAX_EXACT + 1
    assert on.config.num_key_value_heads < on.config.num_attention_heads
    (ids,), allowed = prompts((length,)), torch.ones(1, length, length, dtype=torch.bool).tril()
    expected = on.read(ids[None]).hidden_BTD
    with Attention() as attention:
        assert torch.allclose(on.read(ids[None], None, None, {"full_attention": allowed}).hidden_BTD, expected, atol=1e-5)
    assert attention.seen and all(keys[1] == on.config.num_key_value_heads for _, keys, _ in attention.seen)
    padded = {"input_ids": ids[None], "attention_mask": torch.arange(length)[None] > 2}
    for ours in (False, True):  # the user's own calls are as before
        with Attention() as attention, tree_attention() if ours else nullcontext():
            on.model(**padded)
        assert all((keys[1] == on.config.num_key_value_heads) is ours for _, keys, _ in attention.seen)


def test_values_narrower_than_keys_are_padded_for_the_kernel_that_holds_no_scores() -> None:
    """DeepSeek-V3's, in prompts and in packed rows; outside of the backbone's passes they are left alone."""
    deepseek = next(one for one in served() if one.configuration["model_type"] == "deepseek_v3")
    on, length = Backbone(model_of(shrink(deepseek.configuration))), MAX_QUERIES + 1
    (ids,), allowed = prompts((length,)), torch.ones(1, length, length, dtype=torch.bool).tril()
    expected = on.base(ids[None]).last_hidden_state
    for mask in (None, dict.fromkeys(on.windows, allowed)):
        with Attention() as attention:
            assert torch.allclose(on.read(ids[None], attention_mask=mask).hidden_BTD, expected, atol=2e-4)
        assert attention.seen and all(keys[-1] == values[-1] for _, keys, values in attention.seen)
    with Attention() as attention:
        on.base(ids[None])
    assert attention.seen and all(keys[-1] > values[-1] for _, keys, values in attention.seen)
