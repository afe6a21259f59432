"""Encoded features: rounding error, size on disk, and the effect on the loss.

Shape suffixes: B batch, T positions, D width.
"""

import random
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, backbone, texts
from safetensors.torch import save

from headstart import Backbone, Features
from headstart.support.errors import UserError
from headstart.training.data.batches import Batch, collate
from headstart.training.data.data import Sample
from headstart.training.features.codec import CacheFormat, concatenate, single_row, with_teacher
from headstart.training.features.source import LiveFeatures

STORES = ("int8", "bf16", "exact")
ROWS = [[0, 1], [2], [3, 4, 5]]


def make_samples() -> list[Sample]:
    rng = random.Random(3)
    lengths = [rng.randint(5, 30) for _ in range(6)]
    learn = [torch.tensor([rng.random() < 0.7 for _ in range(length)]) for length in lengths]
    return [Sample(texts(1, length, seed=i)[0], learn[i]) for i, length in enumerate(lengths)]


def form_for(on: Backbone, taps: tuple[int, ...], store: str = "int8") -> CacheFormat:
    return CacheFormat(taps, on.dim, on.dtype, store)  # type: ignore[arg-type]


def keep(form: CacheFormat, on: Backbone, samples: list[Sample], batch: Batch) -> Features:
    """The features a cache returns for a batch: each sample read alone, encoded, decoded and joined."""
    live = LiveFeatures(on, form.taps)
    kept = [form.encode(with_teacher(live.read(collate(samples, [[index]])), on)) for row in batch.members for index in row]
    return form.decode(concatenate(kept), batch, form.taps)


@pytest.mark.parametrize("huge", [False, True], ids=["", "with a token as large as language models have"])
def test_no_entry_is_off_by_more_than_half_a_step(huge: bool) -> None:
    torch.manual_seed(0)
    x_TD = torch.randn(40, 64) * torch.rand(64).add(0.05) * torch.rand(40, 1).add(0.1)
    if huge:
        x_TD[0, 5], x_TD[0, 17] = 3000.0, -800.0
    form = CacheFormat((0,), 64, torch.float32)
    tokens_BT = torch.zeros(1, 40, dtype=torch.int64)
    read = Features(tokens_BT, x_TD[None], {0: x_TD[None]}, tokens_BT == 0, tokens_BT)
    kept = form.encode(read)
    back = form.decode(kept, collate([Sample(tokens_BT[0], tokens_BT[0] == 0)], [[0]]), (0,))
    step_TD = kept["hidden.token"].float()[:, None] * kept["hidden.channel"].float()
    # The scales are rounded to 8 bits of precision, so the largest entry of a token may lie slightly outside 127 steps.
    off_TD = (back.hidden_BTD[0] - x_TD).abs()
    assert bool((off_TD <= 0.5 * step_TD + x_TD.abs() / 256).all())
    off = off_TD.norm(dim=-1) / x_TD.norm(dim=-1)
    assert off[1:].mean() < 0.008 and off.max() < 0.015
    assert torch.equal(back.hidden_BTD, (back.taps or {})[0])


@pytest.mark.parametrize("store", STORES)
def test_the_size_is_known_beforehand(store: str) -> None:
    on, samples = backbone("llama"), make_samples()
    form = form_for(on, (1, 3), store)
    live = LiveFeatures(on, form.taps)
    for sample in samples:
        kept = form.encode(with_teacher(live.read(collate([sample], [[0]])), on))
        assert sum(tensor.numel() * tensor.element_size() for tensor in kept.values()) == form.size(len(sample.tokens))
        header = len(save(kept)) - form.size(len(sample.tokens))
        assert 0 < header < 1100


@pytest.mark.parametrize(("store", "off"), [("exact", 1e-5), ("bf16", 4e-3), ("int8", 8e-3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_packed_batch_is_what_the_backbone_reads(family: str, store: str, off: float) -> None:
    on, samples = backbone(family), make_samples()
    batch = collate(samples, ROWS)
    kept, live = keep(form_for(on, (0, 2, 6), store), on, samples, batch), LiveFeatures(on, (0, 2, 6)).read(batch)
    there_BT = batch.document_BT >= 0
    assert kept.taps is not None and live.taps is not None and list(kept.taps) == [0, 2, 6]
    for mine, expected in [(kept.hidden_BTD, live.hidden_BTD), *((kept.taps[tap], live.taps[tap]) for tap in live.taps)]:
        torch.testing.assert_close(mine[there_BT], expected[there_BT], atol=off * expected.abs().max().item(), rtol=0)
        assert mine.dtype == expected.dtype and not mine[~there_BT].any()


def test_states_that_are_no_numbers_are_refused() -> None:
    on = backbone("llama")
    features = LiveFeatures(on, (1,)).read(collate(make_samples(), [[0]]))
    assert single_row(features, 0, 4).tokens_BT.shape == (1, 4)
    broken = replace(features, hidden_BTD=features.hidden_BTD / 0)
    with pytest.raises(UserError, match=r"states \(hidden\) are not finite in torch.float32; set backbone.dtype"):
        form_for(on, (1,)).encode(broken)
