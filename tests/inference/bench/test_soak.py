"""The soak (`make soak`) in short: nothing differs, nothing is left; and its verdict sees what it should."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import soak  # noqa: E402

GOOD: dict[str, Any] = {"differing": [], "flat": True, "left_at_first": {"files": 6}, "left_at_last": {"files": 6}}


@pytest.mark.slow
def test_twenty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak.Backend, "most_captures", soak.KEPT)  # the soak sets it
    report = soak.soak(20 / 60, seed=1)
    assert report["calls"] >= 2 * soak.EVERY and report["tokens"] > report["calls"]
    assert not report["differing"] and report["left_at_last"] == report["left_at_first"]


def test_the_verdict() -> None:
    assert soak.verdict(GOOD) and soak.verdict(GOOD | {"flat": None}), "too short to tell"
    for fault in ({"differing": [{}]}, {"flat": False}, {"left_at_last": {"files": 7}}):
        assert not soak.verdict(GOOD | fault)


def test_flat_memory_is_told_from_growing() -> None:
    steady = [(second, 500.0 + second % 7, 9) for second in range(100)]
    growing = [(second, 500.0 + second, 9) for second in range(100)]
    assert soak.flatness(steady)["flat"] is True and soak.flatness(growing)["flat"] is False
    assert soak.flatness(steady[:1])["flat"] is None
    filling = [(second, memory, second // 10) for second, memory, _ in growing]
    assert soak.flatness(filling)["flat"] is None, "captures are still added"


def test_calls_are_drawn_by_the_seed_and_cancelled_at_their_token() -> None:
    first, second = (str([soak.draw(random.Random(seed), ["a", "b"]) for seed in range(9)]) for _ in range(2))
    assert first == second
    drawn = [soak.draw(random.Random(seed), ["a"]) for seed in range(200)]
    cancelled = [call for call in drawn if call.cancel is not None]
    assert len(cancelled) > 9 and all(call.own.get("batch_size", 9) >= len(call.rows["input_ids"]) for call in cancelled)
    assert any(call.own.get("batch_size", 9) < len(call.rows["input_ids"]) for call in drawn)
    stop = soak.CancelAt(2)
    ids = torch.zeros(3, 4)
    assert [stop(ids, None).tolist() for _ in range(2)] == [[False] * 3] * 2
    with pytest.raises(soak.Cancelled):
        stop(ids, None)
