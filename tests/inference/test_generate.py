"""The options a user may pass to ``model.generate(custom_generate=heads.generate)`` behave as in transformers."""

from typing import Any

import pytest
import torch
from arguments import tokenizer
from families import DRAFTERS, ROW, Noted, Scripted, backbone, heads, left_padded, prompts, say, texts, tiny, unpadded
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from headstart import Backbone, SpeculativeModel, TreeShape

LENGTH = 25


def own(of: SpeculativeModel, rows: dict[str, Tensor], **options: Any) -> Any:
    rows = {"attention_mask": torch.ones_like(rows["input_ids"])} | rows
    return of.backbone.model.generate(**rows, **options)


@pytest.fixture(scope="module")
def truth() -> list[int]:
    """Greedy output of the tiny Llama."""
    return backbone("shallow").model.generate(ROW["input_ids"], max_new_tokens=60, do_sample=False)[0].tolist()


@pytest.fixture(scope="module")
def oracle(truth: list[int]) -> SpeculativeModel:
    """Heads that accept five drafts at a time, so that every stopping condition occurs in the middle of an accepted run."""
    return SpeculativeModel(backbone("shallow"), Scripted(backbone("shallow"), [truth], "oracle"))


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 24])
def test_lengths(oracle: SpeculativeModel, truth: list[int], count: int) -> None:
    assert say(oracle, ROW, max_new_tokens=count)[0].tolist() == truth[: 9 + count]
    assert say(oracle, ROW, max_length=9 + count)[0].tolist() == truth[: 9 + count]


def test_eos(oracle: SpeculativeModel, truth: list[int]) -> None:
    for place in range(10, 24):
        for eos in (truth[place], [60, truth[place], truth[place + 1]]):
            output = say(oracle, ROW, max_new_tokens=30, eos_token_id=eos)
            assert torch.equal(output, own(oracle, ROW, max_new_tokens=30, eos_token_id=eos))
            assert output.shape[1] <= place + 1


class After(StoppingCriteria):
    """Stops a row once it has ``length`` tokens; records the lengths it saw."""

    def __init__(self, length: int) -> None:
        self.length, self.seen = length, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("length", range(10, 18))
def test_a_criterion_may_stop_in_the_middle_of_a_run(oracle: SpeculativeModel, truth: list[int], length: int) -> None:
    criterion = After(length)
    out = say(oracle, ROW, max_new_tokens=30, stopping_criteria=StoppingCriteriaList([criterion]), return_dict_in_generate=True)
    assert out.sequences[0].tolist() == truth[:length]
    assert criterion.seen == list(range(10, length + 1)), "it is asked after every token and not once more"
    assert out.tau == ((length - 10) / out.passes if out.passes else 1.0)


def test_max_time() -> None:
    """230 passes take far longer than a hundredth of a second."""
    output = say(heads("shallow", "medusa"), ROW, max_new_tokens=230, max_time=0.01)
    assert 1 <= output.shape[1] - 9 < 200


@pytest.mark.parametrize("place", range(10, 18))
def test_stop_strings(oracle: SpeculativeModel, truth: list[int], place: int) -> None:
    letters = tokenizer()
    stop = [letters.decode(truth[place : place + 2]), letters.decode(truth[place + 3 : place + 6])]
    options: dict[str, Any] = {"max_new_tokens": 30, "stop_strings": stop, "tokenizer": letters}
    output = say(oracle, ROW, **options)
    assert torch.equal(output, own(oracle, ROW, **options)) and output.shape[1] <= place + 2


def test_a_streamer_gets_each_token_once(oracle: SpeculativeModel, truth: list[int]) -> None:
    actual, expected = Noted(), Noted()
    for options in ({}, {"eos_token_id": truth[20]}):
        actual, expected = Noted(), Noted()
        text = say(oracle, ROW, max_new_tokens=LENGTH, streamer=actual, **options)
        own(oracle, ROW, max_new_tokens=LENGTH, streamer=expected, **options)
        assert [x.tolist() for x in actual.got] == [x.tolist() for x in expected.got] and actual.ended == expected.ended == 1
        assert torch.cat([x.flatten() for x in actual.got]).tolist() == text[0].tolist()


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_scores_and_logits_are_transformers_own(sample: bool, rows: int) -> None:
    """A batch with padding. Sampled scores are compared step by step along the drawn sequence."""
    batch = left_padded(prompts((9, 4, 6)[:rows]))
    how: dict[str, Any] = {"do_sample": True, "top_k": 9, "temperature": 0.8} if sample else {"do_sample": False, "repetition_penalty": 1.4}
    options = how | {"output_scores": True, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 12}
    plain = say(SpeculativeModel(backbone("shallow")), batch, seed=1, max_new_tokens=12, **how)
    of = SpeculativeModel(backbone("shallow"), Scripted(backbone("shallow"), unpadded(plain, batch), "nearly"))
    out = say(of, batch, seed=1, **options)
    assert torch.equal(out.sequences, plain) and len(out.scores) == len(out.logits) == 12
    if not sample:
        expected = own(of, batch, **options)
        assert torch.equal(out.sequences, expected.sequences)
        for kind in ("scores", "logits"):
            for one, other in zip(out[kind], expected[kind], strict=True):
                torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)
        return
    for i in range(12):  # each step from the sequence so far
        before = {"input_ids": out.sequences[:, : batch["input_ids"].shape[1] + i]}
        before["attention_mask"] = torch.nn.functional.pad(batch["attention_mask"], (0, i), value=1)
        expected = own(of, before, **options | {"max_new_tokens": 1})
        torch.testing.assert_close(out.scores[i], expected.scores[0], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(out.logits[i], expected.logits[0], atol=2e-4, rtol=1e-4)


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_tau_matches_its_definition(kind: str) -> None:
    """Tokens after the first per pass, and one more than the sum of the acceptance rates. A single row, so every pass is its own."""
    family = "llama"
    first = say(heads(family, kind), ROW, max_new_tokens=40, do_sample=False)
    scripted = SpeculativeModel(backbone(family), Scripted(backbone(family), first.tolist(), "nearly"))
    for of in (heads(family, kind), scripted):
        out = say(of, ROW, tree=TreeShape(), max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
        assert out.tau == pytest.approx(39 / out.passes) and out.tau == pytest.approx(1 + sum(out.acceptance_per_depth))
        assert len(out.acceptance_per_depth) == of.drafter.depth
        assert out.acceptance_per_depth == sorted(out.acceptance_per_depth, reverse=True)
        assert set(out.seconds) == {"draft", "verify", "host"} and all(part >= 0 for part in out.seconds.values())
    assert out.tau > 1.5


def test_seeds() -> None:
    of, ids = heads("shallow", "eagle3"), prompts((9,))[0][None].expand(3, -1)
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": LENGTH}
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(say(of, rows, **options))
    drawn.append(say(of, rows, **options))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])
    assert len({str(text) for text in drawn[0].tolist()}) == 3, "rows of one prompt differ"
    by_list = say(of, rows, seed=[4, 9, 4], **options)
    assert torch.equal(by_list[0], by_list[2]) and not torch.equal(by_list[0], by_list[1])
    assert torch.equal(say(of, rows, seed=4, **options)[0], by_list[0])
    several = say(of, {"input_ids": ids[:1]}, num_return_sequences=3, seed=[4, 9, 4], **options)
    assert torch.equal(several, by_list)
    twice = say(of, {"input_ids": ids[:1]}, num_return_sequences=2, seed=4, **options)
    assert torch.equal(twice, say(of, rows, seed=4, **options)[:2])
    with pytest.raises(ValueError, match="2 entries for 3 rows"):
        say(of, rows, seed=[1, 2], **options)


def test_past_the_stated_context() -> None:
    """Rotary models continue past it, and so must trees on them."""
    model = tiny("llama", max_position_embeddings=24)
    row = {"input_ids": texts(1, 12)}
    truth = model.generate(**row, max_new_tokens=30, do_sample=False)
    of = SpeculativeModel(Backbone(model), Scripted(Backbone(model), truth.tolist(), "nearly"))
    assert torch.equal(say(of, row, max_new_tokens=30, do_sample=False), truth)


@pytest.mark.parametrize("options,tau", [
    ({"tree": TreeShape(3, 1, 2)}, 3), ({"tree": TreeShape(200, 61)}, 5), ({"tree": TreeShape(1)}, 1),
    ({"tree": TreeShape(5, 1, 99)}, 5), ({"speculate": False}, 1), ({"timed": True, "tree": TreeShape()}, 5),
])  # fmt: skip
def test_trees_and_plain_decoding(oracle: SpeculativeModel, truth: list[int], options: dict[str, Any], tau: int) -> None:
    """The 30 tokens after the first are whole passes of 1, 3 or 5 tokens."""
    out = say(oracle, ROW, max_new_tokens=31, return_dict_in_generate=True, **options)
    assert out.sequences[0].tolist() == truth[:40] and out.tau == tau and out.passes == 30 // tau
