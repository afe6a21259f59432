"""A run's log is kept across a resume; the tables of compare, and trackers, get the same numbers."""

import importlib.util
import io
import json
import math
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from errors import error_of
from small_run import make_recipe, read_log, train_once

from headstart.cli.main import main as command
from headstart.cli.train import main
from headstart.training.recipe.recipe import load_recipe
from headstart.training.run.log import marked, start_trackers
from headstart.training.run.runs import print_runs

GIVEN = ["train.schedule=constant", "eval.every=4", "log.tensorboard=true"]
STEPS = 12


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of six steps resumed to twelve."""
    folder = tmp_path_factory.mktemp("ran")
    recipe = make_recipe(folder, drafter={"kind": "eagle3", "depth": 3}, train={"steps": 6}, eval={"max_new_tokens": 24})
    train_once(recipe, *GIVEN)
    train_once(recipe, *GIVEN, f"train.steps={STEPS}")
    return folder / "out"


def test_the_log_goes_on_where_the_run_went_on(ran: Path) -> None:
    log = read_log(ran)
    recipes, steps, evaluations = ([line for line in log if key in line] for key in ("recipe", "loss", "tau"))
    assert [(line["step"], line["steps"]) for line in recipes] == [(0, 6), (6, STEPS)]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1)) and [line["step"] for line in evaluations] == [4, 6, 8, 12]
    assert not list(ran.glob("*.html"))


def test_compare_prints_the_numbers_of_the_log(ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text((ran / "log.jsonl").read_text() + '{"step": 13, "lo')  # a partly written line
    assert command(["compare", str(tmp_path / "run")]) == 0
    said, last = capsys.readouterr().out, [next(line for line in reversed(read_log(ran)) if key in line) for key in ("loss", "tau")]
    for number in (f"{last[0]['loss']:.4g}", f"{last[1]['tau']:.3f}", *(f"{share:.2f}" for share in last[1]["acceptance_per_depth"])):
        assert number in said


def test_examples_are_the_continuations_and_their_passes(ran: Path) -> None:
    last = next(line for line in reversed(read_log(ran)) if "tau" in line)
    assert len(last["examples"]) == 2
    for example in last["examples"]:
        assert 1 + sum(example["accept_lengths"]) == len(example["tokens"]) == 24
        assert re.sub(r"[][]", "", marked(example)) == re.sub(r"[][]", "", "".join(example["tokens"]))
    lengths = [length for example in last["examples"] for length in example["accept_lengths"]]
    assert last["tau"] == pytest.approx(sum(lengths) / len(lengths))  # there are two prompts, and both are shown
    assert marked({"tokens": ["x ", "def", " fib", "(", "n", ")", ":"], "accept_lengths": [2, 3, 1]}) == "x [def fib][(n)]:"


def test_long_examples_end_with_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.training.evaluation.LONGEST", 7)
    assert main([str(make_recipe(tmp_path, train={"steps": 1}))]) == 0
    for example in read_log(tmp_path / "out")[-1]["examples"]:
        assert 1 + sum(example["accept_lengths"]) == len(example["tokens"]) <= 7


def lines_of(head: str, depth: int, steps: int, **changes: Any) -> Iterator[dict[str, Any]]:
    for step in range(1, steps + 1):
        shares = [0.5 / (i + 1) for i in range(depth)]
        numbers = {"loss": 1 / step, "grad_norm": 0.5, "accuracy": shares, "tokens_per_second": 1e5, "lr": 1e-5, "tokens": 1000 * step}
        yield {"step": step, "head": head, **numbers, **changes}
    yield {"step": steps, "head": head, "tau": 1.5, "acceptance_per_depth": shares}


def test_several_heads_are_rows_of_one_table() -> None:
    recipe = {"backbone": {"path": "a<b>&c"}, "heads": {"x": {"kind": "eagle3"}, "y": {"kind": "medusa"}}}
    nothing = {"loss": None, "grad_norm": math.nan, "skipped": 2}
    log = [{"step": 0, "recipe": recipe, "steps": 9}, *lines_of("x", 3, 3, loss=-0.5), *lines_of("y", 1, 300, **nothing)]
    print_runs({"out": log}, out := io.StringIO())
    x, y = (next(line for line in out.getvalue().splitlines() if f"out, {name} " in line) for name in "xy")
    assert "eagle3" in x and "-0.5" in x and "medusa" in y and "600" in y and "1.500" in y


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
        Accelerator(cpu=True)  # trackers ask it for the main process
        (tracker,) = start_trackers(recipe, done)
        tracker.finish()
    steps = [event.step for event in events(tmp_path / "out" / "tensorboard") for value in event.summary.value]
    assert steps == [0, 6]


STANDIN = """from types import SimpleNamespace
errors, begun, logged = SimpleNamespace(Error=RuntimeError), [], []
class Table(SimpleNamespace): pass
def init(**given):
    if given["mode"] == "online":
        raise errors.Error("No API key configured.\\nUse `wandb login`.")
    begun.append(given)
    return SimpleNamespace(log=lambda values, **how: logged.append((values, how)), finish=lambda: None)
"""


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe, numbers and examples; a resumed run goes on under its id; what is refused is one line."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(STANDIN)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    wanted = {"wandb": "offline", "name": "tried", "project": "tiny"}
    recipe = make_recipe(tmp_path, log=wanted, train={"schedule": "constant"})
    recipe.write_text(recipe.read_text() + "regenerate:\n  api_key: SERVER_KEY\n")
    monkeypatch.setenv("SERVER_KEY", "sk-0123456789")
    for given in (["train.steps=1"], ["train.steps=2"], ["train.steps=1", f"save.dir={tmp_path / 'another'}"]):
        AcceleratorState._reset_state(True)
        assert main([str(recipe), *given]) == 0
    wandb = importlib.import_module("wandb")
    first, resumed, another = wandb.begun
    assert first["id"] == resumed["id"] != another["id"] and {one["resume"] for one in (first, resumed, another)} == {"allow"}
    assert (first["name"], first["project"], first["config"]["drafter"]["kind"]) == ("tried", "tiny", "medusa")
    assert first["config"]["regenerate"]["api_key"] == "SERVER_KEY" and "sk-0123456789" not in str((wandb.begun, wandb.logged))
    trained, evaluated = read_log(tmp_path / "out")[-2:]
    numbers: dict[str, Any] = {}
    for values, how in wandb.logged:
        numbers |= values if how.get("step") == 2 else {}
    assert (numbers["tau"], numbers["loss"]) == (evaluated["tau"], trained["loss"])
    assert [numbers[f"acceptance_per_depth/{i}"] for i in (0, 1)] == evaluated["acceptance_per_depth"]
    (table,) = (value for value in numbers.values() if isinstance(value, wandb.Table))
    assert table.data == [[one["prompt"], marked(one)] for one in evaluated["examples"]]
    capsys.readouterr()
    line = error_of(capsys, "train", recipe, "log.wandb=online", f"save.dir={tmp_path / 'refused'}")
    assert line.startswith("error: log.wandb=online: No API key configured. Use `wandb login`.; run wandb login, or set log.wandb=offline")
    sys.modules.pop("wandb")


def test_a_tracker_that_is_missing_is_said_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    recipe = make_recipe(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    output = error_of(capsys, "train", recipe, "log.tensorboard=true", "backbone.path=/nowhere")
    assert output.startswith("error: log.tensorboard=true needs") and "pip install tensorboardX" in output
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install wandb" in error_of(capsys, "train", recipe, "log.wandb=online", "backbone.path=/nowhere")


def test_a_depth_trained_at_no_position_has_no_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = {"kind": "eagle3", "depth": 2, "deeper_share": 1e-6}
    assert main([str(make_recipe(tmp_path, drafter=drafter, train={"steps": 1, "batch_size": 1}))]) == 0
    line = next(line for line in read_log(tmp_path / "out") if "loss" in line)
    assert line["accuracy"][0] is not None and line["accuracy"][1] is line["alpha"][1] is None
    assert re.search(r"step 1/1 .* accuracy \d+% -, ", capsys.readouterr().err)
