"""What is recorded gives what the function gives: for new shapes, after the cache has grown, in whole texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from families import DRAFTERS, FAMILIES, backbone, left_padded, prompts, random_drafter, say, tiny
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.capture.capture import PATIENCE, Captured, builder, capturable, flatten
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel


@dataclass(frozen=True)
class Pair:
    left: Tensor
    right: Any


def test_nests_come_apart_and_together() -> None:
    a, b, c = torch.ones(1), torch.zeros(2), torch.eye(3)
    nest = Pair(a, ({"x": b, "y": [c, None]}, 3, "word", (), Pair(a, None)))
    leaves: list[Tensor] = []
    shape = flatten(nest, leaves)
    assert [id(leaf) for leaf in leaves] == [id(one) for one in (a, b, c, a)]
    again = builder(shape)(iter(leaves))
    assert again == nest and again.right[0]["y"][0] is c
    assert flatten(nest, []) == shape and hash(shape) == hash(flatten(nest, [])) and flatten(Pair(a, 4), []) != shape


class Counted:
    """A function that counts how often Python runs it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, held: Tensor, x: Tensor, scale: float) -> tuple[Tensor, Pair]:
        self.calls += 1
        held.index_copy_(0, torch.arange(x.shape[0]), x[:, 0])
        return x * scale + held.sum(), Pair(x.argmax(-1), {"rows": x.sum(0)})


def test_a_function_is_recorded_after_some_calls_and_then_not_run_again() -> None:
    function = Counted()
    captured, held = Captured(function, "auto"), torch.zeros(9)
    for call in range(PATIENCE + 5):
        x = torch.randn(4, 3)
        out, pair = captured(held, x, 2.0)
        assert torch.equal(held[:4], x[:, 0]) and torch.equal(out, x * 2 + held.sum()) and torch.equal(pair.right["rows"], x.sum(0))
        assert captured.disturbed == (call >= PATIENCE)
    assert function.calls == PATIENCE + 1 and captured.recorded == 1


def test_new_shapes_are_followed_and_new_constants_recorded() -> None:
    function = Counted()
    captured, held = Captured(function, "always"), torch.zeros(9)
    for rows, scale, recorded in ((4, 2.0, 1), (4, 2.0, 1), (7, 2.0, 1), (7, 2.0, 1), (7, 3.0, 2), (1, 2.0, 3), (1, 2.0, 3)):
        x = torch.randn(rows, 3)
        out, _ = captured(held, x, scale)
        assert torch.equal(out, x * scale + held.sum()) and captured.recorded == recorded, (rows, scale)


def test_what_has_one_of_something_is_recorded_apart() -> None:
    """A plain step keeps its own recording, which is faster than that of a tree, though in a batch of one row both have ones."""
    function = Counted()
    captured, held = Captured(function, "always"), torch.zeros(9)
    for nodes, recorded in ((1, 1), (6, 2), (1, 2), (8, 2), (1, 2), (7, 2)):
        x = torch.randn(1, nodes)
        assert torch.equal(captured(held, x, 2.0)[0], x * 2 + held.sum()) and captured.recorded == recorded, nodes


def test_a_recording_that_does_not_follow_a_shape_is_not_believed() -> None:
    def tricky(held: None, x: Tensor) -> Tensor:
        return x * len(x)   # a number to the recording

    captured = Captured(tricky, "always")
    for rows in (3, 5, 3, 5):
        assert torch.equal(captured(None, torch.ones(rows)), torch.full((rows,), float(rows)))


def test_sizes_between_such_as_were_compared_are_followed_at_once() -> None:
    function = Counted()
    captured, held = Captured(function, "always"), torch.zeros(9)
    for rows, runs in ((3, 1), (8, 2), (5, 2), (8, 2), (9, 3), (2, 4), (4, 4)):
        x = torch.randn(rows, 3)
        assert torch.equal(captured(held, x, 2.0)[0], x * 2 + held.sum())
        assert function.calls == runs, rows


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_what_cannot_be_recorded_is_run_as_it_is(error: type[Exception]) -> None:
    def awkward(held: None, x: Tensor) -> Tensor:
        if torch.jit.is_tracing():
            raise error("not here")
        return x + 1

    captured = Captured(awkward, "always")
    for _ in range(3):
        assert torch.equal(captured(None, torch.ones(2)), torch.full((2,), 2.0))
    assert captured.off and not captured.recorded


def test_never_is_never() -> None:
    function = Counted()
    captured = Captured(function, "never")
    for _ in range(PATIENCE + 3):
        captured(torch.zeros(9), torch.ones(2, 3), 1.0)
    assert function.calls == PATIENCE + 3 and not captured.disturbed and not captured.recorded
    assert not capturable("never", torch.device("cpu")) and not capturable("always", torch.device("meta"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_recorded_passes_write_the_same_texts(family: str, kind: str) -> None:
    """Greedy and sampled, one row and five, past the first 64 slots, with fixed and chosen trees."""
    on = backbone(family)
    drafter = random_drafter(kind, on)
    eager, recorded = SpeculativeModel(on, drafter, capture="never"), SpeculativeModel(on, drafter, capture="always")
    for lengths, new in (((59,), 20), ((9, 1, 14), 12)):
        rows = left_padded(prompts(lengths))
        for sample in (False, True):
            options: dict[str, Any] = {"do_sample": sample, "seed": 3, "max_new_tokens": new}
            truth = say(eager, rows, speculate=False, **options)
            for tree in (TreeShape(3, 2) if sample else TreeShape(12, 4), None):
                assert torch.equal(say(recorded, rows, tree=tree, **options), truth), (lengths, sample, tree)
            assert torch.equal(say(recorded, rows, speculate=False, **options), truth)
    engine = recorded.engine(True)
    assert engine.reader.read.recorded and engine.speculation is not None and engine.speculation.growths[0].levels[0].recorded


def test_moved_weights_are_read_anew() -> None:
    model = tiny("llama")
    of, row = SpeculativeModel(Backbone(model), capture="always"), {"input_ids": prompts((9,))[0][None]}
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
    first = say(of, row, **options)
    engine = of.engine(False)
    assert of.engine(False) is engine
    with torch.no_grad():
        for weight in model.parameters():
            weight.data = weight.data.flip(0).clone()
    assert of.engine(False) is not engine
    second = say(of, row, **options)
    assert torch.equal(second, model.generate(**row, **options)) and not torch.equal(first, second)
