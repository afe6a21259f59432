"""transformers' front door: what a user may pass to ``model.generate(custom_generate=heads.generate)`` does what it does there.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

import copy
import string
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import (
    DRAFTERS,
    FAMILIES,
    VOCAB,
    Scripted,
    backbone,
    build,
    heads,
    left_padded,
    prompts,
    random_drafter,
    say,
    texts,
    tiny,
    unpadded,
)
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList, TextStreamer

import headstart
from headstart.heads.backbone import Backbone
from headstart.heads.errors import UserError
from headstart.inference.heads import Heads
from headstart.inference.tree import TreeShape

LENGTH = 25


def own(of: Heads, rows: dict[str, Tensor], **options: Any) -> Any:
    """transformers' own generate."""
    rows = {"attention_mask": torch.ones_like(rows["input_ids"])} | rows
    return of.backbone.model.generate(**rows, **options)


@pytest.fixture(scope="module")
def row() -> dict[str, Tensor]:
    return {"input_ids": prompts((9,))[0][None]}


@pytest.fixture(scope="module")
def truth(row: dict[str, Tensor]) -> list[int]:
    """What the tiny Llama says to it, greedily."""
    return backbone("llama").model.generate(row["input_ids"], max_new_tokens=60, do_sample=False)[0].tolist()


@pytest.fixture(scope="module")
def oracle(truth: list[int]) -> Heads:
    """Heads that accept runs of five, so that every way to stop is met in the middle of one."""
    return Heads(backbone("llama"), Scripted(backbone("llama"), [truth], "oracle"))


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 24])
def test_lengths(oracle: Heads, row: dict[str, Tensor], truth: list[int], count: int) -> None:
    assert say(oracle, row, max_new_tokens=count)[0].tolist() == truth[: 9 + count]
    assert say(oracle, row, max_length=9 + count)[0].tolist() == truth[: 9 + count]


def test_eos(oracle: Heads, row: dict[str, Tensor], truth: list[int]) -> None:
    for place in range(10, 24):
        for eos in (truth[place], [60, truth[place], truth[place + 1]]):
            found = say(oracle, row, max_new_tokens=30, eos_token_id=eos)
            assert torch.equal(found, own(oracle, row, max_new_tokens=30, eos_token_id=eos))
            assert found.shape[1] <= place + 1


def test_eos_of_the_generation_config(row: dict[str, Tensor], truth: list[int]) -> None:
    model = tiny("llama")
    model.generation_config.eos_token_id = [truth[14], 3]
    of = Heads(Backbone(model), None)
    assert torch.equal(say(of, row, max_new_tokens=30), own(of, row, max_new_tokens=30))


def test_rows_end_each_in_its_time() -> None:
    rows = left_padded(prompts())
    of = heads("llama", "eagle3")
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": [1, 9, 15, 20, 33], "pad_token_id": 60, "do_sample": False}
    found, theirs = unpadded(say(of, rows, **options), rows), unpadded(own(of, rows, **options), rows)
    assert found == theirs and len({text.index(60) if 60 in text else -1 for text in found}) > 2


class After(StoppingCriteria):
    """Stops a row when it has so many tokens; notes the lengths it saw."""

    def __init__(self, length: int) -> None:
        self.length, self.seen = length, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("length", range(10, 18))
def test_a_criterion_may_stop_in_the_middle_of_a_run(oracle: Heads, row: dict[str, Tensor], truth: list[int], length: int) -> None:
    criterion = After(length)
    out = say(oracle, row, max_new_tokens=30, stopping_criteria=StoppingCriteriaList([criterion]), return_dict_in_generate=True)
    assert out.sequences[0].tolist() == truth[:length]
    assert criterion.seen == list(range(10, length + 1)), "it is asked after every token and not once more"
    assert out.tau == ((length - 10) / out.passes if out.passes else 1.0)


def test_max_time(row: dict[str, Tensor]) -> None:
    class Slow(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            time.sleep(0.002)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    found = say(heads("llama", "medusa"), row, max_new_tokens=230, max_time=0.05, stopping_criteria=StoppingCriteriaList([Slow()]))
    assert 1 <= found.shape[1] - 9 < 60


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One letter or digit a token."""
    letters = dict(zip(string.ascii_letters + string.digits, range(VOCAB), strict=False))
    made = Tokenizer(models.BPE(letters, []))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("place", range(10, 18))
def test_stop_strings(oracle: Heads, row: dict[str, Tensor], truth: list[int], tokenizer: PreTrainedTokenizerFast, place: int) -> None:
    stop = [tokenizer.decode(truth[place : place + 2]), tokenizer.decode(truth[place + 3 : place + 6])]
    options: dict[str, Any] = {"max_new_tokens": 30, "stop_strings": stop, "tokenizer": tokenizer}
    found = say(oracle, row, **options)
    assert torch.equal(found, own(oracle, row, **options)) and found.shape[1] <= place + 2


def test_stop_strings_want_a_tokenizer(oracle: Heads, row: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        say(oracle, row, max_new_tokens=30, stop_strings=["."])


class Noted:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.got.append(value.clone())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_each_token_once(oracle: Heads, row: dict[str, Tensor], truth: list[int]) -> None:
    ours, theirs = Noted(), Noted()
    for options in ({}, {"eos_token_id": truth[20]}):
        ours, theirs = Noted(), Noted()
        text = say(oracle, row, max_new_tokens=LENGTH, streamer=ours, **options)
        own(oracle, row, max_new_tokens=LENGTH, streamer=theirs, **options)
        assert [x.tolist() for x in ours.got] == [x.tolist() for x in theirs.got] and ours.ended == theirs.ended == 1
        assert torch.cat([x.flatten() for x in ours.got]).tolist() == text[0].tolist()


def test_text_streams(
    oracle: Heads, row: dict[str, Tensor], truth: list[int], tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    say(oracle, row, max_new_tokens=LENGTH, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == tokenizer.decode(truth[9 : 9 + LENGTH])


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_scores_and_logits_are_transformers_own(sample: bool, rows: int) -> None:
    """Of a batch with padding. Sampled: step by step on the text that was drawn."""
    batch = left_padded(prompts((9, 4, 6)[:rows]))
    how: dict[str, Any] = {"do_sample": True, "top_k": 9, "temperature": 0.8} if sample else {"do_sample": False, "repetition_penalty": 1.4}
    options = how | {"output_scores": True, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 12}
    plain = say(Heads(backbone("llama")), batch, seed=1, max_new_tokens=12, **how)
    of = Heads(backbone("llama"), Scripted(backbone("llama"), unpadded(plain, batch), "nearly"))
    out = say(of, batch, seed=1, **options)
    assert torch.equal(out.sequences, plain) and len(out.scores) == len(out.logits) == 12
    if not sample:
        theirs = own(of, batch, **options)
        assert torch.equal(out.sequences, theirs.sequences)
        for kind in ("scores", "logits"):
            for one, other in zip(out[kind], theirs[kind], strict=True):
                torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)
        return
    for i in range(12):   # each step from the text before it
        before = {"input_ids": out.sequences[:, : batch["input_ids"].shape[1] + i]}
        before["attention_mask"] = torch.nn.functional.pad(batch["attention_mask"], (0, i), value=1)
        theirs = own(of, before, **options | {"max_new_tokens": 1})
        torch.testing.assert_close(out.scores[i], theirs.scores[0], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(out.logits[i], theirs.logits[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_tau_is_what_it_says(kind: str) -> None:
    """Tokens after the first, by passes; and one more than the sum of the acceptances. One row, so that every pass is the row's."""
    family, row = "llama", {"input_ids": prompts((9,))[0][None]}
    first = say(heads(family, kind), row, max_new_tokens=40, do_sample=False)
    scripted = Heads(backbone(family), Scripted(backbone(family), first.tolist(), "nearly"))
    for of in (heads(family, kind), scripted):
        out = say(of, row, max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
        assert out.tau == pytest.approx(39 / out.passes) and out.tau == pytest.approx(1 + sum(out.acceptance_per_depth))
        assert len(out.acceptance_per_depth) == of.drafter.depth
        assert out.acceptance_per_depth == sorted(out.acceptance_per_depth, reverse=True)
        assert set(out.seconds) == {"draft", "verify", "host"} and all(part >= 0 for part in out.seconds.values())
    assert out.tau > 1.5


def test_seeds() -> None:
    of, ids = heads("llama", "eagle3"), prompts((9,))[0][None].expand(3, -1)
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
    assert say(of, {"input_ids": ids[:1]}, num_return_sequences=2, seed=4, **options).tolist() == say(of, rows, seed=4, **options)[:2].tolist()
    with pytest.raises(ValueError, match="2 entries for 3 rows"):
        say(of, rows, seed=[1, 2], **options)


def test_greedy_ignores_seeds_and_draws_nothing() -> None:
    of, row = heads("llama", "medusa"), {"input_ids": prompts((9,))[0][None]}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(say(of, row, max_new_tokens=9, do_sample=False, seed=1), say(of, row, max_new_tokens=9, do_sample=False))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "options,named",
    [
        ({"num_beams": 3}, "num_beams"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha|contrastive"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"do_sample": True, "seed": [1, 2, 3]}, "seed"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0]])}, "left"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1, 1]])}, "left"),
        ({"watermarking_config": transformers.SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=2), "do_sample": True}, "SynthID"),
    ],
)
def test_refusals(row: dict[str, Tensor], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        say(heads("llama", "medusa"), row | options, max_new_tokens=9)


def test_more_refusals(row: dict[str, Tensor]) -> None:
    of = heads("llama", "eagle3")
    ids = row["input_ids"]
    with pytest.raises(ValueError, match="assistant_model"):
        say(of, row, max_new_tokens=9, assistant_model=tiny("llama", num_hidden_layers=1))
    with pytest.raises(ValueError, match="input_ids"):
        say(of, {"inputs_embeds": of.backbone.embed(ids)}, max_new_tokens=9)
    past = DynamicCache()
    of.backbone.model(ids[:, :5], past_key_values=past)
    with pytest.raises(ValueError, match="past_key_values"):
        say(of, row, max_new_tokens=9, past_key_values=past)
    with pytest.raises(ValueError, match="batch of 2"):
        say(of, left_padded(prompts((9, 4))), max_new_tokens=9, streamer=Noted())
    with pytest.raises(ValueError, match="another model"):
        other = tiny("llama")
        other.generate(ids, custom_generate=of.generate, max_new_tokens=9)
    for options in ({"encoder_repetition_penalty": 2.0}, {"encoder_no_repeat_ngram_size": 2}, {"prefix_allowed_tokens_fn": lambda b, ids: [1, 2]}):
        with pytest.raises(UserError, match="row"):
            say(of, left_padded(prompts((9, 4))), max_new_tokens=9, **options)
    assert say(of, row, max_new_tokens=9, past_key_values=DynamicCache()).shape == (1, 18), "an empty cache is no reason to refuse"


def test_models_that_cannot_be_backbones() -> None:
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
    with pytest.raises(UserError, match="encoder-decoder"):
        headstart.load(None, transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))
    linear = {"num_experts": 4, "num_experts_per_tok": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "head_dim": 8}
    with pytest.raises(UserError, match="linear_attention"):
        headstart.load(None, build("Qwen3Next", {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4} | linear))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_stays_usable(family: str, tmp_path: Path) -> None:
    """Its own generate, its own streamers, copies and saving are as they were."""
    model, fresh = tiny(family), tiny(family)
    rows = left_padded(prompts())
    before = fresh.generate(**rows, max_new_tokens=12, do_sample=False)
    of = Heads(Backbone(model), None)
    Heads(of.backbone, random_drafter("eagle3", of.backbone))   # twice on one model
    say(of, rows, max_new_tokens=5)
    assert torch.equal(model.generate(**rows, max_new_tokens=12, do_sample=False), before)
    torch.manual_seed(0)
    sampled = model.generate(**rows, max_new_tokens=12, do_sample=True)
    torch.manual_seed(0)
    assert torch.equal(fresh.generate(**rows, max_new_tokens=12, do_sample=True), sampled)
    streamer = Noted()
    model.generate(prompts()[0][None], max_new_tokens=5, streamer=streamer)
    assert len(streamer.got) == 6
    assisted = model.generate(prompts()[0][None], max_new_tokens=12, do_sample=False, assistant_model=fresh)
    assert torch.equal(assisted, fresh.generate(prompts()[0][None], max_new_tokens=12, do_sample=False))
    assert torch.equal(copy.deepcopy(model).generate(**rows, max_new_tokens=12, do_sample=False), before)
    model.save_pretrained(tmp_path)


def test_a_copy_of_the_model_takes_heads_of_its_own() -> None:
    model = tiny("llama")
    Heads(Backbone(model), None)
    twin = copy.deepcopy(model)
    streamer = Noted()
    of = Heads(Backbone(twin), None)
    say(of, {"input_ids": prompts()[0][None]}, max_new_tokens=5, streamer=streamer)
    assert len(streamer.got) == 6


def test_gpt2_near_its_last_position() -> None:
    """96 positions. Up to the last one, by length; and asked for more, but ended there by a criterion."""
    on, row = backbone("gpt2"), {"input_ids": texts(1, 80)}
    truth = on.model.generate(**row, max_length=96, do_sample=False)
    for kind in (*DRAFTERS, "oracle"):
        of = heads("gpt2", kind) if kind in DRAFTERS else Heads(on, Scripted(on, truth.tolist(), "oracle"))
        for length in (94, 95, 96):
            assert torch.equal(say(of, row, max_length=length, do_sample=False), truth[:, :length])
            stop = StoppingCriteriaList([After(length)])
            assert torch.equal(say(of, row, max_new_tokens=200, do_sample=False, stopping_criteria=stop), truth[:, :length])


def test_past_the_stated_context() -> None:
    """Rotary models go on past it, and so must trees on them."""
    model = tiny("llama", max_position_embeddings=24)
    row = {"input_ids": texts(1, 12)}
    truth = model.generate(**row, max_new_tokens=30, do_sample=False)
    of = Heads(Backbone(model), Scripted(Backbone(model), truth.tolist(), "nearly"))
    assert torch.equal(say(of, row, max_new_tokens=30, do_sample=False), truth)


@pytest.mark.parametrize(
    "options,tau",
    [
        ({"tree": TreeShape(3, 1, 2)}, 3),
        ({"tree": TreeShape(200, 61)}, 5),
        ({"tree": TreeShape(1)}, 1),
        ({"tree": TreeShape(5, 1, 99)}, 5),
        ({"speculate": False}, 1),
        ({"timed": True}, 5),
    ],
)
def test_trees_and_plain_decoding(oracle: Heads, row: dict[str, Tensor], truth: list[int], options: dict[str, Any], tau: int) -> None:
    """30 tokens after the first are whole passes of 1, 3 and 5."""
    out = say(oracle, row, max_new_tokens=31, return_dict_in_generate=True, **options)
    assert out.sequences[0].tolist() == truth[:40] and out.tau == tau and out.passes == 30 // tau
