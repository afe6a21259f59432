"""What the host reads from the device while decoding: each read waits for all that was launched before it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_head import VARIANTS, every_head
from families import backbone, left_padded, prompts, random_drafter, say
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headstart.inference.decode import Decoder
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel

READS = {"tolist", "item", "cpu", "numpy", "nonzero", "masked_select", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose"}
"""Functions of tensors that wait for the device; so does indexing by a mask."""
SMALLER = {"draft_vocab_size": 20}
"""The variants' draft vocabulary is larger than these backbones' vocabulary."""
HEADS = [*every_head(3), *((kind, more | {"depth": 3} | (SMALLER if "draft_vocab_size" in more else {})) for kind, more in VARIANTS)]
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20}


class HostReads(TorchFunctionMode):
    """Collects where tensors are read."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        masked = func is Tensor.__getitem__ and any(
            isinstance(one, Tensor) and one.dtype == torch.bool for one in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if masked or getattr(func, "__name__", "") in READS:
            frame = traceback.extract_stack(limit=3)[0]
            self.places.append(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.line}")
        return func(*args, **(kwargs or {}))


def reads_by_step(of: SpeculativeModel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[str]]:
    """The reads of each decoding step of a batch of two."""
    steps: list[list[str]] = []
    step = Decoder.step

    def watched(self: Decoder, *args: Any) -> Any:
        with HostReads() as reads:
            result = step(self, *args)
        steps.append(reads.places)
        return result

    monkeypatch.setattr(Decoder, "step", watched)
    say(of, left_padded(prompts((9, 6))), max_new_tokens=24, **options)
    return steps


@pytest.mark.matrix(cells=8)
@pytest.mark.parametrize("options", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("kind", "arguments"), HEADS)
def test_a_step_with_trained_heads_reads_twice(kind: str, arguments: Any, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the drafts, once the picks, however deep the tree. (The first step also reads the prompts into the drafter.)"""
    of = SpeculativeModel(backbone("shallow"), random_drafter(kind, backbone("shallow"), **arguments), capture="off")
    steps = reads_by_step(of, monkeypatch, tree=TreeShape(8, 3), seed=1, **options)
    assert len(steps) > 4
    assert all(len(places) <= 2 for places in steps[1:]), max(steps[1:], key=len)


def test_adaptive_trees_read_twice_too(monkeypatch: pytest.MonkeyPatch) -> None:
    of = SpeculativeModel(backbone("shallow"), random_drafter("eagle3", backbone("shallow"), depth=4), capture="off")
    steps = [_without_pauses(places) for places in reads_by_step(of, monkeypatch, seed=1, do_sample=False)]
    assert any(len(places) == 2 for places in steps)
    assert all(len(places) <= 2 for places in steps), max(steps, key=len)


def _without_pauses(places: list[str]) -> list[str]:
    """Leave out the read with which a drafter catches up after steps without drafts."""
    return [place for place in places if "join_features" not in place]
