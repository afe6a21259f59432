"""A captured function gives what the function gives: for new shapes, after the cache has grown, in whole sequences; fallbacks say why."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DRAFTERS, FAMILIES, backbone, left_padded, prompts, random_drafter, say, tiny
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.capture import capture as capturing
from headstart.inference.capture import folding
from headstart.inference.capture.capture import PATIENCE, BackendName, Captured, Capturer, CaptureReport
from headstart.inference.capture.compile import Compile
from headstart.inference.capture.pytree import builder, flatten
from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.capture.trace import Trace
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.sources.drafter_source import DrafterSource
from headstart.support.errors import UserError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pair:
    left: Tensor
    right: Any


def captured_by(name: BackendName, function: Callable[..., Any]) -> Captured:
    return Capturer(name, CPU).capture(function, "the function")


@pytest.fixture(autouse=True)
def warnings_seen_by_no_other_test() -> None:
    capturing._warn_once.cache_clear()


def test_pytrees_come_apart_and_together() -> None:
    a, b, c = torch.ones(1), torch.zeros(2), torch.eye(3)
    tree = Pair(a, ({"x": b, "y": [c, None]}, 3, "word", (), Pair(a, None)))
    leaves: list[Tensor] = []
    structure = flatten(tree, leaves)
    assert [id(leaf) for leaf in leaves] == [id(one) for one in (a, b, c, a)]
    assert (again := builder(structure)(iter(leaves))) == tree and again.right[0]["y"][0] is c
    assert flatten(tree, []) == structure and hash(structure) == hash(flatten(tree, [])) and flatten(Pair(a, 4), []) != structure


class Counted:
    """A function that counts how often Python runs it."""

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


def test_new_shapes_are_followed_and_new_constants_captured() -> None:
    captured, held = captured_by("trace", Counted()), torch.zeros(9)
    for rows, scale, captures in ((4, 2.0, 1), (4, 2.0, 1), (7, 2.0, 1), (7, 2.0, 1), (7, 3.0, 2), (1, 2.0, 3), (1, 2.0, 3)):
        x = torch.randn(rows, 3)
        out, _ = captured(held, x, scale)
        assert torch.equal(out, x * scale + held.sum()) and captured.captures_made == captures, (rows, scale)


def test_sizes_of_one_are_captured_apart() -> None:
    """An autoregressive step keeps its own capture, which is faster than that of a tree, though a batch of one row has ones in both."""
    captured, held = captured_by("trace", Counted()), torch.zeros(9)
    for nodes, captures in ((1, 1), (6, 2), (1, 2), (8, 2), (1, 2), (7, 2)):
        x = torch.randn(1, nodes)
        assert torch.equal(captured(held, x, 2.0)[0], x * 2 + held.sum()) and captured.captures_made == captures, nodes


def test_a_capture_that_does_not_follow_a_shape_is_not_used_there() -> None:
    captured = captured_by("trace", lambda held, x: x * len(x))   # a constant to the trace
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


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, TypeError])
def test_what_cannot_be_captured_runs_as_it_is_and_says_why_once(error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    def awkward(held: None, x: Tensor) -> Tensor:
        if torch.jit.is_tracing():
            raise error("not here")
        return x + 1

    capturer = Capturer("trace", CPU)
    for _ in range(2):   # two functions of one name, as the levels of a draft
        captured = capturer.capture(awkward, "awkward")
        for _ in range(3):
            assert torch.equal(captured(None, torch.ones(2)), torch.full((2,), 2.0))
        assert captured.fallback == f"not capturable by trace: {error.__name__}: not here" and not captured.captures_made
    assert capturer.report() == CaptureReport("off", f"awkward: {captured.fallback}")
    assert [record.getMessage() for record in caplog.records] == [f"awkward is {captured.fallback}; it runs uncaptured, which is slower"]


def test_a_branch_on_values_is_noticed_at_replay(caplog: pytest.LogCaptureFixture) -> None:
    """As in a mixture of experts: how many rows an expert gets is a value, and a view of so many a constant to the trace."""

    def experts(held: None, x: Tensor) -> Tensor:
        chosen = x[x > 0]
        return chosen.view(int((x > 0).sum()) * 1, 1).flatten()

    captured = captured_by("trace", experts)
    for row in ([1.0, -1.0, 2.0], [1.0, 3.0, 2.0], [-1.0, 1.0, -1.0]):
        x = torch.tensor(row)
        assert torch.equal(captured(None, x), x[x > 0])
    assert captured.fallback is not None and len(caplog.records) == 1 and "is invalid for input of size" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CPU: can't allocate memory")])
@pytest.mark.parametrize("when", ["capturing", "comparing", "replaying"])
def test_out_of_memory_is_no_fallback(error: Exception, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_by("trace", lambda held, x: x + 1)

    def fail(*args: Any) -> None:
        raise error

    if when != "capturing":
        captured(None, torch.ones(3))
        captured(None, torch.ones(3))
        assert len(captured._known) == 1
        monkeypatch.setattr(next(iter(captured._captures.values())), "traced", fail)
    else:
        monkeypatch.setattr(Trace, "capture", fail)
    with pytest.raises(type(error), match="memory"):
        captured(None, torch.ones(3 if when != "comparing" else 5))
    assert captured.fallback is None and captured.backend is not None


def test_timing_the_layouts_lies_inside_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: Trace) -> int:
        raise AttributeError("module 'torch' has no attribute 'jit'")

    monkeypatch.setattr(Trace, "_max_transposed_rows", gone)
    captured = captured_by("trace", lambda held, x: x + 1)
    assert torch.equal(captured(None, torch.ones(3)), torch.full((3,), 2.0)) and "no attribute 'jit'" in str(captured.fallback)


def without_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.jit, "trace")
    monkeypatch.delattr(torch.jit, "optimized_execution")


def without_private_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_jit_pass_cse")
    monkeypatch.delattr(torch._C, "_create_function_from_graph")


def on_python_3_14(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        (without_trace, "has no torch.jit.trace"),
        (without_private_functions, "lacks torch._C._jit_pass_cse, torch._C._create_function_from_graph, with which traces are folded"),
        (on_python_3_14, "torch.jit does not support Python 3.14 and later"),
    ],
)
def test_without_traces_auto_captures_nothing_and_says_so(
    missing: Callable[[pytest.MonkeyPatch], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    on, row = backbone("llama"), {"input_ids": prompts((9,))[0][None]}
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30, "tree": TreeShape(8, 3)}
    truth, drafter = say(SpeculativeModel(on, capture="off"), row, **options), random_drafter("medusa", on)
    with pytest.MonkeyPatch.context() as patch:
        missing(patch)
        of = SpeculativeModel(on, drafter, capture="auto")
        assert torch.equal(say(of, row, **options), truth)
        report = of.engine(True).capturer.report()
        assert report.backend == "off" and reason in str(report.fallback)
        Capturer("auto", CPU)
        assert len(caplog.records) == 1 and reason in caplog.text
        with pytest.raises(UserError, match="capture 'trace' cannot be used: .*; choose 'auto' or 'off'"):
            Capturer("trace", CPU)


def test_a_torch_without_torch_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "jit", None)   # torch and transformers themselves do not decode so, only the choice is tested
    assert "has no torch.jit.trace" in str(Capturer("auto", CPU).report().fallback)


def test_no_private_function_of_folding_goes_unlisted() -> None:
    source = Path(folding.__file__).read_text()
    used = set(re.findall(r"(?:passes|torch\._C)\.(\w+)", source))
    assert used == set(folding.PRIVATE)


def test_off_is_off() -> None:
    function = Counted()
    capturer = Capturer("off", CPU)
    captured = capturer.capture(function, "f")
    for _ in range(PATIENCE + 3):
        captured(torch.zeros(9), torch.ones(2, 3), 1.0)
    assert function.calls == PATIENCE + 3 and not captured.captures_made and capturer.report() == CaptureReport("off", None)


def test_backends_are_chosen_by_name_or_refused_with_the_reason() -> None:
    for name, reason in (("always", "no capture backend 'always'; choose auto, trace"), ("cuda-graph", "the model is on cpu")):
        with pytest.raises(UserError, match=reason):
            Capturer(name, CPU)   # type: ignore[arg-type]
    with pytest.raises(UserError, match="traces are for the CPU; the model is on meta"):
        Capturer("trace", torch.device("meta"))
    on_cuda = Capturer("auto", torch.device("cuda")).report()
    assert on_cuda == CaptureReport("off", "auto captures nothing on cuda; choose a backend by name")


def test_a_function_may_be_left_out_for_a_reason() -> None:
    capturer = Capturer("trace", CPU)
    one, other = capturer.capture(Counted(), "one"), capturer.capture(Counted(), "other", unless="its weights are being trained")
    assert capturer.report() == CaptureReport("off", None), "nothing was called yet"
    for captured in (one, other):
        captured(torch.zeros(9), torch.ones(2, 3), 1.0)
    assert capturer.report() == CaptureReport("trace", "other: its weights are being trained")


def test_compile_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert Compile.unavailable(CPU) == "torch.compile needs a C++ compiler (no-such-compiler is missing); install one or set CXX"


@pytest.mark.skipif(Compile.unavailable(CPU) is not None, reason=str(Compile.unavailable(CPU)))
def test_a_compiled_function_gives_the_same() -> None:
    captured, held = captured_by("compile", Counted()), torch.zeros(9)
    for rows in (4, 7, 5, 1):
        x = torch.randn(rows, 3)
        out, pair = captured(held, x, 2.0)
        assert torch.allclose(out, x * 2 + held.sum()) and torch.equal(held[:rows], x[:, 0]) and torch.equal(pair.left, x.argmax(-1))
        assert captured.fallback is None and captured.captures_made == 1 + (rows == 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_captured_passes_write_the_same_sequences(family: str, kind: str) -> None:
    """Greedy and sampled, one row and five, past the first 64 slots, with fixed and chosen trees."""
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
    assert (engine := captured.engine(True)).reader.captured and engine.speculation.of_kind(DrafterSource)[0].captured


def test_moved_weights_are_captured_anew() -> None:
    model = tiny("llama")
    of, row = SpeculativeModel(Backbone(model), capture="trace"), {"input_ids": prompts((9,))[0][None]}
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
