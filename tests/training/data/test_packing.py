"""Packing: rows are full, no document is cut or lost, and features and label tokens do not change.

Shape suffixes: B batch, T positions.
"""

import random
from pathlib import Path

import pytest
import torch
from families import DRAFTERS, FAMILIES, VOCAB, backbone, random_drafter
from small_run import make_recipe, read_log
from torch import Tensor

from headstart import Drafter, Features
from headstart.cli.train import main
from headstart.heads.layers.causal_attention import document_masks, document_positions
from headstart.support.errors import UserError
from headstart.training.data.batches import collate, pack
from headstart.training.data.data import Sample
from headstart.training.features.source import LiveFeatures
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import count_label_tokens
from headstart.training.objective.objective import objective
from headstart.training.recipe.recipe import Objective

LENGTHS = (9, 4, 13, 6, 21, 5, 8)
ROWS = [[0, 1, 2], [3, 4], [5, 6]]


def make_samples(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    learn = [torch.rand(length, generator=generator) < 0.8 for length in lengths]
    return [Sample(torch.randint(1, VOCAB, (len(mask),), generator=generator), mask) for mask in learn]


def test_every_sample_stands_in_one_row_and_rows_are_full() -> None:
    rng = random.Random(0)
    for window in (8, 50, 512):
        lengths = [rng.randint(1, min(window, rng.choice((8, 60, 512)))) for _ in range(700)]
        rows = pack(lengths, list(range(700)), window)
        assert sorted(index for row in rows for index in row) == list(range(700))
        used = [sum(lengths[index] for index in row) for row in rows]
        assert max(used) <= window and len(rows) <= 1.03 * -(-sum(lengths) // window) + 1
        shuffled = rng.sample(range(700), 700)
        assert len(pack(lengths, shuffled, window)) == len(rows)  # so every epoch has the same number of rows
    assert pack([5, 3, 5, 2], [2, 0, 1, 3], 8) == [[2, 3], [0, 1]]
    with pytest.raises(UserError, match="a sample of 9 tokens does not fit a row of 8; raise data.max_length or set data.overlong=split"):
        pack([4, 9], [0, 1], 8)


def test_what_a_row_looks_like() -> None:
    tokens, learn = [torch.tensor([7, 8, 9]), torch.tensor([5, 6])], [torch.tensor([False, True, True]), torch.tensor([True, False])]
    samples = [Sample(*pair) for pair in zip(tokens, learn, strict=True)]
    batch = collate([*samples, samples[1]], [[0, 1], [2]])
    assert batch.tokens_BT.tolist() == [[7, 8, 9, 5, 6], [5, 6, 0, 0, 0]]
    assert batch.loss_mask_BT.tolist() == [[False, True, True, True, False], [True, False, False, False, False]]
    assert batch.document_BT.tolist() == [[0, 0, 0, 1, 1], [0, 0, -1, -1, -1]]
    assert batch.members == ((0, 1), (2,)) and batch.packed and not collate(samples, [[0], [1]]).packed
    assert document_positions(batch.document_BT).tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    attention_mask = document_masks(batch.document_BT, {"full_attention": None, "sliding_attention": 2})
    full = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    assert attention_mask["full_attention"][0].int().tolist() == full
    full[2] = [0, 1, 1, 0, 0]
    assert attention_mask["sliding_attention"][0].int().tolist() == full


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_reads_as_it_does_alone(family: str) -> None:
    """Full and sliding layers, rotary and learned positions."""
    samples, taps = make_samples(), (0, 1, 3, 6)
    source = LiveFeatures(backbone(family), taps)
    packed = source.read(collate(samples, ROWS))
    for b, row in enumerate(ROWS):
        for place, index in enumerate(row):
            there = packed.document_BT[b] == place  # type: ignore[index]
            alone = source.read(collate(samples, [[index]]))
            assert packed.taps is not None and alone.taps is not None and torch.equal(packed.tokens_BT[b, there], samples[index].tokens)
            pairs = [(packed.hidden_BTD, alone.hidden_BTD), *((packed.taps[tap], alone.taps[tap]) for tap in taps)]
            for mine, expected in pairs:
                torch.testing.assert_close(mine[b, there], expected[0], atol=1e-5 * max(expected.abs().max().item(), 1.0), rtol=0)


def gradients(features: Features, drafter: Drafter) -> tuple[Tensor, list[Tensor]]:
    """Loss per label token and its gradients."""
    assert features.loss_mask_BT is not None and features.document_BT is not None
    drafter.zero_grad()
    drafter.requires_grad_(True)
    settings = Objective(terms={"kl": 0.5, "ce": 0.5}, chunk_size=16)
    sums = objective(FusedLoss(settings, drafter), features, drafter(features))
    loss = sums.loss / count_label_tokens(features.loss_mask_BT, features.document_BT)
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in drafter.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_or_not_the_loss_and_its_gradients_are_the_same(family: str, kind: str) -> None:
    samples, on = make_samples(), backbone(family)
    drafter = random_drafter(kind, on)
    source = LiveFeatures(on, drafter.taps)
    results = [gradients(source.read(collate(samples, rows)), drafter) for rows in (ROWS, [[i] for i in range(len(samples))])]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    assert len(results[0][1]) == len(results[1][1]) > 0 and results[0][0] > 0
    for mine, expected in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5 * max(expected.abs().max().item(), 1.0))


def test_a_packed_run_trains_cuts_long_documents_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path, drafter={"kind": "eagle3", "depth": 2}, train={"steps": None, "epochs": 3, "batch_size": 2})
    assert main([str(recipe), "data.packing=true", "data.max_length=24"]) == 0
    output = capsys.readouterr().err
    assert "samples cut into" in output and "truncated" not in output and "; packed into 43 rows of 24, 77.0% full" in output
    losses = [line["loss"] for line in read_log(tmp_path / "out") if "loss" in line]
    assert losses[-1] < losses[0]
    assert read_log(tmp_path / "out")[-2]["tokens"] > 3 * 36 * 20  # every token of every epoch
