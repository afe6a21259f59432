"""Prefill as a captured function: the same numbers, one capture for all lengths, after enough prompts for it to pay."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, texts, tiny
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.capture.capture import SHORT_PATIENCE, Capturer
from headstart.inference.engine.reader import PREFILL_PATIENCE, Reader
from headstart.support.pytree import list_tensors

CPU = torch.device("cpu")
TAPS = (1, 3)


def numbers(reader: Reader, tokens_BT: Tensor, lengths: list[int]) -> list[Tensor]:
    """Everything that a prefill gives: features, and keys and values."""
    features, cache = reader.prompts(tokens_BT, torch.tensor(lengths))
    return [*list_tensors(features), *cache.keys, *cache.values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_prefill_gives_what_an_uncaptured_one_does(family: str, dtype: torch.dtype) -> None:
    on = Backbone(tiny(family).to(dtype))
    atol = 1e-5 if dtype == torch.float32 else 0.05
    plain, capturer = Reader(on, TAPS, Capturer("off", CPU)), Capturer("trace", CPU)
    captured = Reader(on, TAPS, capturer)
    for number, lengths in enumerate([[9], [30], [66], [7, 12, 3], [68, 11], [5, 5, 5, 5], [2]]):
        tokens_BT = texts(len(lengths), max(lengths), number)
        for found, expected in zip(numbers(captured, tokens_BT, lengths), numbers(plain, tokens_BT, lengths), strict=True):
            assert found.dtype == expected.dtype and torch.allclose(found.float(), expected.float(), atol=atol)
    prefill = next(one for one in capturer.functions if one.name == "prefill")
    assert prefill.captures_made == 2 and prefill.fallback is None, "one for a single row, one for several, at any length"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_prompt_has_the_same_bits_before_it_is_captured(dtype: torch.dtype) -> None:
    """Of a model of SmolLM2's widths: with AMX, packed weights change the order of sums over as many inputs in as many rows."""
    model = tiny("llama", hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    on = Backbone(model.to(dtype))
    plain, captured = Reader(on, TAPS, Capturer("off", CPU)), Reader(on, TAPS, Capturer("trace", CPU))
    for length in (61, 177, 222, 227, 240, 247, 247, 222):
        tokens_BT = texts(1, length, length)
        assert all(map(torch.equal, numbers(captured, tokens_BT, [length]), numbers(plain, tokens_BT, [length]))), length


def test_prefill_is_captured_late() -> None:
    """It runs once a prompt, so its capture pays after about a hundred of them."""
    capturer = Capturer("auto", CPU)
    reader = Reader(Backbone(tiny("llama")), TAPS, capturer)
    step = capturer.capture(lambda held, x: x + 1, "step")
    for _ in range(capturer.patience + 1):
        step(None, torch.zeros(3))
    assert step.captures_made == 1
    prefill = next(one for one in capturer.functions if one.name == "prefill")
    for call in range(PREFILL_PATIENCE * SHORT_PATIENCE + 1):
        assert prefill.captures_made == 0, call
        reader.prompts(texts(1, 5 + call % 3), torch.tensor([5]))
    assert prefill.captures_made == 1


def test_results_of_a_captured_prefill_are_not_overwritten_by_the_next() -> None:
    """A served row joins rows that were prefilled before."""
    reader = Reader(Backbone(tiny("llama")), TAPS, Capturer("trace", CPU))
    first = numbers(reader, texts(1, 8, 1), [8])
    kept = [one.clone() for one in first]
    numbers(reader, texts(1, 8, 2), [8])
    assert all(map(torch.equal, first, kept))
