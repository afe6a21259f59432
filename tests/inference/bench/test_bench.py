"""Systems compared by `bench`: batches, transformers' assisted decoding, several turns, tasks, bandwidth, captures."""

import copy
import io
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch
from chat_templates import talker
from errors import error_of, refuses
from families import backbone, build, prompts, random_drafter, tiny
from transformers import GenerationConfig

from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.chat.prompts import Prompt, Prompter
from headstart.inference.bench import bench
from headstart.inference.bench.bench import Plan, Race, compare
from headstart.inference.bench.results import busy, memory_bandwidth, repeated_ngrams, weight_bytes
from headstart.inference.bench.systems import AR_TRANSFORMERS, LOOKUP, Continuations, OtherPrograms, TransformersSystem, load_assistant
from headstart.inference.bench.table import AR, capture_notes, conclusions, print_report, report_page, rows_at
from headstart.inference.capture.capture import CaptureReport
from headstart.inference.engine.suffix import SuffixProposer
from headstart.inference.measure import Settings, continue_text
from headstart.inference.steps import Tally

TREE = TreeShape(8, 3)
NAMED = {"backbone": "tiny", "prompts_files": ["p.jsonl"]}


@pytest.fixture(scope="module")
def heads() -> SpeculativeModel:
    on = backbone("shallow")
    return SpeculativeModel(on, random_drafter("medusa", on, depth=3))


def printed(report: dict) -> str:
    out = io.StringIO()
    print_report(report, out)
    return out.getvalue()


def asked(*lengths: int, task: str = "") -> list[Prompt]:
    return [Prompt(ids_T, task) for ids_T in prompts(lengths)]


def test_batches_give_every_row_what_it_gets_alone(heads):
    report = compare([("m", heads)], asked(5, 9, 3), Plan(10, (0.0, 0.8), tree=TREE, batches=(1, 2)))
    assert [(row["temperature"], row["batch"]) for row in report["results"]] == [(0.0, 1), (0.0, 2), (0.8, 1), (0.8, 2)]
    assert all(row["identical"] and row["tokens"] == 30 for row in report["results"])
    alone, together = report["results"][:2]
    assert together["passes"] < alone["passes"] and together["tau"] == pytest.approx(alone["tau"])
    ar = [row for row in report["baselines"] if row["name"] == AR]
    assert [row["identical"] for row in ar] == [None, True, None, True] and {row["tau"] for row in ar} == {1.0}
    assert {row["kind"] for row in report["baselines"]} == {"ar"} and [row["passes"] for row in ar[:2]] == [3 * 9, 2 * 9]
    titles = printed(report).splitlines()[3].split()
    assert report["verdict"] == "identical" and titles[:6] == ["temperature", "batch", "system", "accept", "len", "(tau)"]


def test_heads_are_measured_alone_and_in_fixed_trees_beside_their_proposers(heads):
    of = SpeculativeModel(heads.backbone, heads.drafter, proposers=[SuffixProposer()], capture="off")
    report = compare([("m", of)], asked(5, 9), Plan(8, also_alone=True, fixed_trees=(TREE, TREE)))
    measured = {row["head"]: (row["kind"], row["nodes"]) for row in report["results"]}
    kind = measured["m, alone"][0]
    assert measured == {"m": (f"{kind}+suffix", None), "m, alone": (kind, None), "m, fixed trees": (kind, TREE.nodes)}
    assert {row["logits"]["positions"] for row in report["results"]} == {report["baselines"][1]["teacher_forced"]["logits"]}, "AR runs once"


@pytest.mark.parametrize("given", [["--heads", "embedded"], ["--propose", "suffix"]])
def test_heads_alone_take_heads_and_something_to_leave_out(given, capsys):
    error = error_of(capsys, "bench", *given, "--prompts", "quickstart:prompts.jsonl", "--include-heads-only")
    assert error.startswith("error: --include-heads-only measures heads without what --propose, --draft-model or --early-exit adds; give")


def test_systems_take_turns_in_rounds_after_a_short_warm_up(heads, monkeypatch):
    order, now = [], [0.0]

    class Noted(TransformersSystem):
        def __init__(self, name, seconds):
            super().__init__(name, heads.backbone)
            self.seconds = seconds

        def write(self, prompts, settings, seeds):
            order.append((self.name, seeds[0]))
            now[0] += self.seconds
            return Continuations([ids_T[:2] for ids_T in prompts], Tally(texts=2 * len(prompts)))

    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    Noted.capture = CaptureReport("trace", None)
    fast, slow = Noted("fast", 0.1), Noted("slow", 8.0)
    race = Race(fast, [fast, slow], asked(*[3] * 6), Settings(4), 1, 0)
    results = race.run(None, rounds=3)
    assert order[:6] == [("fast", i) for i in range(4)] + [("slow", 0), ("slow", 1)], "a few prompts, and of slow systems fewer"
    turns = order[6:]
    assert sorted(turns) == sorted([(name, i) for name in ("fast", "slow") for i in range(6)] * 3)
    assert all({*map(str, turns[i : i + 2])} == {f"('fast', {i // 2 % 6})", f"('slow', {i // 2 % 6})"} for i in range(0, 36, 2))
    assert [name for name, _ in turns[:4]] == ["fast", "slow", "slow", "fast"] and turns[12][0] == "slow", "neither is always first"
    assert [len(one.rounds) for one in results.values()] == [3, 3] and results[slow].rounds[1].tokens == 12
    assert len(results[slow].sequences[0]) == 3, "every round's text is compared"
    Noted.capture = None
    Race(fast, [fast], asked(*[3] * 6), Settings(4), 1, 0)._warm_up()
    assert order[42:] == [("fast", 0)], "nothing is captured, so one is enough"


def test_speeds_are_medians_of_rounds_and_uncertain_ones_are_never_green(heads):
    report = compare([("m", heads)], asked(5, 9), Plan(6, tree=TREE, rounds=3))
    row = report["results"][0]
    assert report["rounds"] == len(row["rounds"]) == 3 and row["tokens"] == 36 and row["identical"]
    assert row["spread"] == [min(row["rounds"]), max(row["rounds"])] and row["speedup_vs_ar"] == sorted(row["rounds"])[1]
    steady = {"spread": [1.0, 1.05], "speedup_vs_ar": 1.0}
    report["baselines"] = [one | steady for one in report["baselines"]]
    idle = report | {"results": [row | steady], "other_programs": 0.05, "threads": 1, "processors": 2}
    assert busy(idle) is None and conclusions(idle | {"busy": None})[0][1] == "green"
    assert busy(idle | {"other_programs": 1.05}) is None, "a processor was free"
    taken = busy(idle | {"other_programs": 1.3})
    assert taken == "Speeds are uncertain: other programs used 1.3 of 2 processors meanwhile. Measure again when the machine is idle."
    varied = busy(idle | {"results": [row | {"spread": [0.28, 1.1], "speedup_vs_ar": 1.0}]})
    assert varied.startswith("Speeds are uncertain: m was 0.28 to 1.10 x AR in the same prompts. ")
    uncertain = idle | {"busy": taken}
    said, (verdict, style) = conclusions(uncertain)
    assert said == (taken, "bold red") and verdict.startswith("Every token") and style == ""
    shown = report_page(uncertain | NAMED)
    assert taken in printed(uncertain) and f'<p class="bold red">{taken}</p>' in shown and '<p class="green">' not in shown
    assert '<p class="green">' in report_page(idle | NAMED | {"busy": None})


BUSY = "import time\nwhile time.process_time() < 0.6: pass"


def taken() -> float:
    """Seconds for which processors were not idle."""
    return sum(times := psutil.cpu_times()) - times.idle


def test_what_other_programs_use_is_seen_and_what_this_one_uses_is_not():
    start, own, before = time.monotonic(), time.process_time(), taken()
    with subprocess.Popen([sys.executable, "-c", BUSY]) as other, OtherPrograms() as others:
        while time.process_time() < own + 0.6 or psutil.Process(other.pid).status() != psutil.STATUS_ZOMBIE:
            pass
    used = others.processors * (time.monotonic() - start)
    assert 0.5 < used < taken() - before - 0.5


def test_the_report_says_what_was_captured_and_why_not(heads):
    on = heads.backbone
    traced = SpeculativeModel(on, heads.drafter, capture="trace")
    drafter = copy.copy(heads.drafter)
    drafter.capturable = False
    partly = SpeculativeModel(on, drafter, capture="trace")
    report = compare([("t", traced), ("p", partly)], asked(5, 9), Plan(8, tree=TREE))
    by_name = {row.get("head", row.get("name")): row["capture"] for row in (*report["baselines"], *report["results"])}
    assert by_name[AR_TRANSFORMERS] is None and by_name[AR] == {"backend": "trace", "fallback": None}
    assert by_name["p"]["backend"] == "trace" and "Medusa is not capturable" in by_name["p"]["fallback"]
    assert f"fallback: {by_name['p']['fallback']}" in printed(report)
    assert any(note.startswith("capture: trace (AR (headstart)") for note in capture_notes(report))


def test_repetition_is_the_share_of_ngrams_that_occur_earlier_in_the_same_text(heads):
    assert repeated_ngrams([[1, 2, 3, 1, 2, 3, 1, 2], [7, 8], [1, 2, 3]], 3) == pytest.approx(3 / 7), "123 231 312 | 123 231 312; 123"
    assert repeated_ngrams([[1, 2]], 3) is None
    report = compare([("m", heads)], asked(5, 9), Plan(20, tree=TREE))
    share = next(row["repeated_8grams"] for row in report["baselines"] if row["name"] == AR)
    assert 0 <= share < 1 and f"repetition: {share:.1%} of the 8-grams written at temperature 0 by AR (headstart)" in printed(report)


def test_rows_that_end_early_are_counted_alike():
    on = Backbone(tiny("llama"))
    of = SpeculativeModel(on, random_drafter("medusa", on, depth=3))
    first = continue_text(of, asked(5, 9)[0].ids_T, Settings(12), 0).sequences[0, 5:].tolist()
    on.model.generation_config = GenerationConfig(eos_token_id=first[4], pad_token_id=0)
    report = compare([("m", of)], asked(5, 9), Plan(12, tree=TREE, batches=(2,)))
    assert report["results"][0]["identical_to_transformers"] is True
    counts = {row["tokens"] for row in (*report["baselines"], *report["results"])}
    assert len(counts) == 1 and counts.pop() <= first.index(first[4]) + 1 + 12


@pytest.mark.slow
def test_transformers_assisted_decoding_beside_heads(heads):
    on = heads.backbone
    others = [
        TransformersSystem(LOOKUP, on, {"prompt_lookup_num_tokens": 10}),
        TransformersSystem("same", on, {"assistant_model": tiny("llama")}),
    ]
    report = compare([("m", heads)], asked(14, 20), Plan(16, (0.0, 1.0), tree=TREE, batches=(1, 2)), others=others)
    names = {place: [row.get("name", "m") for row in rows_at(report, *place)] for place in ((0.0, 1), (0.0, 2), (1.0, 1))}
    assert names[0.0, 1] == names[1.0, 1] == [AR_TRANSFORMERS, AR, LOOKUP, "same", "m"]
    assert names[0.0, 2] == [AR_TRANSFORMERS, AR, "m"]  # assisted decoding takes one sequence at a time
    greedy = {row["name"]: row for row in report["baselines"] if row["temperature"] == 0 and row["batch"] == 1}
    assert greedy["same"]["identical"] is True and greedy[LOOKUP]["identical"] is True and greedy[AR_TRANSFORMERS]["identical"] is None
    assert greedy["same"]["tau"] > 1.5 and greedy["same"]["tau"] == pytest.approx(32 / (greedy["same"]["passes"] + 2))
    assert greedy[AR_TRANSFORMERS]["tau"] == 1.0 and "prompt lookup" in printed(report)
    assert all(row["identical"] is None for row in report["baselines"] if row["temperature"] == 1 and row["batch"] == 1)


def test_an_assistant_of_another_vocabulary(heads, tmp_path):
    build("Llama", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}).save_pretrained(tmp_path)
    refuses("has a vocabulary of 40 tokens, the backbone .* one of 61", load_assistant, str(tmp_path), heads.backbone, False)


def test_tasks_are_told_apart(heads):
    report = compare([("m", heads)], [*asked(5, 9, task="a"), *asked(3, task="b")], Plan(8, tree=TREE, batches=(2,)))
    row = report["results"][0]
    assert report["tasks"] == {"a": 2, "b": 1} and list(row["tasks"]) == ["a", "b"]
    assert [one["tokens"] for one in row["tasks"].values()] == [16, 8] and row["tokens"] == 24
    for key in ("tokens", "passes", "seconds"):
        assert sum(one[key] for one in row["tasks"].values()) == pytest.approx(row[key])
    ar = next(one for one in report["baselines"] if one["name"] == AR)
    for task, one in row["tasks"].items():
        assert one["speedup_vs_ar"] == pytest.approx(one["tokens_per_second"] / ar["tasks"][task]["tokens_per_second"])
        assert one["tau"] == pytest.approx(1 + sum(one["acceptance_per_depth"]))
    assert [line.split()[3] for line in printed(report).splitlines() if line.split()[2:3] == ["m"]][1:] == ["a", "b"]


def question(prompter: Prompter, *turns: str) -> Prompt:
    return prompter.of_row({"turns": list(turns)})


def test_later_turns_follow_the_answers_of_autoregressive_decoding():
    heads, prompter = talker()
    prompt = question(prompter, "What is two?", "And three?")
    answers = []
    following = prompt
    for _ in range(2):
        text_T = continue_text(SpeculativeModel(heads.backbone), following.ids_T, Settings(6, 0.9), 3).sequences[0, len(following.ids_T) :]
        answers.append(text_T)
        following = prompter.follow(following, text_T) if following.later else following
    report = compare([("m", heads)], [prompt], Plan(6, (0.9,), seed=3, tree=TREE), prompter)
    row, sample = report["results"][0], report["samples"][0]
    assert row["identical"] and row["tokens"] == sum(map(len, answers)) == 12
    assert "".join(sample["tokens"]) == prompter.tokenizer.decode(answers[0]) and sum(sample["accept_lengths"]) == 5
    assert sample["prompt"].endswith("assistant\n")


def test_a_later_turn_that_the_template_refuses_is_dropped():
    heads, prompter = talker()
    settings = replace(prompter.settings, template="{{ raise_exception('no') if messages | length > 2 else messages[0].content }}")
    prompter = replace(prompter, settings=settings)
    report = compare([("m", heads)], [question(prompter, "two", "six")], Plan(6, tree=TREE), prompter)
    assert report["dropped_turns"] == 1 and report["results"][0]["tokens"] == 6


def test_what_does_not_fit_the_context():
    heads, prompter = talker()
    short, long = question(prompter, "two", "two " * 20, "six"), question(prompter, "two " * 70)
    report = compare([("m", heads)], [short], Plan(30, tree=TREE), prompter)
    assert report["dropped_turns"] == 2 and report["results"][0]["tokens"] == 30 and "2 later turns" in printed(report)
    report = compare([("m", heads)], [short, long], Plan(30, tree=TREE))
    assert (report["dropped_prompts"], report["set_aside"], report["prompts"]) == (1, [2], 1)
    assert "dropped, too long for the context or refused by the template: 1 prompts [2], 0 later turns" in printed(report)
    refuses("the shortest prompt has", compare, [("m", heads)], [long], Plan(30, tree=TREE))


def test_bandwidth_counts_every_pass(heads):
    report = compare([("m", heads)], asked(5, 9, 3), Plan(8, tree=TREE, batches=(1, 2)))
    assert report["memory_bytes_per_second"] > 1e8
    for row in (*report["baselines"], *report["results"]):
        texts = 3 if row["batch"] == 1 else 2
        assert row["weight_bytes_per_second"] * row["seconds"] / report["weight_bytes"] == pytest.approx(row["passes"] + texts)
        assert row["mbu"] == pytest.approx(row["weight_bytes_per_second"] / report["memory_bytes_per_second"])


@pytest.mark.parametrize(("terminal", "no_color"), [(True, ""), (True, "1"), (False, "")])
def test_tables_are_coloured_on_a_terminal_alone_and_never_wrapped(heads, monkeypatch, terminal, no_color):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)

    class Out(io.StringIO):
        def isatty(self):
            return terminal

    out = Out()
    report = compare([("a name of heads that is rather long, as paths are" * 3, heads)], asked(5), Plan(4, tree=TREE))
    print_report(report, out)
    text = out.getvalue()
    assert ("\x1b[32m" in text) == (terminal and not no_color)
    rows = text.splitlines()[3:6]
    assert all("AR" in row or "as paths are" in row or "tokens/s" in row for row in rows)
    if not terminal:
        assert "\x1b" not in text and not any(row.endswith(" ") for row in text.splitlines())
        assert len({row.rindex(cell) + len(cell) for row, cell in zip(rows[:2], ("tokens/s", rows[1].split()[4]), strict=True)}) == 1


def test_weights_that_a_pass_reads():
    tied, untied = backbone("qwen3"), backbone("llama")
    embedding = untied.embed.weight.numel()
    assert weight_bytes(untied) == 4 * (sum(weight.numel() for weight in untied.model.parameters()) - embedding)
    assert weight_bytes(tied) == 4 * sum(weight.numel() for weight in tied.model.parameters())
    assert memory_bandwidth(torch.device("cpu")) > 1e8
