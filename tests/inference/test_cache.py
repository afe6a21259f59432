"""The ragged cache: after several passes it equals a fresh read of the sequence; attention masks.

Shape suffixes: L layers, B batch, H heads, N tree nodes, S slots, D head width.
"""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, Scripted, backbone, left_padded, prompts, say, unpadded
from test_tree import random_tree

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.kv.ragged_cache import RaggedCache, masks_by_kind, visible_slots
from headstart.heads.kv.rows import STEP, grown, put
from headstart.inference.decode import Decoder
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel


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


@pytest.mark.parametrize("lengths", [[6], [6, 1, 9]])
def test_put_writes_behind_each_rows_end(lengths: list[int]) -> None:
    B, N = len(lengths), 4
    store, new = torch.zeros(B, 2, 16, 3), torch.randn(B, 2, N, 3)
    put(store, new, torch.tensor(lengths)[:, None] + torch.arange(N))
    for row, length in enumerate(lengths):
        assert torch.equal(store[row, :, length : length + N], new[row])
        assert store[row].count_nonzero() == 2 * N * 3, "and nowhere else"


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


@pytest.mark.parametrize("lengths", [[6], [6, 1, 9]])
def test_attention_masks(lengths: list[int]) -> None:
    """Both masks against a loop: a node sees its row's sequence and its ancestors, within a window measured by position."""
    rows, window = len(lengths), 4
    tree, lengths_B = random_tree(9, 50, seed=1, rows=rows), torch.tensor(lengths)
    _, depths_BN, ancestors_BNN = tree.tensors(lengths_B.device)
    positions_BN, slots = lengths_B[:, None] + depths_BN, max(lengths) + 14
    seen = visible_slots(lengths_B, ancestors_BNN, slots)
    both = masks_by_kind(positions_BN, positions_BN, ancestors_BNN, lengths_B, slots, {"full_attention": None, "sliding_attention": window})
    assert torch.equal(both["full_attention"], seen)
    for row, length in enumerate(lengths):
        for n in range(len(tree.tokens[row])):
            line = {n}
            while 0 not in line:
                line.add(tree.parents[row][min(line)])
            for slot in range(slots):
                m = slot - length
                where = slot if slot < length else int(positions_BN[row, m]) if m < 9 else None
                sees = slot < length or m in line
                near = where is not None and int(positions_BN[row, n]) - where < window
                assert bool(seen[row, n, slot]) == sees, (row, n, slot)
                assert bool(both["sliding_attention"][row, n, slot]) == (sees and near), (row, n, slot)
