"""Processors, criteria and streamers of the user's own are called exactly as transformers calls them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import ROW, ROWS, VOCAB, backbone, random_drafter, say, tiny
from torch import Tensor
from transformers import EosTokenCriteria, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import headstart
from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.inference.engine.proposer import made
from headstart.support.errors import UserError

ENDS: dict[str, Any] = {"eos_token_id": [1, 9, 15, 20, 33], "pad_token_id": 60}


@pytest.fixture(scope="module")
def of() -> SpeculativeModel:
    return SpeculativeModel(on := backbone("shallow"), random_drafter("eagle3", on), proposers=made("recycling"))


class Log:
    """Every call of the objects that share it, in order: who, the ids or tokens, and the scores."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, Any]] = []

    def add(self, who: str, ids: Tensor, scores: Any = None) -> None:
        self.calls.append((who, ids.tolist(), [one.clone() for one in scores] if isinstance(scores, tuple) else scores))

    def same(self, other: Log) -> None:
        assert [call[:2] for call in self.calls] == [call[:2] for call in other.calls]
        for (_, _, one), (_, _, two) in zip(self.calls, other.calls, strict=True):
            for own, theirs in zip(one or (), two or (), strict=True):
                torch.testing.assert_close(own, theirs, atol=2e-4, rtol=1e-4)


class Stepping(LogitsProcessor):
    """Goes one step forward at each call, as matchers of grammars do: each step allows tokens of its own, by row."""

    def __init__(self, log: Log) -> None:
        self.log, self.step = log, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.log.add("processor", input_ids, (scores,))
        self.step += 1
        allowed = torch.full_like(scores, -math.inf)
        for row in range(len(scores)):
            allowed[row, [(11 * self.step + 7 * i + 3 * row) % VOCAB for i in range(6)]] = 0
        scores += allowed  # in place, as some do
        return scores


class Undoable(Stepping):
    """Forks along the tree of a row, which the beams of a row are not."""

    def rollback(self, n: int) -> None:
        raise AssertionError("beams are no tree of one row")


class Counting(StoppingCriteria):
    """Keeps something for each row of the batch, as evaluation harnesses do: ends a row after so many even tokens, or all at once."""

    def __init__(self, log: Log, rows: int, most: int = 3, together: bool = False) -> None:
        self.log, self.seen, self.most, self.together = log, [0] * rows, most, together

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.log.add("criterion", input_ids, scores)
        self.seen = [seen + (int(ids[-1]) % 2 == 0) for seen, ids in zip(self.seen, input_ids, strict=False)]
        done = [seen >= self.most for seen in self.seen]
        return torch.tensor([all(done)] * len(input_ids) if self.together else (done + [False] * len(input_ids))[: len(input_ids)])


class Streaming(BaseStreamer):
    def __init__(self, log: Log) -> None:
        self.log = log

    def put(self, value: Tensor) -> None:
        self.log.add("streamer", value)

    def end(self) -> None:
        self.log.add("end", torch.zeros(0))


def options(names: str, rows: int, log: Log) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if "p" in names:
        made["logits_processor"] = LogitsProcessorList([Undoable(log) if "u" in names else Stepping(log)])
    if "c" in names:
        made["stopping_criteria"] = StoppingCriteriaList([Counting(log, rows, together="t" in names)])
    if "s" in names:
        made["streamer"] = Streaming(log)
    return made


def same_calls(of: SpeculativeModel, rows: dict[str, Tensor], names: str, asked: int, **how: Any) -> tuple[Any, Any]:
    """What decoding gives and what transformers does, with the same calls in the same order with the same arguments."""
    logs = Log(), Log()
    expected = of.backbone.model.generate(**rows, do_sample=False, **how, **options(names, asked, logs[0]))
    actual = say(of, rows, do_sample=False, **how, **options(names, asked, logs[1]))
    logs[1].same(logs[0])
    assert logs[0].calls
    return actual, expected


@pytest.mark.matrix
@pytest.mark.parametrize("ends", [{}, ENDS], ids=["no end", "ends"])
@pytest.mark.parametrize("names", ["p", "c", "ct", "pc", "cs", "pcs"])
@pytest.mark.parametrize("rows", [ROW, ROWS], ids=["row", "batch"])
def test_greedy_calls_are_those_of_transformers(of: SpeculativeModel, rows: dict[str, Tensor], names: str, ends: dict[str, Any]) -> None:
    how = {"max_new_tokens": 14, "repetition_penalty": 1.3} | ends
    assert torch.equal(*same_calls(of, rows, names, len(rows["input_ids"]), **how))


@pytest.mark.parametrize("rows", [ROW, ROWS], ids=["row", "batch"])
def test_criteria_get_the_scores_that_transformers_gives_them(of: SpeculativeModel, rows: dict[str, Tensor]) -> None:
    how = {"max_new_tokens": 9, "return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.3}
    actual, expected = same_calls(of, rows, "c", len(rows["input_ids"]), **how)
    assert torch.equal(actual.sequences, expected.sequences) and len(actual.scores) == len(expected.scores)
    longest = max(1 + sum(lengths) for lengths in actual.accept_lengths)
    assert longest == actual.sequences.shape[1] - rows["input_ids"].shape[1], "what was written past the end is not counted"


@pytest.mark.parametrize("names", ["p", "pu", "c"])
@pytest.mark.parametrize("rows", [ROW, ROWS], ids=["row", "batch"])
def test_beams_too(of: SpeculativeModel, rows: dict[str, Tensor], names: str) -> None:
    how = {"max_new_tokens": 8, "num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    actual, expected = same_calls(of, rows, names, 6 * len(rows["input_ids"]), **how)
    assert torch.equal(actual.sequences, expected.sequences) and torch.equal(actual.beam_indices, expected.beam_indices)


@pytest.mark.parametrize("rows", [ROW, ROWS], ids=["row", "batch"])
def test_sampled_texts_are_those_without_drafts(of: SpeculativeModel, rows: dict[str, Tensor]) -> None:
    how = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "seed": 3, "tree": TreeShape(12, 4)}
    for names in ("p", "c", "pc"):
        count = len(rows["input_ids"])
        plain, drafted = (say(of, rows, speculate=one, **how, **options(names, count, Log())) for one in (False, True))
        assert torch.equal(plain, drafted)
        allowed = [{(11 * step + 7 * i + 3 * row) % VOCAB for i in range(6)} for step in range(1, 13) for row in range(count)]
        if names == "p":
            assert all(int(plain[i % count, rows["input_ids"].shape[1] + i // count]) in one for i, one in enumerate(allowed))


def stateful_prefix() -> Callable[[int, Tensor], list[int]]:
    calls = [0]

    def allowed(batch_id: int, ids: Tensor) -> list[int]:
        calls[0] += 1
        return [(calls[0] * 5 + batch_id + i) % VOCAB for i in range(4)]

    return allowed


@pytest.mark.parametrize("rows", [ROW, ROWS], ids=["row", "batch"])
def test_what_keeps_a_state_inside_transformers(of: SpeculativeModel, rows: dict[str, Tensor]) -> None:
    watermark = transformers.SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=2)
    for given in (
        lambda: {"guidance_scale": 1.5},
        lambda: {"guidance_scale": 1.5, "num_beams": 2},
        lambda: {"watermarking_config": watermark, "num_beams": 2},
        lambda: {"prefix_allowed_tokens_fn": stateful_prefix()},
        lambda: {"prefix_allowed_tokens_fn": stateful_prefix(), "num_beams": 3},
    ):
        how = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(say(of, rows, **how, **given()), of.backbone.model.generate(**rows, **how, **given())), given()
    how = {"do_sample": True, "seed": 1, "max_new_tokens": 8, "watermarking_config": watermark}
    assert torch.equal(say(of, rows, **how), say(of, rows, speculate=False, **how))


@headstart.stateless
class Even(LogitsProcessor):
    """Prefers even tokens after odd ones; keeps no state."""

    asked = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.asked += 1
        return scores.double() + 3.0 * ((input_ids[:, -1:] + torch.arange(VOCAB)) % 2)  # of any dtype


def test_what_keeps_no_state_goes_with_trees(of: SpeculativeModel, caplog: pytest.LogCaptureFixture) -> None:
    how = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "tree": TreeShape(20, 6)}
    undeclared = type("Undeclared", (LogitsProcessor,), {"__call__": Even.__call__, "asked": 0})
    for rows in (ROW, ROWS):
        expected = of.backbone.model.generate(**rows, max_new_tokens=24, do_sample=False, logits_processor=LogitsProcessorList([Even()]))
        fast = say(of, rows, **how, logits_processor=LogitsProcessorList([Even()]))
        assert torch.equal(fast.sequences, expected) and max(fast.nodes) == 20
        with caplog.at_level(logging.WARNING):
            slow = say(of, rows, **how, logits_processor=LogitsProcessorList([undeclared()]))
        assert torch.equal(slow.sequences, expected) and set(slow.nodes) == {1}
    said = [record.getMessage() for record in caplog.records if "Undeclared" in record.getMessage()]
    assert len(said) == 1 and "headstart.stateless" in said[0] and "rollback" in said[0] and "\n" not in said[0]
    even = headstart.stateless(lambda ids, scores: Even()(ids, scores))  # a function, and an instance, may be declared too
    assert torch.equal(say(of, ROW, **how, logits_processor=[even]).sequences, say(of, ROW, **how, logits_processor=[Even()]).sequences)


def test_a_criterion_for_the_end_token_of_the_users_own() -> None:
    """As transformers looks for it: by the attribute ``eos_token_id``, which makes it pad the rows that have ended."""

    class Twice(EosTokenCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return (input_ids[:, 9:, None] == self.eos_token_id).any(-1).sum(1) >= 2

    of = SpeculativeModel(Backbone(tiny("llama")), random_drafter("medusa", Backbone(tiny("llama"))))
    how = {"max_new_tokens": 30, "do_sample": False, "stopping_criteria": StoppingCriteriaList([Twice(torch.arange(0, VOCAB, 4))])}
    assert torch.equal(say(of, ROWS, pad_token_id=60, **how), of.backbone.model.generate(**ROWS, pad_token_id=60, **how))


def test_rows_one_after_another_are_refused_where_all_are_asked_about(of: SpeculativeModel) -> None:
    for names, named in (("p", "Stepping"), ("c", "Counting"), ("s", "Streaming")):
        with pytest.raises(UserError, match=f"{named} is asked about all 3 rows together, and batch_size=2 decodes them one after another"):
            say(of, ROWS, max_new_tokens=4, batch_size=2, **options(names, 3, Log()))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("declared", [False, True])
def test_a_processor_that_returns_fewer_scores_is_named(of: SpeculativeModel, declared: bool, sample: bool) -> None:
    class Fewer(LogitsProcessor):
        stateless = declared

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            return scores[:, :50] if input_ids.shape[1] < 12 else None

    for row, gave in ((ROW, rf"scores of shape \[\d, 50\] for scores of shape \[\d, {VOCAB}\]"), (ROWS, "scores of shape")):
        with pytest.raises(UserError, match=f"Fewer returned {gave}.*; return as many, -inf for what it rules out"):
            say(of, row, max_new_tokens=8, do_sample=sample, logits_processor=[Fewer()])
    longer = {name: torch.cat([value, value], 1) for name, value in ROW.items()}
    with pytest.raises(UserError, match="Fewer returned NoneType for scores of shape"):
        say(of, longer, max_new_tokens=8, do_sample=sample, logits_processor=[Fewer()])
