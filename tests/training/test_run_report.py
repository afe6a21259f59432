"""A run's report: self-contained, consistent with the log and kept across a resume; trackers get the same numbers."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from small_run import make_recipe, read_log
from webpage import Reader

from headstart.cli.train import main
from headstart.support.report.charts import around, ticks
from headstart.training.log.evaluate import marked
from headstart.training.log.report import MOST, page, write_report
from headstart.training.log.trackers import start_trackers
from headstart.training.recipe.recipe import load_recipe
from headstart.training.recipe.yaml_text import parse_yaml

GIVEN = ["train.schedule=constant", "eval.every=4", "log.tensorboard=true"]
STEPS = 12


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of six steps resumed to twelve; ``first.html`` is the page before the resume."""
    folder = tmp_path_factory.mktemp("ran")
    recipe = make_recipe(folder, drafter={"kind": "eagle3", "depth": 3}, train={"steps": 6}, eval={"max_new_tokens": 24})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(True)
        assert main([str(recipe), *GIVEN]) == 0
        (folder / "out" / "report.html").rename(folder / "out" / "first.html")
        AcceleratorState._reset_state(True)
        assert main([str(recipe), *GIVEN, f"train.steps={STEPS}"]) == 0
    return folder / "out"


def titles(text: str) -> list[str]:
    """Tooltips of the points of all plots; checks that each plot is valid XML and draws within its box."""
    tooltips = []
    for svg in re.findall(r"<svg.*?</svg>", text):
        drawn = ElementTree.fromstring(svg)
        _, _, width, height = map(float, drawn.attrib["viewBox"].split())
        for dot in drawn.iter("circle"):
            assert 0 < float(dot.attrib["cx"]) < width and 0 < float(dot.attrib["cy"]) < height
        tooltips += ["".join(title.itertext()) for title in drawn.iter("title")]
        assert not re.search(r"\b(nan|inf)\b", svg)
    return tooltips


def said(step: float, head: str, value: float) -> str:
    return f"{head}: {value:.4g} at {step:,}"


def test_every_number_of_the_log_is_in_the_plots(ran: Path) -> None:
    text = (ran / "report.html").read_text()
    read, points, log = Reader(text), titles(text), read_log(ran)
    assert not re.search(r"https?:|<link|@import|url\(|src=", text) and text.count("<script>") == 1
    for title in ("Loss", "Mean acceptance length", "Learning rate", "Gradient norm", "Speed", "Accuracy by depth", "Recipe"):
        assert title in read.words, title
    steps, evaluations = [line for line in log if "loss" in line], [line for line in log if "tau" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1)) and [line["step"] for line in evaluations] == [4, 6, 8, 12]
    for line in steps:
        assert said(line["tokens"], "eagle3", line["loss"]) in points
        for key in ("lr", "grad_norm", "tokens_per_second"):
            assert said(line["step"], "eagle3", line[key]) in points, key
        assert all(said(line["step"], f"depth {i}", x) in points for i, x in enumerate(line["accuracy"]))
    for line in evaluations:
        assert said(line["step"], "eagle3", line["tau"]) in points
        assert all(said(line["step"], f"depth {i}", x) in points for i, x in enumerate(line["acceptance_per_depth"]))
    assert all(said(i, "eagle3", x) in points for i, x in enumerate(evaluations[-1]["acceptance_per_depth"]))
    assert "Skipped steps" not in read.words


def test_it_goes_on_where_the_run_went_on(ran: Path) -> None:
    first, second = (Reader((ran / name).read_text()).words for name in ("first.html", "report.html"))
    assert "step 6 of 6" in first and "step 12 of 12" in second
    recipes = [line for line in read_log(ran) if "recipe" in line]
    assert [(line["step"], line["steps"]) for line in recipes] == [(0, 6), (6, STEPS)]
    shown = parse_yaml(second[second.index("With every default written out.") + 31 :].partition("\nfor (const")[0], "the report")
    assert shown == recipes[-1]["recipe"] and shown["train"]["steps"] == STEPS


def test_examples_are_the_continuations_and_their_passes(ran: Path) -> None:
    last = next(line for line in reversed(read_log(ran)) if "tau" in line)
    read = Reader((ran / "report.html").read_text())
    assert len(last["examples"]) == 2
    for example in last["examples"]:
        assert 1 + sum(example["accept_lengths"]) == len(example["tokens"]) == 24
        assert "".join(example["tokens"]) in read.words and example["prompt"] in read.words
        assert re.sub(r"[][]", "", marked(example)) == re.sub(r"[][]", "", "".join(example["tokens"]))
    lengths = [length for example in last["examples"] for length in example["accept_lengths"]]
    assert last["tau"] == pytest.approx(sum(lengths) / len(lengths))   # there are two prompts, and both are shown
    assert marked({"tokens": ["x ", "def", " fib", "(", "n", ")", ":"], "accept_lengths": [2, 3, 1]}) == "x [def fib][(n)]:"


def test_long_examples_end_with_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.training.log.evaluate.LONGEST", 7)
    assert main([str(make_recipe(tmp_path, train={"steps": 1}))]) == 0
    for example in read_log(tmp_path / "out")[-1]["examples"]:
        assert 1 + sum(example["accept_lengths"]) == len(example["tokens"]) <= 7


def lines_of(head: str, depth: int, steps: int, **changes: Any) -> Iterator[dict[str, Any]]:
    for step in range(1, steps + 1):
        shares = [0.5 / (i + 1) for i in range(depth)]
        numbers = {"loss": 1 / step, "grad_norm": 0.5, "accuracy": shares, "tokens_per_second": 1e5, "lr": 1e-5, "tokens": 1000 * step}
        yield {"step": step, "head": head, **numbers, **changes}
    yield {"step": steps, "head": head, "tau": 1.5, "acceptance_per_depth": shares}


def test_several_heads_are_lines_of_one_plot() -> None:
    recipe = {"backbone": {"path": "a<b>&c"}, "heads": {"x": {"kind": "eagle3"}, "y": {"kind": "medusa"}}}
    log = [{"step": 0, "recipe": recipe, "steps": 9}, *lines_of("x", 3, 3), *lines_of("y", 1, 3, loss=None, grad_norm=None, skipped=2)]
    text = page(log)
    points, read = titles(text), Reader(text)
    assert "a<b>&c" in read.words and "step 3 of 9" in read.words and "0:00:00 in steps" in read.words
    assert {said(3000, "x", 1 / 3), said(3, "x", 1.5), said(3, "y", 1.5), said(3, "y", 6), said(3, "x", 0)} <= set(points)
    assert not any(said(1000 * step, "y", 0) in points for step in (1, 2, 3))   # no loss, so no point
    panels = [value for _, name, value in read.attributes if name == "data-name"]
    assert panels == ["x", "y"] * 2 and "Skipped steps" in read.words


def test_a_long_log_is_thinned_and_what_is_no_number_is_left_out() -> None:
    log = [*lines_of("", 2, 10 * MOST), {**next(lines_of("", 2, 1, loss=math.nan, grad_norm=math.inf)), "step": 10 * MOST + 1}]
    points = titles(page(log))
    losses = [point for point in points if "at 10,000" in point or "at 1,999,000" in point or "at 2,000,000" in point]
    assert said(10_000, "heads", sum(1 / step for step in range(1, 11)) / 10) in losses
    assert len(points) < 8 * MOST + 10 and "mean of 11 lines of the log" in page(log)


def test_losses_below_zero_and_nothing_but_zero() -> None:
    """KL over a draft vocabulary may be below 0."""
    for loss in (-0.5, 0.0):
        points = titles(page(lines_of("", 2, 4, loss=loss)))
        assert said(4000, "heads", loss) in points
    assert around([-0.38, -0.25]) == pytest.approx((-0.4, 0)) and around([3.0]) == (0, 4) and around([0.0]) == (0, 1)
    low, high = around([-3.0, 97.0])
    marks = ticks(high, low)
    assert low < -3 and 97 < high < 150 and low <= marks[0] <= 0 < marks[-1] <= high and 0 in marks


def test_nothing_yet_is_a_page_too() -> None:
    assert "Nothing has been logged yet." in Reader(page([])).words


def test_rebuilt_from_the_log_alone(ran: Path, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text((ran / "log.jsonl").read_text() + '{"step": 13, "lo')   # a partly written line
    assert write_report(tmp_path).read_text() == (ran / "report.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "report.html"]


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path, train={"steps": 2})
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    assert main([str(recipe), "eval.every=1"]) == 0
    assert capsys.readouterr().err.count("report.html could not be written: ") == 2   # at the first evaluation and at the end
    assert not list((tmp_path / "out").glob("*.tmp"))
    (tmp_path / "out" / "report.html").rmdir()
    assert main([str(recipe), "eval.every=1"]) == 0   # already at its last step
    assert "step 2 of 2" in (tmp_path / "out" / "report.html").read_text()


def events(folder: Path) -> Iterator[Any]:
    """TensorBoard's records in the order they were written: length, its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack("<Q", data[at : at + 8])
            yield Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size


def test_tensorboard_has_the_same_numbers(ran: Path) -> None:
    values = [(event.step, value) for event in events(ran / "tensorboard") for value in event.summary.value]
    numbers = {(step, value.tag): value.simple_value for step, value in values if value.WhichOneof("value") == "simple_value"}
    for line in read_log(ran):
        wanted = {key: line[key] for key in ("loss", "grad_norm", "lr", "tau") if key in line}
        wanted |= {f"{key}/{i}": x for key in ("accuracy", "acceptance_per_depth") for i, x in enumerate(line.get(key, []))}
        for tag, value in wanted.items():
            assert numbers.pop((line["step"], tag)) == pytest.approx(value, rel=1e-6), tag
    assert {tag.partition("/")[0] for _, tag in numbers} == {"alpha", "tokens", "tokens_per_second"}
    texts = {(step, value.tag): value.tensor.string_val[0].decode() for step, value in values if value.WhichOneof("value") == "tensor"}
    assert {step for step, tag in texts if tag == "recipe/text_summary"} == {0, 6} and "      depth: 3" in texts[0, "recipe/text_summary"]
    assert {step for step, tag in texts if tag == "examples/text_summary"} == {4, 6, 8, 12}
    prompt = json.dumps(read_log(ran)[-1]["examples"][0]["prompt"])
    assert texts[12, "examples/text_summary"].startswith(f"    {prompt}\n")


def test_starts_in_the_same_second_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorboardX.event_file_writer.time", SimpleNamespace(time=lambda: 1e9))
    recipe = load_recipe(make_recipe(tmp_path), ["log.tensorboard=true"])
    for done in (0, 6):
        AcceleratorState._reset_state(True)
        Accelerator(cpu=True)   # trackers ask it for the main process
        (tracker,) = start_trackers(recipe, done)
        tracker.finish()
    steps = [event.step for event in events(tmp_path / "out" / "tensorboard") for value in event.summary.value]
    assert steps == [0, 6]


def records(path: Path) -> Iterator[Any]:
    """The records of an offline wandb run: LevelDB's log format, blocks of 32 KiB with records whole (1) or in parts (2, 3, 4)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts, at = parts + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def test_wandb_offline_has_recipe_numbers_and_examples(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    recipe = make_recipe(tmp_path, train={"steps": 2}, log={"wandb": "offline", "name": "tried", "project": "tiny"})
    assert main([str(recipe)]) == 0
    wandb.teardown()   # a finished run may not be on disk until wandb's own process ends
    (path,) = (tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")
    logged = list(records(path))
    (run,) = (record.run for record in logged if record.WhichOneof("record_type") == "run")
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert run.display_name == "tried" and run.project == "tiny" and config["train"]["steps"] == 2 and config["drafter"]["kind"] == "medusa"
    history: dict[int, dict[str, Any]] = {}
    for record in logged:
        if record.WhichOneof("record_type") == "history":
            items = ((item.key or "/".join(item.nested_key), json.loads(item.value_json)) for item in record.history.item)
            history[record.history.step.num] = dict(items)
    evaluated, trained = read_log(tmp_path / "out")[-1], read_log(tmp_path / "out")[-2]
    assert [history[2]["tau"], history[2]["loss"]] == [evaluated["tau"], trained["loss"]]
    assert [history[2][f"acceptance_per_depth/{i}"] for i in (0, 1)] == evaluated["acceptance_per_depth"]
    (table,) = path.parent.glob("files/media/table/*.json")
    assert json.loads(table.read_text())["data"] == [[one["prompt"], marked(one)] for one in evaluated["examples"]]


def test_a_tracker_that_is_missing_is_said_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, find = make_recipe(tmp_path), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name.startswith("tensorboard") else find(name, *rest))
    assert main([str(recipe), "log.tensorboard=true", "backbone.path=/nowhere"]) == 2
    output = capsys.readouterr().err
    assert output.startswith("error: log.tensorboard=true needs") and "pip install tensorboardX" in output and output.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert main([str(recipe), "log.tensorboard=maybe"]) == 2
    assert "log.tensorboard is" in capsys.readouterr().err


def test_what_wandb_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**kwargs: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`.")

    monkeypatch.setattr(wandb, "init", refuse)
    assert main([str(make_recipe(tmp_path)), "log.wandb=online"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: log.wandb=online: No API key configured. Use `wandb login`.; run wandb login, or set log.wandb=offline")
