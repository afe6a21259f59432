"""Measuring: tau equals that of decoding, the model's own sampling settings have no effect, the verdict."""

import time

import pytest
import torch
from families import tiny
from transformers import GenerationConfig

from headstart.chat.prompts import Prompt
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.methods import build_drafter
from headstart.inference.bench.bench import Plan, compare
from headstart.inference.bench.systems import HeadstartSystem
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, continue_by_transformers, continue_text, measure_tau
from headstart.inference.steps import Tally
from headstart.support.errors import UserError

PROMPTS = [torch.arange(3, 9), torch.arange(20, 31)]


@pytest.fixture(scope="module")
def heads() -> SpeculativeModel:
    torch.manual_seed(0)
    backbone = Backbone(tiny("llama"))
    return SpeculativeModel(backbone, build_drafter("medusa", backbone, {"depth": 3}).eval())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tau_is_what_decoding_says(heads, temperature):
    tree = TreeShape(nodes=10, width=4)
    settings = Settings(30, temperature, tree=tree)
    one, two = (continue_text(heads, prompt, settings, seed) for prompt, seed in zip(PROMPTS, (5, 6), strict=True))
    alone = measure_tau(heads, PROMPTS[:1], max_new_tokens=30, temperature=temperature, seed=5, tree=tree)
    assert alone["tau"] == pytest.approx(one.tau)
    assert alone["acceptance_per_depth"] == pytest.approx(one.acceptance_per_depth)
    both = measure_tau(heads, PROMPTS, max_new_tokens=30, temperature=temperature, seed=5, tree=tree)
    assert (both["tokens"], both["passes"]) == (60, one.passes + two.passes)
    assert both["tau"] == pytest.approx(58 / both["passes"])  # the first token of each sequence comes from the prefill
    assert len(both["acceptance_per_depth"]) == 3


def test_plain_decoding_is_one_token_a_pass(heads):
    measured = measure_tau(SpeculativeModel(heads.backbone), PROMPTS, max_new_tokens=8)
    assert measured == {"tau": 1.0, "acceptance_per_depth": [], "tokens": 16, "passes": 14}
    assert measure_tau(heads, PROMPTS, max_new_tokens=1)["tau"] == 1.0  # no pass after the prefill


def test_decoding_is_timed_from_the_first_token_on(heads, capsys):
    """A prefill that takes long counts in one speed and not in the other, for transformers as here; results are said as they come."""
    backbone, forward = heads.backbone, heads.backbone.base.forward

    def slow(*args, **given):
        ids = given.get("input_ids", args[0] if args else None)
        time.sleep(0.3 * (ids.shape[1] > 4))
        return forward(*args, **given)

    backbone.base.forward = slow
    try:
        drafting = SpeculativeModel(backbone, heads.drafter, capture="off")
        report = compare([("m", drafting)], [Prompt(PROMPTS[1])], Plan(6, tree=TreeShape(2, 1)))
    finally:
        del backbone.base.forward
    rows = [*report["baselines"], *report["results"]]
    assert [row["tokens"] for row in rows] == [6, 6, 6]
    for row in rows:
        spent = 6 / row["tokens_per_second"] - 5 / row["decode_tokens_per_second"]
        assert 0.3 <= spent < 0.6, row
        assert row["tasks"][""]["decode_tokens_per_second"] == row["decode_tokens_per_second"]
    said = capsys.readouterr().err
    assert all(f"temperature 0: {row.get('head', row.get('name'))}: tau {row['tau']:.2f}, " in said for row in rows)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_models_own_sampling_settings_do_not_sneak_in(heads, temperature):
    model, settings = heads.backbone.model, Settings(20, temperature)
    before = continue_text(heads, PROMPTS[0], settings, 3).sequences, continue_by_transformers(model, PROMPTS[:1], settings, 3).sequences
    original = model.generation_config
    odd = GenerationConfig(do_sample=True, temperature=0.1, top_k=2, top_p=0.5, repetition_penalty=3.0, max_length=7)
    try:
        model.generation_config = odd
        after = continue_text(heads, PROMPTS[0], settings, 3).sequences, continue_by_transformers(model, PROMPTS[:1], settings, 3).sequences
        assert model.generation_config is odd
    finally:
        model.generation_config = original
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert temperature or torch.equal(before[0], before[1])


def test_nothing_to_measure_on(heads):
    with pytest.raises(UserError, match="no prompts"):
        measure_tau(heads, [], max_new_tokens=4)


def test_parts_of_a_pass_timed_by_themselves(heads):
    parts = HeadstartSystem("medusa", heads).time_parts([{0: PROMPTS[0]}, {1: PROMPTS[1]}], Settings(6), 0)
    assert parts.tokens == 12 and all(time > 0 for time in parts.milliseconds().values())
    assert Tally().milliseconds() == {"draft_ms": 0.0, "verify_ms": 0.0, "host_ms": 0.0}
