"""The ragged cache: what it holds after several passes is what reading the text afresh would have put there; and who sees what.

Shape suffixes: B batch, N tree nodes, S slots.
"""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, Scripted, backbone, heads, left_padded, prompts, say, unpadded
from test_tree import random_tree

from headstart.heads.backbone import Backbone
from headstart.heads.kv import RaggedKV, slots_behind, visible
from headstart.inference.cache import RaggedCache
from headstart.inference.decode import Decoder
from headstart.inference.heads import Heads
from headstart.inference.tree import CandidateTree, TreeShape


def decoder_of(of: Heads, monkeypatch: pytest.MonkeyPatch, **arguments: object) -> Decoder:
    """The decoder of a call to generate, as it is at the end of it."""
    made: list[Decoder] = []
    begin = Decoder.start
    monkeypatch.setattr(Decoder, "start", lambda self: (made.append(self), begin(self))[1])
    of.backbone.model.generate(custom_generate=of.generate, **arguments)
    return made[0]


def audit(decoder: Decoder, on: Backbone) -> None:
    """Row for row, every layer's keys and values against one plain read of the text."""
    for row, text in enumerate(decoder.texts):
        length = int(decoder.cache.lengths_B[row])
        ids = text.ids_T[text.pads :]
        assert 0 < length <= len(ids)
        fresh = on.model(ids[None, :length], use_cache=True).past_key_values
        for layer, own in zip(decoder.cache.layers, fresh.layers, strict=True):
            kept = own.keys.shape[2]  # a sliding layer of transformers keeps its last keys only
            torch.testing.assert_close(layer.kv.keys[row, :, length - kept : length], own.keys[0], atol=5e-5, rtol=1e-4)
            torch.testing.assert_close(layer.kv.values[row, :, length - kept : length], own.values[0], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("manner", ["nearly", "adversary"])
def test_the_cache_holds_what_a_fresh_read_would(family: str, manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on, rows = backbone(family), left_padded(prompts())
    options = {"max_new_tokens": 36, "do_sample": True, "seed": 7, "tree": TreeShape(20, 6)}
    truths = unpadded(say(Heads(on), rows, **options), rows)
    decoder = decoder_of(Heads(on, Scripted(on, truths, manner)), monkeypatch, **rows, **options)
    assert decoder.cache.longest > max(len(row) for row in rows["input_ids"]) + 20
    audit(decoder, on)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_buffers_grow_past_their_first_size(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """63 tokens and a tree fill the first 64 slots; the drafter's own keys grow with them."""
    of = heads(family, "eagle3")
    for lengths in ((60,), (61, 30)):
        rows = left_padded(prompts(lengths))
        decoder = decoder_of(of, monkeypatch, **rows, max_new_tokens=90, do_sample=False, tree=TreeShape(30, 8))
        assert decoder.cache.longest > 128
        audit(decoder, of.backbone)
        plain = say(of, rows, max_new_tokens=90, do_sample=False, speculate=False)
        assert [text.ids_T.tolist() for text in decoder.texts] == plain.tolist()


def test_write_keeps_what_was_there_when_it_grows() -> None:
    for rows in (1, 3):
        kv, lengths, all_keys = RaggedKV(), torch.zeros(rows, dtype=torch.int64), []
        for count in (5, 60, 1, 200):
            keys = torch.randn(rows, 2, count, 4)
            seen, values = kv.write(keys, 2 * keys, slots_behind(lengths, int(lengths.max()), count))
            all_keys.append(keys)
            lengths = lengths + count
            assert torch.equal(seen, torch.cat(all_keys, 2)) and torch.equal(values, 2 * seen)


@pytest.mark.parametrize("lengths", [[6], [6, 1, 9]])
def test_move_brings_a_path_behind_the_end(lengths: list[int]) -> None:
    lengths_B, longest, rows = torch.tensor(lengths), max(lengths), len(lengths)
    kv = RaggedKV()
    kv.write(torch.randn(rows, 2, longest, 4), torch.randn(rows, 2, longest, 4), slots_behind(torch.zeros_like(lengths_B), 0, longest))
    nodes = torch.randn(rows, 2, 7, 4)
    kv.write(nodes, -nodes, slots_behind(lengths_B, longest, 7))
    assert kv.keys is not None and kv.values is not None
    before = kv.keys.clone()
    path_BP = torch.tensor([[0, 2, 3, 6]] * rows)
    kv.move(lengths_B[:, None] + path_BP, slots_behind(lengths_B, longest, 4))
    for row, length in enumerate(lengths):
        assert torch.equal(kv.keys[row, :, :length], before[row, :, :length])
        assert torch.equal(kv.keys[row, :, length : length + 4], nodes[row][:, path_BP[row]])
        assert torch.equal(kv.values[row, :, length : length + 4], -nodes[row][:, path_BP[row]])


@pytest.mark.parametrize("lengths", [[6], [6, 1, 9]])
def test_who_sees_whom(lengths: list[int]) -> None:
    """Both masks against a loop: a node sees its row's text and its ancestors, in a window as far back as their positions say."""
    rows, window = len(lengths), 4
    tree = random_tree(9, 50, seed=1, rows=rows)
    cache = RaggedCache(1, rows, torch.device("cpu"))
    cache.extend(torch.tensor(lengths), max(lengths))
    positions_BN = cache.lengths_B[:, None] + tree.depths_BN
    seen = visible(cache.lengths_B, cache.longest, tree.ancestors_BNN)
    masks = cache.see(tree, positions_BN, {"full_attention": None, "sliding_attention": window})
    assert masks is not None and torch.equal(masks["full_attention"], seen)
    for row, length in enumerate(lengths):
        for n in range(9):
            line = {n}
            while 0 not in line:
                line.add(int(tree.parents_BN[row, min(line)]))
            for slot in range(max(lengths) + 9):
                m = slot - length
                where = slot if slot < length else int(positions_BN[row, m]) if m < 9 else None
                sees = slot < length or m in line
                near = where is not None and int(positions_BN[row, n]) - where < window
                assert bool(seen[row, n, slot]) == sees, (row, n, slot)
                assert bool(masks["sliding_attention"][row, n, slot]) == (sees and near), (row, n, slot)


def test_one_node_of_one_row_needs_no_mask() -> None:
    cache = RaggedCache(1, 1, torch.device("cpu"))
    root = CandidateTree(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), 0)
    assert cache.see(root, torch.zeros(1, 1), {"full_attention": None}) is None
    assert cache.see(root, torch.zeros(1, 1, dtype=torch.int64), {"sliding_attention": 3}) is not None
