"""Calls of several threads: on one model they take turns, on several models they run at once; every text is that of a call alone."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from families import prompts, random_drafter, say, tiny
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from headstart import Backbone, SpeculativeModel
from headstart.inference.engine.suffix import SuffixProposer
from headstart.support.errors import UserError

LENGTH, THREADS = 24, 4


def fresh(family: str = "shallow") -> SpeculativeModel:
    on = Backbone(tiny(family))
    return SpeculativeModel(on, random_drafter("eagle3", on, depth=3), proposers=[SuffixProposer()])


def rows() -> list[dict[str, Tensor]]:
    return [{"input_ids": prompt_T[None]} for prompt_T in prompts((9, 17, 4, 12))]


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Start all calls at the same moment, each in its thread; returns their results."""
    start = threading.Barrier(len(calls))

    def call(one: Callable[[], Any]) -> Any:
        start.wait(30)
        return one()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(120) for future in [pool.submit(call, one) for one in calls]]


@pytest.mark.parametrize("sampling", [{}, pytest.param({"do_sample": True, "seed": 5}, marks=pytest.mark.slow)], ids=["greedy", "sampled"])
def test_threads_on_one_model_get_the_texts_of_calls_alone(sampling: dict[str, Any]) -> None:
    alone = [say(fresh(), row, max_new_tokens=LENGTH, **sampling) for row in rows()]
    heads = fresh()
    calls = [lambda row=row: say(heads, row, max_new_tokens=LENGTH, **sampling) for row in rows()]
    for _ in range(2):  # captured in the second round
        for own, other in zip(alone, at_once(calls), strict=True):
            assert torch.equal(own, other)


def test_the_model_itself_may_run_in_another_thread() -> None:
    heads, other = fresh(), fresh()
    model = heads.backbone.model
    expected = [model.generate(**row, max_new_tokens=LENGTH, do_sample=False) for row in rows()]
    calls = [lambda row=row: say(heads, row, max_new_tokens=LENGTH) for row in rows()[:2]]
    calls += [lambda row=row: model.generate(**row, max_new_tokens=LENGTH, do_sample=False) for row in rows()[2:]]
    for own, result in zip(expected, at_once(calls), strict=True):
        assert torch.equal(own, result)
    assert at_once([lambda one=one: say(one, rows()[0], max_new_tokens=LENGTH) for one in (heads, other)])[0].shape[1] == LENGTH + 9


class Meddling(BaseStreamer):
    """Calls generate for every token."""

    def __init__(self, inner: Callable[[], Any]) -> None:
        self.inner = inner

    def put(self, value: Tensor) -> None:
        self.inner()

    def end(self) -> None:
        """Nothing is held back."""


def test_a_call_inside_a_call_is_refused_and_the_model_stays_usable() -> None:
    heads, other, row = fresh(), fresh(), rows()[0]
    truth = say(heads, row, max_new_tokens=8)
    with pytest.raises(UserError, match="generate was called inside a call of generate on the same model .*; call it when that one has"):
        say(heads, row, max_new_tokens=8, streamer=Meddling(lambda: say(heads, row, max_new_tokens=2)))
    assert torch.equal(say(heads, row, max_new_tokens=8, streamer=Meddling(lambda: say(other, row, max_new_tokens=2))), truth)
    assert torch.equal(say(heads, row, max_new_tokens=8), truth)


def test_an_error_in_one_thread_leaves_the_others_their_turn() -> None:
    heads, row = fresh(), rows()[0]
    truth = say(heads, row, max_new_tokens=8)

    def fail() -> None:
        raise RuntimeError("the reader has gone")

    def broken() -> str:
        try:
            say(heads, row, max_new_tokens=8, streamer=Meddling(fail))
        except RuntimeError as error:
            return str(error)
        return "no error"

    results = at_once([broken, *[lambda: say(heads, row, max_new_tokens=8)] * THREADS, broken])
    assert results[0] == results[-1] == "the reader has gone"
    assert all(torch.equal(truth, one) for one in results[1:-1])
