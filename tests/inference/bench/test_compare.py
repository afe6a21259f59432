"""`headstart compare`: pairs and changes; what cannot be compared is refused in one line. The page of a report is complete in itself."""

import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import talker
from errors import error_of, output_of
from families import prompts, random_drafter
from recorded import Change, a_logit, a_value, last_places, like_smollm2, register
from tiny_models import tiny_model
from webpage import Reader

from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.chat.prompts import Prompt
from headstart.cli.main import main
from headstart.inference.bench.bench import Plan, compare
from headstart.inference.bench.compare import Comparison, comparison_page, read_comparison
from headstart.inference.bench.judging import Entry, sentence
from headstart.inference.bench.systems import AR
from headstart.inference.bench.table import print_report, report_page
from headstart.inference.capture.capture import BackendName
from headstart.inference.engine.judge import Judgement


def entry(tau: float, speed: float, **more: object) -> dict:
    figures = {"tau": tau, "tokens_per_second": speed, "acceptance_per_depth": [tau - 1]}
    tasks = {"a": dict(figures), "b": dict(figures)}
    return {"temperature": 0.0, "batch": 1, "kind": "eagle3", "identical": True, **figures, "tasks": tasks, **more}


def report(**changes: object) -> dict:
    made = {
        "backbone": "tiny", "prompts_files": ["p.jsonl"], "prompts": 2, "tasks": {"a": 1, "b": 1}, "max_new_tokens": 8, "seed": 0,
        "dtype": "fp32", "device": "cpu", "threads": 1, "versions": {"headstart": "0.1.0"},
        "baselines": [entry(1.0, 10.0, kind="ar", name="AR (headstart)", identical=None)],
        "results": [entry(2.0, 15.0, head="out/old")],
    }  # fmt: skip
    return made | changes


def write(folder: Path, name: str, value: object) -> str:
    path = folder / name
    path.write_text(json.dumps(value))
    return str(path)


def test_it_pairs_by_name_then_by_order_and_gives_the_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = report(results=[entry(3.0, 30.0, head="out/new"), entry(2.5, 20.0, head="out/extra")])
    before = write(tmp_path, "before.json", report())
    both = read_comparison(before, write(tmp_path, "after.json", after))
    assert [pair.system for pair in both.pairs] == ["AR (headstart)", "out/old → out/new"]
    page = tmp_path / "page.html"
    out = output_of(capsys, "compare", before, str(tmp_path / "after.json"), "--html", str(page))
    assert "+50.0%" in out and "+100.0%" in out and "2.00" in out and "3.00" in out
    assert out.count("out/old → out/new") == 3  # itself and its two tasks
    assert "out/old → out/new" in page.read_text() and "extra" not in out


def test_trees_of_other_sizes_are_said(tmp_path: Path) -> None:
    before, after = (report(results=[entry(2.0, 15.0, head="x") | {"nodes": nodes, "width": 4}]) for nodes in (6, 12))
    both = read_comparison(write(tmp_path, "a.json", before), write(tmp_path, "b.json", after))
    assert both.pairs[1].system == "x (nodes 6 → 12)"


def test_a_system_of_the_same_name_is_not_paired_with_another(tmp_path: Path) -> None:
    before = report(results=[entry(2.0, 15.0, head="x"), entry(1.5, 12.0, head="y")])
    after = report(results=[entry(1.6, 12.0, head="y"), entry(2.2, 15.0, head="z")])
    both = read_comparison(write(tmp_path, "a.json", before), write(tmp_path, "b.json", after))
    assert [(pair.before["tau"], pair.after["tau"]) for pair in both.pairs[1:]] == [(2.0, 2.2), (1.5, 1.6)]


@pytest.mark.parametrize(
    ("key", "value"), [("backbone", "other"), ("prompts", 3), ("dtype", "bf16"), ("device", "cuda"), ("threads", 2), ("max_new_tokens", 9)]
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object) -> None:
    paths = write(tmp_path, "a.json", report()), write(tmp_path, "b.json", report(**{key: value}))
    error = error_of(capsys, "compare", *paths, "--html", tmp_path / "page.html")
    assert f"cannot be compared: {key} is" in error and str(value) in error
    assert not (tmp_path / "page.html").exists()


def test_other_temperatures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = copy.deepcopy(report())
    for row in (*after["baselines"], *after["results"]):
        row["temperature"] = 1.0
    assert "share no temperature" in error_of(capsys, "compare", write(tmp_path, "a.json", report()), write(tmp_path, "b.json", after))


def run(folder: Path, name: str, backbone: str = "tiny", lr: float = 0.1) -> str:
    recipe = {"backbone": {"path": backbone}, "drafter": {"kind": "medusa"}, "train": {"lr": lr}, "save": {"dir": name}}
    lines = [{"recipe": recipe, "steps": 2}, {"step": 2, "tau": 1.5, "acceptance_per_depth": [0.5]}]
    lines += [{"step": 2, "loss": 1.0, "lr": lr, "grad_norm": 1.0, "accuracy": [0.5], "tokens": 9, "tokens_per_second": 3.0}]
    (folder / name).mkdir()
    (folder / name / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / name)


def test_training_runs_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [run(tmp_path, "a"), run(tmp_path, "a2", lr=0.2), run(tmp_path, "c", lr=0.3)]
    out = output_of(capsys, "compare", *paths)
    assert all(path in out for path in paths) and "train.lr" in out and "save.dir" not in out
    error = error_of(capsys, "compare", *paths, "--html", tmp_path / "runs.html")
    assert "for the curves of runs, train with log.tensorboard=true or log.wandb" in error


def test_runs_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run(tmp_path, "a"), run(tmp_path, "b", backbone="large")
    (tmp_path / "empty").mkdir()
    given = write(tmp_path, "a.json", report())
    for paths, expected in (
        ([one, other], "on tiny and on large"), ([one, str(tmp_path / "empty")], "holds no log.jsonl"), ([given], "one thing alone"),
        ([one, one], "given twice"), ([one, given], "with each other"), ([given, given, given], "with each other"),
        ([given, str(tmp_path / "none.json")], "there is no such file"),
    ):  # fmt: skip
        assert expected in error_of(capsys, "compare", *paths)


@pytest.mark.parametrize(("changes", "named"), [
    ("{", "is damaged"), ("[]", "is damaged"), ('{"loss": 1}', "is no report"), ("\x00", "is damaged"),
    ({"results": [{}]}, "results.0"), ({"results": None}, "results"), ({"versions": []}, "versions"),
    ({"baselines": ["x"]}, "baselines.0"),
    ({"results": [entry(2.0, 15.0, head="x", identical="x")]}, "results.0.identical"),
    ({"results": [entry(2.0, 15.0, head="x") | {"tau": None}]}, "results.0.tau"),
    ({"results": [entry(2.0, 15.0, head="x", acceptance_per_depth=["x"])]}, "results.0.acceptance_per_depth.0"),
])  # fmt: skip
def test_a_damaged_report_or_another_file_is_named(tmp_path: Path, capsys: Any, changes: dict | str, named: str) -> None:
    (tmp_path / "b.json").write_text(changes if isinstance(changes, str) else json.dumps(report(**changes)))
    error = error_of(capsys, "compare", write(tmp_path, "a.json", report()), tmp_path / "b.json")
    assert (named if isinstance(changes, str) else f"b.json is damaged ({named}") in error


def test_damaged_lines_of_a_log_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [run(tmp_path, "a"), run(tmp_path, "b", lr=0.2)]
    with (tmp_path / "b" / "log.jsonl").open("a") as log:
        log.write("[" * 100_000 + "\n5\nnull\n" + '{"step": "x", "loss": 1}\n{"step": 3, "loss": "x"}\n{"step": 3, "lo')
    assert main(["compare", *paths]) == 0 and "Traceback" not in capsys.readouterr().err


def test_a_page_complete_in_itself() -> None:
    heads, prompter = talker()
    prompts = [Prompt(prompter.ask(text), task) for text, task in (("two & two", "</td><script>a<b"), ("six", "qa"))]
    two = SpeculativeModel(heads.backbone, random_drafter("eagle3", heads.backbone, depth=4), capture="off")
    report = compare([("out/<m>", heads), ("e", two)], prompts, Plan(8, (0.0, 1.0), tree=TreeShape(9, 3), batches=(1, 2)), prompter)
    text = report_page(report | {"backbone": "tiny & small"})
    read = Reader(text)
    assert not re.search(r"<script|<link|<img|@import|url\([^#]|src=|href=\"[^#]", text)  # of another place; "#" is in the page
    assert ("meta", "charset", "utf-8") in read.attributes
    for expected in ("tiny & small", "out/<m>", "</td><script>a<b", "MBU"):
        assert expected in read.words, expected
    for row in (*report["baselines"], *report["results"]):
        assert f"{row['tokens_per_second']:.1f}" in read.words and f"{row['mbu']:.0%}" in read.words
    for row in report["results"]:
        assert all(f"{share:.2f}" in read.words for one in row["tasks"].values() for share in one["acceptance_per_depth"])
    assert text.count("<table>") == len(re.findall(r'<div class="scroll">\s*<table>', text)) == 2 and ".scroll { overflow-x: auto" in text
    report |= {"backbone": "tiny & small", "versions": {}}
    read = Reader(comparison_page(Comparison(("a.json", "b.json"), report, report)))
    assert "Before and after" in read.words and "+0.0%" in read.words


# The verdict of `bench`: what exceeds the rounding measured in the run is a fault, in 16 bits too; near-ties are none.

LENGTH = 16
RED, GREEN = "\x1b[1;31m", "\x1b[32m"


def measured(dtype: torch.dtype, capture: BackendName = "cuda-graph", twins: bool = False, temperatures: tuple[float, ...] = (0.0,)) -> Any:
    on = like_smollm2(dtype, twins)
    heads = SpeculativeModel(on, random_drafter("medusa", on, depth=3).to(dtype), capture=capture)
    plan = Plan(LENGTH, temperatures, tree=TreeShape(8, 3))
    return compare([("m", heads)], [Prompt(ids_T) for ids_T in prompts((12,))], plan) | {"busy": None}


def printed(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The report as a terminal with colours shows it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_report(report, out := io.StringIO())
    return out.getvalue()


@pytest.mark.parametrize(("change", "dtype"), [
    (a_logit, torch.bfloat16),
    pytest.param(a_value, torch.float32, marks=pytest.mark.slow),
    pytest.param(a_logit, torch.float32, marks=pytest.mark.slow),
    pytest.param(a_value, torch.bfloat16, marks=pytest.mark.slow),
])  # fmt: skip
def test_one_changed_value_of_a_replay_is_a_fault(change: Change, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, change)
    report = measured(dtype)
    ar = next(row for row in report["baselines"] if row["name"] == AR)
    assert report["verdict"] == report["results"][0]["verdict"] == ar["verdict"] == "fault"
    found, rounding = report["results"][0]["teacher_forced"], report["rounding"]
    assert found["logits_beyond"] > 10 and found["largest_difference"] > 5 * rounding["tolerance"] and rounding["texts"] >= 1
    text = printed(report, monkeypatch)
    assert f"{RED}FAULT: m at temperature 0" in text and GREEN not in text and "--capture off" in sentence(report)
    shown = report_page(report)
    assert '<p class="bold red">FAULT: ' in shown and '<td class=" bold red">no</td>' in shown


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_near_ties_are_none(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token has a twin, and captured passes round at random: texts differ, and every token is right."""
    register(monkeypatch, last_places)
    report = measured(dtype, twins=True)
    row = report["results"][0]
    assert report["verdict"] == row["verdict"] == "near-tie" and row["identical"] is False
    found = row["teacher_forced"]
    assert found["near_ties"] >= 1 and found["faults"] == found["logits_beyond"] == 0
    assert found["largest_shortfall"] < report["rounding"]["size"]
    text, shown = printed(report, monkeypatch), report_page(report)
    assert "These are near-ties" in text and RED not in text and GREEN not in text
    assert '<p class="">Not every token' in shown and '<td class=" ">near-tie</td>' in shown


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_healthy_run_is_none(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(dtype, "trace", temperatures=(0.0, 1.0))
    assert report["verdict"] in {"identical", "near-tie"}
    if dtype == torch.float32:
        assert report["verdict"] == "identical" and f"{GREEN}Every token of every prompt" in printed(report, monkeypatch)
    rows = [*report["results"], *(row for row in report["baselines"] if row["name"] == AR or row["temperature"] == 0)]
    assert len(rows) == 5 and all(row["teacher_forced"]["tokens"] >= LENGTH for row in rows)
    assert [row["teacher_forced"] for row in report["baselines"] if row not in rows] == [None], "transformers' sampling has its own noise"


def test_a_model_that_differs_from_itself_is_named() -> None:
    on = Backbone(tiny_model("moshi"))  # whose cache keeps a window, and whose passes see everything
    found = compare([("m", SpeculativeModel(on, random_drafter("medusa", on), capture="off"))], [Prompt(prompts([9])[0])], Plan(8))
    assert found["verdict"] == "fault" and "no rounding, nor of drafts: transformers' generate wrote the same, as" in sentence(found)


def test_a_tolerance_that_grows_later_holds_for_all() -> None:
    entry = Entry({"identical": False}, None)  # type: ignore[arg-type]
    entry.texts += [Judgement(9, {3: 0.5}), Judgement(9, {}, [])]
    entry.with_logits += [Judgement(5, {}, [0.1, 0.9])]
    assert (entry.verdict(0.4), entry.verdict(0.6), entry.verdict(1.0)) == ("fault", "fault", "near-tie")
    assert entry.counts(0.6) == {
        "tokens": 23, "near_ties": 1, "faults": 0, "largest_shortfall": 0.5, "logits": 2, "logits_beyond": 1, "largest_difference": 0.9,
    }  # fmt: skip
    entry.texts.append(Judgement(1, {0: float("inf")}))
    assert entry.verdict(1e9) == "fault" and entry.counts(1e9)["largest_shortfall"] is None, "JSON has no infinity"


def test_the_command_ends_with_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    register(monkeypatch, a_logit)
    asked = tmp_path / "prompts.jsonl"
    asked.write_text('{"prompt": "What is two?"}')
    command = ["bench", "--backbone", "embedded", "--propose", "suffix", "--prompts", str(asked), "--max-new-tokens", "8"]
    file = tmp_path / "report.json"
    assert main([*command, "--capture", "cuda-graph", "--json", str(file)]) == 1
    assert json.loads(file.read_text())["verdict"] == "fault" and "FAULT: " in capsys.readouterr().out
    assert main(["compare", str(file), str(file)]) == 0 and capsys.readouterr().out.rstrip().endswith("no")
