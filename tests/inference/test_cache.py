"""The ragged cache: after several passes it equals a fresh read of the sequence; attention masks, and attention of tree passes."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from architectures import served
from families import FAMILIES, Scripted, backbone, left_padded, prompts, say, tiny, unpadded
from shrink import model_of, shrink
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.heads.backbone.tree_attention import MAX_EXACT, MAX_QUERIES, attend, attend_as_queries, tree_attention
from headstart.heads.layers.ragged_cache import RaggedCache
from headstart.heads.layers.rows import STEP, grown
from headstart.inference.decode import Decoder


def audit(decoder: Decoder, on: Backbone) -> None:
    """Compare every layer's keys and values, row by row, with a single read of the sequence."""
    for row, number in enumerate(decoder.rows):
        if decoder.texts.of[number].ended:
            continue
        length = int(decoder.cache.lengths_B[row])
        ids = decoder.texts.of[number].ids_T[decoder.request.pads_B[number] :]
        assert length == len(ids) - 1, "all but the root has been read"
        fresh = on.model(ids[None, :length], use_cache=True).past_key_values
        for i, layer in enumerate(fresh.layers):
            keys, values = decoder.cache.layer(i)
            kept = layer.keys.shape[2]  # transformers' sliding layers keep their last keys only
            torch.testing.assert_close(keys[row, :, length - kept : length], layer.keys[0], atol=5e-5, rtol=1e-4)
            torch.testing.assert_close(values[row, :, length - kept : length], layer.values[0], atol=5e-5, rtol=1e-4)


def audited(of: SpeculativeModel, monkeypatch: pytest.MonkeyPatch, every: int, **arguments: object) -> list[list[int]]:
    """The output of generate, with the cache audited every ``every`` passes."""
    run, passes = Decoder._advance, []

    def advance(self: Decoder, *args: object) -> None:
        run(self, *args)  # type: ignore[arg-type]
        passes.append(len(self.rows))
        if len(passes) % every == 0:
            audit(self, of.backbone)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "_advance", advance)
        texts = of.backbone.model.generate(custom_generate=of.generate, **arguments).tolist()
    assert len(passes) >= every
    return texts


@pytest.mark.matrix(cells=2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("manner", ["nearly", "adversary"])
def test_the_cache_holds_what_a_fresh_read_would(family: str, manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on, rows = backbone(family), left_padded(prompts())
    options = {"max_new_tokens": 30, "do_sample": True, "seed": 7, "tree": TreeShape(20, 6)}
    plain = say(SpeculativeModel(on), rows, **options)
    scripted = SpeculativeModel(on, Scripted(on, unpadded(plain, rows), manner))
    assert audited(scripted, monkeypatch, 7, **rows, **options) == plain.tolist()


def test_stores_grow_in_steps_and_keep_what_they_hold() -> None:
    store = torch.randn(2, 3, 5, 4)
    assert grown(store, 5) is store
    larger = grown(store, 6)
    assert larger.shape == (2, 3, STEP, 4) and torch.equal(larger[:, :, :5], store) and not larger[:, :, 5:].any()
    assert grown(larger, STEP + 1).shape[2] == 2 * STEP, "it doubles"


def filled(lengths: list[int], slots: int = 24) -> RaggedCache:
    """Three layers, one of another shape, with different values in every slot."""
    layers = [(torch.randn(len(lengths), 2, slots, d), torch.randn(len(lengths), 2, slots, d)) for d in (4, 4, 8)]
    return RaggedCache(layers, torch.tensor(lengths))


@pytest.mark.parametrize("lengths", [[6], [6, 1, 9]])
def test_keep_moves_paths_behind_the_end(lengths: list[int]) -> None:
    cache = filled(lengths)
    before = [tuple(x.clone() for x in cache.layer(i)) for i in range(3)]
    paths = [[0, 2, 3, 6], [0, 1], [0, 4, 5]][: len(lengths)]
    counts = [len(path) for path in paths]
    cache.keep(paths)
    assert cache.lengths_B.tolist() == [n + c for n, c in zip(lengths, counts, strict=True)]
    assert cache.longest == max(cache.lengths_B.tolist())
    for i in range(3):
        for one, old in zip(cache.layer(i), before[i], strict=True):
            for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
                assert torch.equal(one[row, :, :length], old[row, :, :length])
                assert torch.equal(one[row, :, length : length + len(path)], old[row][:, [length + node for node in path]])


def test_rows_leave_and_join() -> None:
    cache, other = filled([6, 1, 9]), filled([30, 2], slots=32)
    rows = {(0, row): [x[row].clone() for i in range(3) for x in cache.layer(i)] for row in range(3)}
    rows |= {(1, row): [x[row].clone() for i in range(3) for x in other.layer(i)] for row in range(2)}
    cache.select([2, 0])
    assert cache.longest == 9
    cache.join(other)
    assert cache.lengths_B.tolist() == [9, 6, 30, 2] and cache.longest == 30
    cache.stores(60)
    for place, (who, length) in enumerate([((0, 2), 9), ((0, 0), 6), ((1, 0), 30), ((1, 1), 2)]):
        for one, old in zip([x for i in range(3) for x in cache.layer(i)], rows[who], strict=True):
            assert one.shape[2] >= 90 and torch.equal(one[place, :, :length], old[:, :length])


# Attention of tree passes repeats no keys and values, gives what repeating gives, and leaves other calls of transformers alone.


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
