"""Spot checks: of some hundred texts one is read again by the uncaptured model, and a fault turns captures off with one line."""

import logging
from typing import Any

import pytest
import torch
from families import backbone, left_padded, prompts, random_drafter, say
from recorded import a_logit, a_value, register
from torch.nn.modules.module import register_module_forward_pre_hook
from watched import watched

from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.inference import runtime
from headstart.inference.capture.capture import BACKENDS, Capturer
from headstart.inference.engine.judge import Judge

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "tree": TreeShape(8, 3), "seed": 3}


@pytest.fixture(autouse=True)
def before(monkeypatch: pytest.MonkeyPatch) -> int:
    """Every fourth text is read again: the number of texts of this process so far, a multiple of four."""
    monkeypatch.setattr(runtime, "EVERY", 4)
    return next(number for number in runtime._numbers if number % 4 == 0)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that were read again."""
    return watched(monkeypatch, Judge, "judge", lambda self, text, *_, **__: len(text.ids_T) - text.pads)


def model(on: Backbone | None = None, capture: Any = "cuda-graph") -> SpeculativeModel:
    on = on or backbone("shallow")
    return SpeculativeModel(on, random_drafter("medusa", on, depth=3), capture=capture)


def row(length: int) -> dict[str, torch.Tensor]:
    return left_padded(prompts((length,)))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("change", [a_logit, a_value])
def test_a_fault_turns_captures_off_with_one_line_that_names_the_text(
    change: Any, sample: bool, before: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register(monkeypatch, change)
    heads = model()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            say(heads, row(9), do_sample=sample, **OPTIONS)
        assert heads.engine(True).capturer.report().backend == "cuda-graph" and not caplog.records
        say(heads, row(9), do_sample=sample, **OPTIONS)
        told = [record.getMessage() for record in caplog.records]
        report = heads.engine(True).capturer.report()
        assert len(told) == 1 and f"text {before + 4} of this process (a prompt of 9 tokens, SHA-256 " in told[0]
        assert f"since text {max(1, before)} again" in told[0]
        assert report.backend == "off" and report.fallback is not None and f"text {before + 4} of this process" in report.fallback
        right = say(model(capture="off"), row(9), do_sample=sample, **OPTIONS)
        for _ in range(5):
            assert torch.equal(say(heads, row(9), do_sample=sample, **OPTIONS), right)
        assert len(caplog.records) == 1


def test_healthy_captures_stay_on(monkeypatch: pytest.MonkeyPatch, judged: list[int], caplog: pytest.LogCaptureFixture) -> None:
    register(monkeypatch, None)
    heads = model(Backbone(backbone("qwen3").model))
    filters = {"do_sample": True, "top_k": 9, "top_p": 0.9}
    for sampling in ({"do_sample": False}, filters):
        say(heads, left_padded(prompts((9, 1, 14, 4, 7))), repetition_penalty=1.2, **sampling, **OPTIONS)
    assert judged == [4 + 12, 14 + 12], "texts 4 and 8, without their padding"
    assert heads.engine(True).capturer.report().backend == "cuda-graph" and not caplog.records


def test_what_is_not_read_again(monkeypatch: pytest.MonkeyPatch, judged: list[int]) -> None:
    register(monkeypatch, None)
    heads = model()
    with runtime.paused():  # as benchmarks do
        say(heads, left_padded(prompts((9, 1, 14, 4, 7))), **OPTIONS)
    say(model(capture="trace"), left_padded(prompts((9, 1, 14, 4, 7))), **OPTIONS)
    say(model(capture="off"), left_padded(prompts((9, 1, 14, 4, 7))), **OPTIONS)
    say(heads, left_padded(prompts((9, 1, 14, 4))), num_beams=2, **{"max_new_tokens": 4})
    stateful = lambda ids, scores: scores  # noqa: E731
    say(heads, left_padded(prompts((9, 1, 14, 4))), logits_processor=[stateful], **OPTIONS)
    assert judged == []
    say(heads, left_padded(prompts((9, 1, 14, 4))), **OPTIONS)
    assert judged == [4 + 12]
    assert [name for name, backend in BACKENDS.items() if backend().spot_checks] == ["cuda-graph"]
    assert not Capturer("off", torch.device("cpu")).spot_checks


def test_a_text_that_does_not_fit_into_memory_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, a_logit)
    heads, tried = model(), []

    def full(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if module is heads.backbone.layers[0] and given[0].shape[1] > 12:  # the whole text
            tried.append(given[0].shape)
            raise torch.OutOfMemoryError("out of memory")

    with register_module_forward_pre_hook(full):
        for _ in range(4):
            assert say(heads, row(9), **OPTIONS).shape == (1, 9 + 12)
    assert tried
    assert heads.engine(True).capturer.report().backend == "cuda-graph"
