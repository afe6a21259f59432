"""The shared-noise sampler draws from the model's own distribution: chi-square tests against it and against transformers; and the noise.

Seeds are fixed, so results are reproducible; a p-value below 1e-4 would be very unlikely if the distribution were right.

Shape suffixes: B rows, P positions, V vocabulary.
"""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from families import build, random_drafter, say
from torch import Tensor

from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.inference.engine.noise import BLOCK_POSITIONS, GOLDEN, MAX_BLOCK_VALUES, NoiseBuffer, gumbel, row_seeds
from headstart.support.errors import UserError

FEW = 7
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
SETTINGS: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": FEW,
}  # fmt: skip
WARPERS: list[dict[str, Any]] = [{}, {"temperature": 0.6, "top_p": 0.85}, {"temperature": 1.6, "top_k": 4, "repetition_penalty": 1.4}]


@pytest.fixture(scope="module")
def small() -> SpeculativeModel:
    on = Backbone(build("Llama", SETTINGS, seed=3, loud=1.3))
    return SpeculativeModel(on, random_drafter("eagle3", on, depth=3))


def law(of: SpeculativeModel, length: int, warpers: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The exact probability of every sequence, from transformers' own scores."""
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        prefixes = list(exact)
        ids = torch.cat([PROMPT.expand(len(prefixes), -1), torch.tensor(prefixes, dtype=torch.int64).view(len(prefixes), -1)], 1)
        asked = {"max_new_tokens": 1, "do_sample": True, "output_scores": True, "return_dict_in_generate": True}
        out = of.backbone.model.generate(ids, attention_mask=torch.ones_like(ids), **asked, **warpers)
        probs = out.scores[0].softmax(-1).tolist()
        exact = {(*prefix, v): exact[prefix] * p for prefix, row in zip(prefixes, probs, strict=True) for v, p in enumerate(row) if p > 0}
    assert abs(sum(exact.values()) - 1) < 1e-4
    return exact


def chi_square(counts: Counter, probs: dict[tuple[int, ...], float], n: int) -> float:
    """The p-value of the counts under the distribution; sequences expected fewer than five times are counted together."""
    assert set(counts) <= set(probs), "a text that cannot be"
    rare = [text for text, p in probs.items() if n * p < 5]
    bins = [(counts[text], n * p) for text, p in probs.items() if n * p >= 5]
    if rare:
        bins.append((sum(counts[text] for text in rare), n * sum(probs[text] for text in rare)))
    bins = [(o, e) for o, e in bins if e > 0.5]
    statistic = sum((o - e) ** 2 / e for o, e in bins)
    degrees = len(bins) - 1
    return float(torch.special.gammaincc(torch.tensor(degrees / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)))


def drawn(of: SpeculativeModel, n: int, length: int, **options: Any) -> Counter:
    rows = {"input_ids": PROMPT.expand(n, -1), "attention_mask": torch.ones(n, PROMPT.shape[1], dtype=torch.int64)}
    texts = say(of, rows, max_new_tokens=length, do_sample=True, **options)[:, PROMPT.shape[1] :]
    return Counter(map(tuple, texts.tolist()))


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("warpers", WARPERS, ids=["plain", "warped", "penalised"])
def test_sequences_follow_the_distribution(small: SpeculativeModel, length: int, warpers: dict[str, Any]) -> None:
    n = 1000 if "repetition_penalty" in warpers else 4000  # a penalty depends on the whole sequence: slower
    assert chi_square(drawn(small, n, length, seed=1, tree=TreeShape(12, 5), **warpers), law(small, length, warpers), n) > 1e-3


def test_the_test_detects_another_distribution(small: SpeculativeModel) -> None:
    assert chi_square(drawn(small, 4000, 2, seed=1), law(small, 2, {"temperature": 1.15}), 4000) < 1e-4


def test_seeds_drawn_by_torch_follow_the_distribution(small: SpeculativeModel) -> None:
    torch.manual_seed(4)
    assert chi_square(drawn(small, 4000, 2), law(small, 2, {}), 4000) > 1e-3


# The noise.

EULER = 0.5772156649


def test_noise_is_gumbel() -> None:
    noise = gumbel(torch.arange(40), torch.arange(50).expand(40, 50), 500).double().flatten()  # a million
    assert abs(noise.mean() - EULER) < 0.006 and abs(noise.var() - torch.pi**2 / 6) < 0.02
    uniform = (-(-noise).exp()).exp()
    counts = torch.histc(uniform, 100, 0, 1)
    assert ((counts - 10_000).square() / 10_000).sum() < 160, "chi-square with 99 degrees of freedom"
    assert torch.isfinite(noise).all()


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_noise_is_independent_along_every_axis() -> None:
    """Neighbours in seed, position and token; and pairs whose keys would collide if they were sums."""
    noise = gumbel(torch.arange(100), torch.arange(101).expand(100, 101), 97)
    n = 100 * 100 * 97
    for lag in (1, 2, 7):
        for axis in range(3):
            size = noise.shape[axis] - lag
            assert abs(correlation(noise.narrow(axis, 0, size), noise.narrow(axis, lag, size))) < 5 / n**0.5
    assert abs(correlation(noise[1:, :-1], noise[:-1, 1:])) < 5 / n**0.5, "seed + 1 at position p, seed at p + 1"
    assert abs(correlation(noise[:, 1:, :-1], noise[:, :-1, 1:])) < 5 / n**0.5, "position + 1 at token v, position at v + 1"
    for offset in (GOLDEN, -GOLDEN):
        moved = gumbel(row_seeds([7 + offset], 1, noise.device), torch.arange(9)[None], 97)
        assert not torch.isin(moved, noise[7, :12]).any(), "seed + the stride of positions at p is not seed at p + 1"
    assert len(noise.flatten().unique()) > 0.9 * noise.numel()


def test_noise_depends_on_seed_and_position_alone() -> None:
    seeds, positions = torch.tensor([5, -9, 2**62]), torch.tensor([[7, 8, 9], [1, 100, 5], [3, 3, 10**6]])
    together = gumbel(seeds, positions, 61)
    for b, p in itertools.product(range(3), range(3)):
        assert torch.equal(gumbel(seeds[b : b + 1], positions[b : b + 1, p : p + 1], 61)[0, 0], together[b, p])
    assert torch.equal(gumbel(seeds, positions, 1000)[..., :61], together), "a larger vocabulary gives the same tokens the same noise"
    assert torch.equal(together[2, 0], together[2, 1])


def test_buffered_noise_is_that_of_each_position() -> None:
    """Rows advance at their own pace, leave and join; the noise is made in few blocks."""
    seeds = torch.tensor([5, 6, 7])
    ahead = NoiseBuffer(61, seeds)
    rows, at, blocks = [0, 1, 2], [3, 9, 4], list[Tensor]()
    for turn in range(12):
        if turn == 8:
            rows, at = [2, 0], [at[2], at[0]]
        count = 1 + turn % 3
        wanted = gumbel(seeds[rows], torch.tensor(at)[:, None] + torch.arange(count), 61)
        assert torch.equal(ahead.of(rows, at, count), wanted) and ahead.block_BPV is not None
        blocks += [ahead.block_BPV] if all(block.data_ptr() != ahead.block_BPV.data_ptr() for block in blocks) else []
        at = [place + 1 + (turn + row) % 2 for row, place in zip(rows, at, strict=True)]
    assert len(blocks) <= 4 and {block.shape[1] for block in blocks} == {BLOCK_POSITIONS}
    assert ahead.of(rows, [0, 0], BLOCK_POSITIONS + 4).shape[1] == BLOCK_POSITIONS + 4
    wide = NoiseBuffer(MAX_BLOCK_VALUES, seeds)
    wide.of([0], [0], 2)
    assert wide.block_BPV is not None and wide.block_BPV.shape[1] == 2


def test_row_seeds() -> None:
    cpu = torch.device("cpu")
    assert row_seeds(7, 3, cpu).tolist() == [7, 8, 9]
    assert row_seeds([4, 4, -1], 3, cpu).tolist() == [4, 4, -1]
    assert row_seeds([2**64 - 1, 2**63], 2, cpu).tolist() == [-1, -(2**63)]
    assert row_seeds(2**64 - 1, 2, cpu).tolist() == [-1, 0]
    torch.manual_seed(1)
    first, second = row_seeds(None, 4, cpu), row_seeds(None, 4, cpu)
    torch.manual_seed(1)
    assert torch.equal(row_seeds(None, 4, cpu), first) and len(set(first.tolist() + second.tolist())) == 8
    assert row_seeds(np.int64(3), 2, cpu).tolist() == row_seeds([torch.tensor(3), np.int64(4)], 2, cpu).tolist() == [3, 4]
    for seed, said in (([1, 2], "2 entries for 3 rows"), (1.5, "a whole number, or a list of one a row; got 1.5"), ("3", "got '3'")):
        with pytest.raises(UserError, match=said):
            row_seeds(seed, 3, cpu)  # type: ignore[arg-type]
