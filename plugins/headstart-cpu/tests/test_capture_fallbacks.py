"""Capture fallbacks: the reason is logged once and kept; out of memory is not a fallback; backends are chosen by name."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import refuses
from families import backbone, prompts, random_drafter, say
from headstart_cpu import trace
from test_capture import CPU, Counted, captured_by
from torch import Tensor

from headstart import SpeculativeModel, TreeShape
from headstart.inference.capture import captured as capturing
from headstart.inference.capture.capture import Capturer, CaptureReport
from headstart.inference.capture.captured import PATIENCE
from headstart.support.errors import UserError


@pytest.fixture(autouse=True)
def warnings_seen_by_no_other_test() -> None:
    capturing.warn_once.cache_clear()


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, TypeError])
def test_what_cannot_be_captured_runs_as_it_is_and_says_why_once(error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    def awkward(held: None, x: Tensor) -> Tensor:
        if torch.jit.is_tracing():
            raise error("not here")
        return x + 1

    capturer = Capturer("trace", CPU)
    for _ in range(2):  # two functions of one name, like the levels of a draft
        captured = capturer.capture(awkward, "awkward")
        for _ in range(3):
            assert torch.equal(captured(None, torch.ones(2)), torch.full((2,), 2.0))
        assert captured.fallback == f"not capturable by trace: {error.__name__}: not here" and not captured.captures_made
    assert capturer.report() == CaptureReport("off", f"awkward: {captured.fallback}")
    assert [record.getMessage() for record in caplog.records] == [f"awkward is {captured.fallback}; it runs uncaptured, which is slower"]


def test_a_branch_on_values_is_noticed_at_replay(caplog: pytest.LogCaptureFixture) -> None:
    """As in a mixture of experts: the number of rows per expert depends on values, but the traced view keeps it constant."""

    def experts(held: None, x: Tensor) -> Tensor:
        chosen = x[x > 0]
        return chosen.view(int((x > 0).sum()) * 1, 1).flatten()

    captured = captured_by("trace", experts)
    for row in ([1.0, -1.0, 2.0], [1.0, 3.0, 2.0], [-1.0, 1.0, -1.0]):
        x = torch.tensor(row)
        assert torch.equal(captured(None, x), x[x > 0])
    assert captured.fallback is not None and len(caplog.records) == 1 and "is invalid for input of size" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CPU: can't allocate memory")])
@pytest.mark.parametrize("when", ["capturing", "comparing"])
def test_out_of_memory_is_no_fallback(error: Exception, when: str) -> None:
    full = []

    def function(held: None, x: Tensor) -> Tensor:
        if full:
            raise error
        return x + 1

    captured = captured_by("trace", function)
    if when == "comparing":
        captured(None, torch.ones(3))
    full.append(True)
    with pytest.raises(type(error), match="memory"):
        captured(None, torch.ones(5))
    assert captured.fallback is None and captured.backend is not None


def without_private_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_jit_pass_cse")
    monkeypatch.delattr(torch._C, "_create_function_from_graph")


@pytest.mark.parametrize(("missing", "reason"), [
    (lambda monkeypatch: monkeypatch.delattr(torch.jit, "optimized_execution"), "has no torch.jit.optimized_execution"),
    (without_private_functions, "lacks torch._C._jit_pass_cse, torch._C._create_function_from_graph, with which traces are made"),
    (
        lambda monkeypatch: monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0)),
        "torch.jit does not support Python 3.14 and later",
    ),
])  # fmt: skip
def test_without_traces_auto_captures_nothing_and_says_so(missing: Callable[[pytest.MonkeyPatch], None], reason: str, caplog: Any) -> None:
    on, row = backbone("shallow"), {"input_ids": prompts((9,))[0][None]}
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
        refuses("capture 'trace' cannot be used: .*; choose 'auto' or 'off'", Capturer, "trace", CPU)


def test_no_private_function_goes_unlisted() -> None:
    source = Path(trace.__file__).read_text()
    used = set(re.findall(r"\b_C\.(\w+)", source))
    assert used == set(trace.PRIVATE)


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
            Capturer(name, CPU)  # type: ignore[arg-type]
    refuses("capture 'trace' is for the CPU; the model is on meta", Capturer, "trace", torch.device("meta"))
    on_meta = Capturer("auto", torch.device("meta")).report()
    assert on_meta == CaptureReport("off", "auto captures nothing on meta; choose a backend by name")


def test_a_function_may_be_left_out_for_a_reason() -> None:
    capturer = Capturer("trace", CPU)
    one, other = capturer.capture(Counted(), "one"), capturer.capture(Counted(), "other", unless="its weights are being trained")
    assert capturer.report() == CaptureReport("off", None), "nothing was called yet"
    for captured in (one, other):
        captured(torch.zeros(9), torch.ones(2, 3), 1.0)
    assert capturer.report() == CaptureReport("trace", "other: its weights are being trained")


def test_giving_up_turns_every_function_off_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    capturer, function = Capturer("trace", CPU), Counted()
    captured, later = capturer.capture(function, "f"), capturer.capture(Counted(), "g")
    captured(torch.zeros(9), torch.ones(2, 3), 1.0)
    for _ in range(2):
        capturer.give_up("a text differs")
    before = function.calls
    captured(torch.zeros(9), torch.ones(2, 3), 1.0)
    later(torch.zeros(9), torch.ones(2, 3), 1.0)
    assert function.calls == before + 1 and captured.captures_made == 1 and not later.captures_made
    assert capturer.report() == CaptureReport("off", "a text differs") and capturer.capture(function, "h").backend is None
    assert [record.message for record in caplog.records] == ["forward passes are no longer captured, which is slower: a text differs"]
