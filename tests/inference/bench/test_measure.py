"""Measuring: tau equals that of decoding, the model's own sampling settings have no effect, the verdict."""

import io
import re
import time
from pathlib import Path

import pytest
import torch
from families import Scripted, backbone, prompts, tiny
from transformers import GenerationConfig

from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.chat.prompts import Prompt
from headstart.heads.methods import build_drafter
from headstart.inference.bench.bench import Plan, compare
from headstart.inference.bench.systems import HeadstartSystem
from headstart.inference.bench.table import print_report, report_page
from headstart.inference.measure import Settings, continue_by_transformers, continue_text, continue_texts, measure_tau
from headstart.inference.steps import Tally
from headstart.serving.verify.drafts import Round, Transcript, acceptance
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
        time.sleep(0.2 * (ids.shape[1] > 4))
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
        assert 0.2 <= spent < 0.5, row
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


DEPTH, NEW = 4, 15
CHAIN = TreeShape(nodes=DEPTH + 1, width=1, depth=DEPTH)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "serving.md"


def ahead(temperature: float) -> list[list[int]]:
    """What the backbone writes after each prompt, further than the measured texts go."""
    alone = SpeculativeModel(backbone("llama"), capture="off")
    rows = [continue_texts(alone, [ids_T], Settings(NEW + DEPTH + 1, temperature), [i]).sequences[0] for i, ids_T in enumerate(prompts())]
    return [row.tolist() for row in rows]


def as_an_engine(drafter: Scripted, truth: list[int], prompt: int) -> Transcript:
    """A loop without Headstart's decoder: chains of `DEPTH` to the very end of the text, each compared with the truth."""
    rounds, position = [], prompt + 1
    while position < prompt + NEW:
        drafts = tuple(int(drafter.guess(truth[: position - 1], k).argmax()) for k in range(DEPTH))
        same = [draft == true for draft, true in zip(drafts, truth[position : position + DEPTH], strict=True)]
        rounds.append(Round(position, drafts, [*same, False].index(False)))
        position += rounds[-1].kept + 1
    return Transcript(tuple(truth[:prompt]), tuple(truth[prompt : prompt + NEW]), tuple(rounds))


def test_a_chain_is_counted_as_an_engine_counts_it():
    truths = ahead(0.0)
    drafter = Scripted(backbone("llama"), truths, "nearly", DEPTH)
    expected = [as_an_engine(drafter, truth, len(ids_T)) for truth, ids_T in zip(truths, prompts(), strict=True)]
    asked = [Prompt(ids_T) for ids_T in prompts()]
    report = compare([("a", SpeculativeModel(drafter.backbone, drafter, capture="off"))], asked, Plan(NEW, tree=CHAIN, batches=(1, 3)))
    kept, counted = [one.kept for text in expected for one in text.rounds], acceptance(expected)
    out = io.StringIO()
    print_report(report, out)
    for row, setting in zip(report["results"], ("a at temperature 0", "a at temperature 0, batch 3"), strict=True):
        assert row["mean_acceptance_length"] == pytest.approx(counted["mean_acceptance_length"]) == pytest.approx(1 + sum(kept) / len(kept))
        assert row["acceptance_rate_per_pos"] == pytest.approx(counted["acceptance_rate_per_pos"])
        assert row["draft_acceptance_rate"] == pytest.approx(sum(kept) / (DEPTH * len(kept)))
        assert row["tau"] == pytest.approx(counted["tau"]) and row["tau"] < row["mean_acceptance_length"] - 0.1  # texts end inside a pass
        assert row["tasks"][""]["mean_acceptance_length"] == row["mean_acceptance_length"]
        note = f"as vLLM counts it: {setting}: mean acceptance length {row['mean_acceptance_length']:.3f}"
        assert note in out.getvalue() and note in report_page(report)
    assert not any("mean_acceptance_length" in one for one in report["baselines"])


def test_trees_and_proposals_that_drafted_nothing():
    truths = ahead(0.9)
    drafter = Scripted(backbone("llama"), truths, "oracle", DEPTH)
    heads, settings = SpeculativeModel(drafter.backbone, drafter, capture="off"), Settings(NEW, 0.9, tree=TreeShape(nodes=6, width=2))
    tally = continue_texts(heads, prompts(), settings, list(range(5))).tally
    assert tally.engine_counts()["mean_acceptance_length"] >= tally.tau > 3
    assert tally.draft_tokens <= 5 * tally.drafts and tally.drafts == tally.row_passes
    plain = continue_texts(SpeculativeModel(drafter.backbone, capture="off"), prompts(), Settings(NEW), [0] * 5).tally
    assert plain.engine_counts() == {"mean_acceptance_length": None, "acceptance_rate_per_pos": [], "draft_acceptance_rate": None}


def test_a_chain_stays_within_the_positions_of_the_model():
    on = backbone("gpt2")  # 96 learned positions
    ids_T = torch.arange(1, 58)
    alone = continue_texts(SpeculativeModel(on), [ids_T], Settings(39), [0]).sequences[0]
    oracle = SpeculativeModel(on, Scripted(on, [alone.tolist()], "oracle", DEPTH))
    output = continue_texts(oracle, [ids_T], Settings(39, tree=CHAIN), [0])
    assert torch.equal(output.sequences[0], alone) and output.drafted[0][-1] < DEPTH


def test_the_worked_example_of_the_page():
    section = PAGE.read_text("utf-8").split("## How acceptance is counted")[1].split("\n## ")[0]
    rows = [[int(cell) for cell in cells] for cells in re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", section, re.MULTILINE)]
    kept, written, tokens = [row[2] for row in rows], [row[3] for row in rows], 1 + sum(row[3] for row in rows)
    starts = [1 + sum(kept[:i]) + i for i in range(len(rows))]
    rounds = tuple(Round(start, (0,) * row[1], row[2]) for start, row in zip(starts, rows, strict=True))
    text = [Transcript((), (0,) * tokens, rounds)]
    assert [min(one.kept + 1, tokens - one.position) for one in rounds] == written and written[-1] < kept[-1] + 1
    per_position = " ".join(f"{share:.2f}" for share in acceptance(text)["acceptance_rate_per_pos"])
    per_depth = " ".join(f"{sum(count > depth + 1 for count in written) / len(written):.2f}" for depth in range(rows[0][1]))
    found = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\d. %]+) \|$", section, re.MULTILINE))
    assert found == {
        "tau": f"{acceptance(text)['tau']:.2f}",
        "acceptance_per_depth": per_depth,
        "mean_acceptance_length": f"{acceptance(text)['mean_acceptance_length']:.2f}",
        "acceptance_rate_per_pos": per_position,
        "draft_acceptance_rate": f"{sum(kept) / sum(row[1] for row in rows):.1%}".replace("%", " %"),
        "spec_accept_length": f"{tokens / len(rows):.2f}",
    }
