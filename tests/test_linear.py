"""Linear layers in transposed layout equal `F.linear`, and are transposed only within ``TransposedLinear``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headstart.inference.capture import linear, trace
from headstart.inference.capture.capture import Capturer
from headstart.inference.capture.forms import Form
from headstart.inference.capture.linear import TransposedLinear, max_transposed_rows, transposed_linear


@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 3, 7), (5, 7), (1, 9, 7), (1, 7), (7,)])
@pytest.mark.parametrize("outputs", [11, 12])
@pytest.mark.parametrize("biased", [False, True])
def test_the_transposed_layout_gives_the_same(shape: tuple[int, ...], outputs: int, biased: bool) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(outputs, 7), torch.randn(outputs) if biased else None
    out = transposed_linear(x, weight, bias)
    assert torch.allclose(out, F.linear(x, weight, bias), atol=1e-6) and out.is_contiguous()


@pytest.mark.parametrize("outputs", [11, 12])
def test_one_row_few_and_many_are_captured_apart(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "fastest_form", lambda module: Form(None, 4))
    layer = nn.Linear(7, outputs).requires_grad_(False)
    captured = Capturer("trace", torch.device("cpu")).capture(lambda held, tokens, x: layer(x), "layer", layer)
    for rows, captures in ((2, 1), (3, 1), (9, 2), (4, 2), (1, 3), (2, 3), (8, 3)):
        x = torch.randn(rows, 7)
        assert torch.allclose(captured(None, torch.zeros(rows), x), layer(x), atol=1e-6) and captured.captures_made == captures, rows
    few, many, single = (str(capture.traced.graph) for capture in captured._captures.values())   # type: ignore[attr-defined]
    assert "aten::mm" in few and "aten::linear" in many and ("aten::bmm" if outputs == 12 else "aten::cat") in single


def test_layouts_are_timed_once_and_only_for_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_KNOWN", {})
    model = nn.Sequential(nn.Linear(64, 64), nn.Embedding(5, 64), nn.Linear(64, 32))
    assert max_transposed_rows(model) in (0, *linear.ROWS) and len(linear._KNOWN) == 1
    monkeypatch.setattr(linear, "_measure", lambda weights: pytest.fail("timed twice"))
    max_transposed_rows(model)
    assert max_transposed_rows(nn.Linear(8, 8).to(torch.bfloat16)) == 0


def test_other_functions_and_dtypes_are_left_alone() -> None:
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    with TransposedLinear(16):
        assert torch.equal(F.silu(x), torch.nn.functional.silu(x))
        assert F.linear(x.double(), weight.double()).dtype == torch.float64
