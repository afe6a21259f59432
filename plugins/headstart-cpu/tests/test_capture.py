"""A captured function returns the same results for new shapes, after the cache has grown, in whole sequences; fallbacks give a reason."""

import copy
import itertools
import math
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from families import DRAFTERS, FAMILIES, ROW, backbone, left_padded, prompts, random_drafter, say, tiny
from headstart_cpu.trace import Trace
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.heads.layers.rows import FixedMemory
from headstart.inference.capture.capture import BackendName, Capturer
from headstart.inference.capture.captured import PATIENCE, SHORT_PATIENCE, Captured, Stopwatch
from headstart.inference.engine.drafter_source import DrafterSource
from headstart.inference.engine.processing import MOST_LEFT, Filters
from headstart.support.pytree import builder, flatten

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("tracing")


@dataclass(frozen=True)
class Pair:
    left: Tensor
    right: Any


def captured_by(name: BackendName, function: Callable[..., Any]) -> Captured:
    return Capturer(name, CPU).capture(function, "the function")


def test_pytrees_come_apart_and_together() -> None:
    a, b, c = torch.ones(1), torch.zeros(2), torch.eye(3)
    tree = Pair(a, ({"x": b, "y": [c, None]}, 3, "word", (), Pair(a, None)))
    leaves: list[Tensor] = []
    structure = flatten(tree, leaves)
    assert [id(leaf) for leaf in leaves] == [id(one) for one in (a, b, c, a)]
    assert (again := builder(structure)(iter(leaves))) == tree and again.right[0]["y"][0] is c
    assert flatten(tree, []) == structure and hash(structure) == hash(flatten(tree, [])) and flatten(Pair(a, 4), []) != structure


class Counted:
    """A function that counts its Python calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, held: Tensor, x: Tensor, scale: float) -> tuple[Tensor, Pair]:
        self.calls += 1
        held.index_copy_(0, torch.arange(x.shape[0]), x[:, 0])
        return x * scale + held.sum(), Pair(x.argmax(-1), {"rows": x.sum(0)})


def test_auto_captures_after_some_calls_and_then_does_not_run_the_function_again() -> None:
    function = Counted()
    captured, held = captured_by("auto", function), torch.zeros(9)
    for call in range(PATIENCE + 5):
        x = torch.randn(4, 3)
        with Stopwatch() as watch:
            out, pair = captured(held, x, 2.0)
        assert torch.equal(held[:4], x[:, 0]) and torch.equal(out, x * 2 + held.sum()) and torch.equal(pair.right["rows"], x.sum(0))
        assert watch.valid == (call != PATIENCE), "the call that captures says nothing of the next one's time"
    assert function.calls == PATIENCE + 1 and captured.captures_made == 1


def test_auto_waits_less_once_another_function_is_captured() -> None:
    """Decoding goes on for long then, and heads that run uncaptured beside captured passes would seem slow."""
    capturer, held_1, x_T = Capturer("auto", torch.device("cpu")), torch.ones(1), torch.arange(4.0)
    first, second = (capturer.capture(lambda held, x_T: x_T + held, name) for name in ("first", "second"))
    for _ in range(PATIENCE + 1):
        assert not first.captures_made
        first(held_1, x_T)
    for _ in range(SHORT_PATIENCE + 1):
        assert not second.captures_made
        with Stopwatch() as watch:
            second(held_1, x_T)
        assert not watch.valid, "it will be faster soon"
    with Stopwatch() as watch:
        second(held_1, x_T)
    assert watch.valid
    assert first.captures_made == second.captures_made == 1


def test_auto_waits_for_as_many_steps_of_a_function_called_several_times_a_step() -> None:
    captured = Capturer("auto", torch.device("cpu")).capture(lambda held, x_T: x_T + held, "sum", calls_per_step=3)
    held_1, x_T = torch.ones(1), torch.arange(4.0)
    for call in range(3 * PATIENCE + 1):
        assert captured.captures_made == 0, call
        captured(held_1, x_T)
    assert captured.captures_made == 1


def test_new_shapes_are_followed_and_new_constants_captured() -> None:
    captured, held = captured_by("trace", Counted()), torch.zeros(9)
    for rows, scale, captures in ((4, 2.0, 1), (4, 2.0, 1), (7, 2.0, 1), (7, 2.0, 1), (7, 3.0, 2), (1, 2.0, 3), (1, 2.0, 3)):
        x = torch.randn(rows, 3)
        out, _ = captured(held, x, scale)
        assert torch.equal(out, x * scale + held.sum()) and captured.captures_made == captures, (rows, scale)


def test_sizes_of_one_are_captured_apart() -> None:
    """An autoregressive step keeps its own capture, faster than a tree's, although a batch of one row has a size of 1 in both."""
    captured, held = captured_by("trace", Counted()), torch.zeros(9)
    for nodes, captures in ((1, 1), (6, 2), (1, 2), (8, 2), (1, 2), (7, 2)):
        x = torch.randn(1, nodes)
        assert torch.equal(captured(held, x, 2.0)[0], x * 2 + held.sum()) and captured.captures_made == captures, nodes


def test_replays_do_not_track_views_and_their_tensors_can_be_changed() -> None:
    """Logits processors change scores in place, which tensors of `torch.inference_mode` do not allow."""
    captured, x_BT = captured_by("trace", lambda held, x_BT: x_BT.view(-1)[:2]), torch.zeros(2, 3)
    with torch.no_grad():
        for _ in range(2):
            view = captured(None, x_BT)
        assert view._base is None and not view.is_inference()
        view += 1
    assert x_BT.flatten().tolist() == [1, 1, 0, 0, 0, 0]


def test_a_capture_that_does_not_follow_a_shape_is_not_used_there() -> None:
    captured = captured_by("trace", lambda held, x: x * len(x))  # a constant to the trace
    for rows in (3, 5, 3, 5):
        assert torch.equal(captured(None, torch.ones(rows)), torch.full((rows,), float(rows)))


def test_sizes_between_compared_ones_are_followed_at_once() -> None:
    function = Counted()
    captured, held = captured_by("trace", function), torch.zeros(9)
    runs_before = 0
    for rows, runs in ((3, 1), (8, 2), (5, 2), (8, 2), (9, 3), (2, 4), (4, 4)):
        x = torch.randn(rows, 3)
        with Stopwatch() as watch:
            assert torch.equal(captured(held, x, 2.0)[0], x * 2 + held.sum())
        assert function.calls == runs and watch.valid == (runs == runs_before), rows
        runs_before = runs


ON_EVERY_FAMILY = ("eagle3", "draft_model")
"""Kinds that are captured on every family, here and in test_draft_model.py; the others are on one."""


@pytest.mark.matrix("kind", cells=1)
@pytest.mark.parametrize(
    "family,kind",
    [(family, "eagle3") for family in ("shallow", *FAMILIES)] + [("llama", kind) for kind in DRAFTERS if kind not in ON_EVERY_FAMILY],
)
def test_captured_passes_write_the_same_sequences(family: str, kind: str) -> None:
    """Greedy and sampled, one row and five, past the first 64 slots, with fixed and adaptive trees."""
    on = backbone(family)
    drafter = random_drafter(kind, on)
    uncaptured, captured = SpeculativeModel(on, drafter, capture="off"), SpeculativeModel(on, drafter, capture="trace")
    for lengths, new in (((59,), 20), ((9, 1, 14), 12)):
        rows = left_padded(prompts(lengths))
        for sample in (False, True):
            options: dict[str, Any] = {"do_sample": sample, "seed": 3, "max_new_tokens": new}
            truth = say(uncaptured, rows, speculate=False, **options)
            for tree in (TreeShape(3, 2) if sample else TreeShape(12, 4), "auto"):
                assert torch.equal(say(captured, rows, tree=tree, **options), truth), (lengths, sample, tree)
            assert torch.equal(say(captured, rows, speculate=False, **options), truth)
    assert (engine := captured.engine(True)).reader.read.made and engine.policy.of_kind(DrafterSource)[0].captured


def test_captures_of_a_function_are_bounded_and_nothing_is_left_of_those_given_up() -> None:
    """Each constant, such as a width, has captures of its own; `torch.jit.trace` would leave each graph with torch."""
    most, layer, before = Trace.most_captures, torch.nn.Linear(8, 8).requires_grad_(False), compiled_functions()
    scale = Capturer("trace", CPU).capture(lambda held, x, factor: layer(x) * factor, "scale", layer)
    scale(None, torch.ones(2, 8), 0.0)
    (first,) = map(weakref.ref, scale._captures.values())
    for factor in range(1, most + 2):
        for size in (2, 3):
            torch.testing.assert_close(scale(None, torch.ones(size, 8), float(factor)), layer(torch.ones(size, 8)) * factor)
    assert len(scale._captures) == most and set(map(id, scale._known.values())) <= set(map(id, scale._captures.values()))
    assert scale.captures_made == most + 2 and first() is None and compiled_functions() == before


@pytest.mark.matrix("kind", cells=2)
@pytest.mark.parametrize("family,kind", [("gemma3", "eagle3"), ("gpt2", "medusa")] + [("llama", kind) for kind in DRAFTERS])
def test_captures_follow_the_number_of_rows(family: str, kind: str) -> None:
    """Rows finish one after the other: a capture that held their number would be made again each time."""
    of, made = SpeculativeModel(backbone(family), random_drafter(kind, backbone(family)), capture="trace"), []
    for lengths in ((9, 12, 5, 8), (9, 11, 7), (6, 12), (7, 8, 9, 10, 11)):
        say(of, left_padded(prompts(lengths)), tree=TreeShape(6, 2), max_new_tokens=5, do_sample=False)
        made.append({one.name: (one.captures_made, len(one._captures)) for one in of.engine(True).capturer.functions})
    assert all(count == kept for count, kept in made[-1].values()), "none was made in place of another"
    assert made[-1] == made[2], made


def test_filters_of_drafts_leave_the_largest_of_what_transformers_leaves() -> None:
    for top_k, (top_p, min_p) in itertools.product(
        (0, 1, 7, 64, 300, 10**9), ((1.0, 0.0), (0.7, 0.0), (1.0, 0.2), (0.99, 0.0), (0.9, 0.05), (1e-9, 0.0))
    ):
        logits_NV = 3 * torch.randn(5, 200)
        expected_NV = logits_NV
        for warper, value, off in ((TopKLogitsWarper, top_k, 0), (TopPLogitsWarper, top_p, 1.0), (MinPLogitsWarper, min_p, 0.0)):
            expected_NV = expected_NV if value == off else warper(value)(None, expected_NV)  # type: ignore[abstract]
        filters = Filters.of(top_k, top_p, min_p, CPU)
        assert (filters is None) == ((top_k, top_p, min_p) == (0, 1.0, 0.0))
        if filters is not None:
            expected_NV = expected_NV.masked_fill(expected_NV < expected_NV.topk(MOST_LEFT).values[:, -1:], -math.inf)
            assert torch.equal(filters(logits_NV), expected_NV), (top_k, top_p, min_p)


def test_filters_of_fewer_tokens_than_they_look_at_are_traced() -> None:
    """While a function is traced, sizes are tensors."""
    filters, logits_NV = Filters.of(5, 0.9, 0.0, CPU), torch.randn(2, MOST_LEFT // 2)
    assert filters is not None and torch.equal(torch.jit.trace(lambda x: filters(x), logits_NV)(logits_NV), filters(logits_NV))


def compiled_functions() -> int:
    """The number of functions in torch's compilation unit, which lives as long as the process."""
    return len(torch.jit._state._python_cu.get_functions())


def test_a_trace_of_other_bits_is_not_used_where_bits_count() -> None:
    def rounds(held: list[Any], x: torch.Tensor) -> torch.Tensor:
        return x + 1e-6 if torch.jit.is_tracing() else x + 0

    for same_bits in (True, False):
        captured = Captured(rounds, "rounding", Trace(None, FixedMemory(), same_bits), 0, None)
        assert torch.equal(captured([], torch.ones(3)), torch.ones(3)) is same_bits
        assert bool(captured.captures_made) is not same_bits and ("rounds otherwise" in str(captured.fallback)) is same_bits


def test_heads_are_copied_and_pickled_after_traces() -> None:
    heads = SpeculativeModel(Backbone(tiny("shallow")), random_drafter("medusa", backbone("shallow")), capture="trace")
    text = say(heads, ROW, max_new_tokens=8)
    for other in (copy.deepcopy(heads), pickle.loads(pickle.dumps(heads))):
        assert torch.equal(say(other, ROW, max_new_tokens=8), text) and other.backbone.model is not heads.backbone.model
