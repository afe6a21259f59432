"""The ragged cache: after several passes it equals a fresh read of the sequence; attention masks."""

import pytest
import torch
from families import FAMILIES, Scripted, backbone, left_padded, prompts, say, unpadded

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.kv.ragged_cache import RaggedCache
from headstart.heads.kv.rows import STEP, grown
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
