"""The check before a model's first captured text: a fault cannot write one, and a machine pays once."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Scripted, left_padded, prompts, random_drafter, say, tiny
from recorded import Recorded, shallow
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.kv.ragged_cache import RaggedCache
from headstart.heads.kv.rows import FixedMemory, octave_up
from headstart.inference.capture.cuda_graph import Replay
from headstart.inference.engine.reader import Reader
from headstart.inference.generate import SpeculativeModel
from headstart.inference.self_check import check


@pytest.fixture(autouse=True)
def checked(graphs: type[Recorded], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Recorded, "checked", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def recorded() -> SpeculativeModel:
    return SpeculativeModel(shallow(), random_drafter("eagle3", shallow(), depth=3), capture="cuda-graph")


def write(of: SpeculativeModel, **options: Any) -> Tensor:
    return say(of, left_padded(prompts((9, 60))), max_new_tokens=20, do_sample=False, **options)


def laid_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that wrote wrong texts: a smaller tree has the stores laid out anew where they are, and the cache does not know."""
    nodes = Reader.nodes

    def faulty(self: Reader, cache: RaggedCache, slots: int, tokens_BN: Tensor, *rest: Any) -> Any:
        fewer, kept = octave_up(cache.longest + tokens_BN.shape[1]), (cache.keys, cache.values)

        def anew(store: Tensor) -> Tensor:
            if cache.memory is None or fewer >= store.shape[-2]:
                return store
            small = store[..., :fewer, :].clone()
            return store.as_strided((small.numel(),), (1,), store.storage_offset()).view(small.shape).copy_(small)

        cache.keys, cache.values = tuple(map(anew, kept[0])), tuple(map(anew, kept[1]))
        try:
            return nodes(self, cache, min(slots, cache.keys[0].shape[-2]), tokens_BN, *rest)
        finally:
            cache.keys, cache.values = kept

    monkeypatch.setattr(Reader, "nodes", faulty)


def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays that go on reading a store where it was."""
    monkeypatch.setattr(Replay, "follows", lambda self, call: True)
    home = FixedMemory._home

    def moving(self: FixedMemory, key: Any, store: Tensor, slots: bool) -> Tensor:
        self._homes[key] = home(self, key, store, slots).clone()
        return self._homes[key]

    monkeypatch.setattr(FixedMemory, "_home", moving)


def frozen_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that are not copied in."""
    call = Replay.__call__

    def without(self: Replay, call_: Any) -> Any:
        self.copied = [(i, copy) for i, copy in self.copied if copy.dtype != torch.int64 or copy.dim() != 1]
        return call(self, call_)

    monkeypatch.setattr(Replay, "__call__", without)


@pytest.mark.parametrize(("fault", "words"), [
    (laid_out_anew, "logits differ by"), (frozen_lengths, "differ"), pytest.param(stale, "logits differ by", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_fault_is_caught_before_the_first_text(
    fault: Any, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    truth = write(SpeculativeModel(shallow(), capture="off"))
    fault(monkeypatch)
    of = recorded()
    assert torch.equal(write(of), truth)
    lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1 and "no longer captured" in lines[0] and words in lines[0], lines
    report = of.engine(True).capturer.report()
    assert report.backend == "off" and report.fallback and words in report.fallback
    again = recorded()
    monkeypatch.setattr(check, "_fault", None)  # it is known
    assert torch.equal(write(again), truth)
    assert "found before; remove" in caplog.records[-1].message and str(check.results_file()) in caplog.records[-1].message


def test_a_fault_in_the_heads_memory_is_caught_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such heads draft what nobody accepts; texts stay right."""
    place = FixedMemory.place

    def forgetful(self: FixedMemory, holder: str, stores: Any, slots: bool = True) -> list[Tensor]:
        placed = place(self, holder, stores, slots)
        return placed if holder in ("cache", "states") else [one.zero_() if one.dim() == 4 else one for one in placed]

    monkeypatch.setattr(FixedMemory, "place", forgetful)
    of = recorded()
    write(of)
    assert "the scores of drafts differ by" in str(of.engine(True).capturer.report().fallback)


def test_a_healthy_model_passes_once_for_a_machine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    truth, calls, fault = write(SpeculativeModel(shallow(), capture="off")), [], check._fault

    def counted(*args: Any) -> str:
        calls.append(fault(*args))
        return calls[-1]

    monkeypatch.setattr(check, "_fault", counted)
    for of in (recorded(), recorded()):
        for _ in range(2):
            assert torch.equal(write(of), truth)
        assert of.engine(True).capturer.report().backend == "cuda-graph"
    assert calls == [""] and not caplog.records


def test_a_damaged_or_unwritable_file_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    key = check.result_key(shallow(), [], Recorded)
    for text in ("{", "[]", "{}", '{"format": 1}', '{"format": 1, "results": []}', json.dumps({"format": 0, "results": {key: "broken"}}),
                 json.dumps({"format": 1, "results": {key: 3}}), "\0"):  # fmt: skip
        check.results_file().parent.mkdir(parents=True, exist_ok=True)
        check.results_file().write_text(text)
        assert check.read_result(key) is None, text
        check.write_result(key, "")
        assert check.read_result(key) == "", text
    check.write_result("another", "a fault")
    assert check.read_result(key) == "" and check.read_result("another") == "a fault"
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    check.write_result(key, "")
    assert check.read_result(key) is None


def test_a_result_is_for_a_version_of_the_code_for_the_heads_and_for_a_dtype() -> None:
    on = shallow()
    keys = {
        check.result_key(on, drafters, Recorded)
        for drafters in ([], [random_drafter("eagle3", on)], [random_drafter("eagle3", on, layers=2)])
    }
    keys.add(check.result_key(Backbone(tiny("llama", num_hidden_layers=2).bfloat16()), [], Recorded))  # other bits round otherwise
    assert len(keys) == 4 and all(f"code {check._code()}" in key and torch.__version__ in key for key in keys)
    assert len(check._code()) == 16


def test_heads_that_cannot_be_captured_are_checked_as_well() -> None:
    on = shallow()
    of = SpeculativeModel(on, Scripted(on, [[1, 2, 3]], "nearly"), capture="cuda-graph")
    assert torch.equal(write(of), write(SpeculativeModel(on, capture="off")))
    report = of.engine(True).capturer.report()
    assert report.backend == "cuda-graph" and "drafts: Scripted is not capturable" in str(report.fallback)
