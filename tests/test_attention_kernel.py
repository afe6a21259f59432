"""The compiled kernel for attention of few queries: against sums in fp64, and bits that do not depend on the other queries and slots."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import backbone, left_padded, prompts, random_drafter, say
from test_compile import needs_a_compiler
from torch import Tensor, nn
from torch._inductor.cpu_vec_isa import pick_vec_isa

from headstart.heads.backbone import tree_attention
from headstart.heads.backbone.tree_attention import attend, attend_exactly, attention_as_one_operation
from headstart.heads.layers import decoder_layer
from headstart.inference.capture.capture import Captured, Capturer
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def compiled(**options: Any) -> Captured:
    def function(held: None, *inputs: Tensor) -> Tensor:
        return attend(*inputs, **options)

    return Capturer("compile", torch.device("cpu")).capture(function, "attention", nn.Identity())


def inputs(dtype: torch.dtype, heads: tuple[int, int], queries: int, keys: int, widths: tuple[int, int], rows: int = 2) -> list[Tensor]:
    """Queries, keys, values and a mask that hides a third of the keys, but not the first."""
    (H, G), (C, D) = heads, widths
    hidden = torch.rand(rows, 1, queries, keys) < 1 / 3
    hidden[..., 0] = False
    shapes = ((rows, H, queries, C), (rows, G, keys, C), (rows, G, keys, D))
    return [*(torch.randn(shape).to(dtype) for shape in shapes), ~hidden]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


@needs_a_compiler
@torch.no_grad()
@pytest.mark.parametrize("dtype, heads, queries, keys, widths, boolean, options", [
    (BF16, (6, 2), 5, 192, (64, 64), False, {}),
    # more queries than one part has; the last block is not full
    pytest.param(FP32, (4, 4), 20, 37, (8, 8), True, {}, marks=pytest.mark.slow),
    # values of another width; widths that are no whole vectors
    pytest.param(FP16, (4, 1), 3, 70, (80, 48), True, {"scale": 0.25}, marks=pytest.mark.slow),
])  # fmt: skip
def test_it_gives_what_sums_in_fp64_give(
    dtype: torch.dtype, heads: tuple[int, int], queries: int, keys: int, widths: tuple[int, int], boolean: bool, options: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *tensors, mask = inputs(dtype, heads, queries, keys, widths)
    expected = attend_exactly(*(one.double() for one in tensors), additive(mask, torch.float64), **options)
    if pick_vec_isa():
        monkeypatch.setattr(tree_attention, "attend_exactly", None)   # what runs without the kernel
    captured = compiled(**options)
    found = captured(None, *tensors, mask if boolean else additive(mask, dtype))
    assert captured.fallback is None and captured.captures_made == 1
    assert found.dtype == dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected.to(dtype))
    if dtype != FP32:
        assert (found != expected.to(dtype)).float().mean() < 0.01, "rounded once"


@pytest.mark.slow
@needs_a_compiler
@torch.no_grad()
def test_a_query_has_the_same_bits_alone_and_among_others_wherever_its_keys_lie() -> None:
    query, keys, values, mask = inputs(BF16, (6, 2), 7, 128, (64, 64), rows=1)
    captured = compiled()
    together = captured(None, query, keys, values, mask)
    order = torch.randperm(128)
    elsewhere = captured(None, query, keys[:, :, order], values[:, :, order], mask[..., order])
    assert torch.equal(elsewhere, together)
    alone = [captured(None, query[:, :, [i]], keys, values, mask[:, :, [i]]) for i in range(7)]
    assert torch.equal(torch.cat(alone, 2), together)
    assert captured.fallback is None


@pytest.mark.slow
@needs_a_compiler
def test_threads_share_the_queries() -> None:
    """In a process of its own: one that has had several threads must not be forked."""
    test = test_a_query_has_the_same_bits_alone_and_among_others_wherever_its_keys_lie.__name__
    code = f"import torch, {__name__} as tests; torch.set_num_threads(2); tests.{test}()"
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_layer_of_backbones_and_heads_is_compiled_with_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `few_queries`, run here as it is; gpt2 has as many key heads as query heads."""
    model = backbone(family)
    heads, rows = SpeculativeModel(model, random_drafter("eagle3", model), capture="off"), left_padded(prompts([6]))
    operations, of_heads, layers = [], [], model.config.num_hidden_layers
    operation, attend_in_heads = tree_attention.few_queries, decoder_layer.attend
    monkeypatch.setattr(tree_attention, "few_queries", lambda *inputs: operations.append(inputs) or operation(*inputs))
    monkeypatch.setattr(decoder_layer, "attend", lambda *inputs: of_heads.append(inputs) or attend_in_heads(*inputs))
    for options in ({"speculate": False}, {"tree": TreeShape(3, 1, 2)}):
        expected = say(heads, rows, max_new_tokens=5, **options)
        assert not operations
        of_heads.clear()
        with attention_as_one_operation():
            assert torch.equal(say(heads, rows, max_new_tokens=5, **options), expected)
        assert bool(of_heads) == ("tree" in options)
        in_layers = len(operations) - len(of_heads)
        assert in_layers and in_layers % layers == 0
        operations.clear()
