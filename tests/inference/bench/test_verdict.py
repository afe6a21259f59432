"""The verdict of `bench`: what exceeds the rounding measured in the run is a fault, in 16 bits too; near-ties are none."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from corrupting import Change, a_logit, a_value, last_places, like_smollm2, register
from families import prompts, random_drafter

from headstart.chat.prompts import Prompt
from headstart.cli.main import main
from headstart.inference.bench.bench import Plan, compare
from headstart.inference.bench.judging import Entry, sentence
from headstart.inference.bench.systems import AR
from headstart.inference.bench.table import print_report, report_page
from headstart.inference.capture.capture import BackendName
from headstart.inference.engine.judge import Judgement
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel

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


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        (a_logit, torch.bfloat16),
        pytest.param(a_value, torch.float32, marks=pytest.mark.slow),
        pytest.param(a_logit, torch.float32, marks=pytest.mark.slow),
        pytest.param(a_value, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
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
