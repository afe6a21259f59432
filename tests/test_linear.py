"""Linear layers turned round give what they give as they are, and only where it was asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.inference import linear
from headstart.inference.capture import Captured
from headstart.inference.linear import Turned, turned, turned_up_to


@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 3, 7), (5, 7), (1, 9, 7)])
@pytest.mark.parametrize("bias", [None, torch.randn(11)])
def test_turned_is_linear(shape: tuple[int, ...], bias: Tensor | None) -> None:
    x, weight = torch.randn(shape), torch.randn(11, 7)
    found = turned(x, weight, bias, 6)
    assert torch.allclose(found, F.linear(x, weight, bias), atol=1e-6) and found.is_contiguous()


def test_a_recording_turns_few_rows_and_leaves_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.inference.capture.turned_up_to", lambda module: 4)
    layer = nn.Linear(7, 11).requires_grad_(False)
    captured = Captured(lambda held, x: layer(x), "always", layer)
    for rows in (2, 3, 9, 4):
        x = torch.randn(rows, 7)
        assert torch.allclose(captured(None, x), layer(x), atol=1e-6)
    (recording,) = captured.recordings.values()
    kinds = str(recording.traced.inlined_graph)   # type: ignore[attr-defined]
    assert "aten::mm" in kinds and "aten::linear" in kinds and "prim::If" in kinds, "one recording for both ways"


def test_it_is_timed_once_and_only_on_what_can_be_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_KNOWN", {})
    model = nn.Sequential(nn.Linear(64, 64), nn.Embedding(5, 64), nn.Linear(64, 32))
    assert turned_up_to(model) in (0, *linear.ROWS) and len(linear._KNOWN) == 1
    monkeypatch.setattr(linear, "_measure", lambda weights: pytest.fail("timed twice"))
    turned_up_to(model)
    assert turned_up_to(nn.Linear(8, 8).to(torch.bfloat16)) == 0


def test_other_functions_and_dtypes_are_left_alone() -> None:
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    with Turned(16):
        assert torch.equal(F.silu(x), torch.nn.functional.silu(x))
        assert F.linear(x.double(), weight.double()).dtype == torch.float64
