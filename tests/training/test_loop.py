"""The training loop: it trains the drafter alone, and the loss does not depend on how a step is split."""

import json
from pathlib import Path

import pytest
import torch
from errors import error_of
from safetensors.torch import load_file
from small_run import Forked, make_recipe, read_log

from headstart.cli.train import main
from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.checkpoint import load_drafter
from headstart.training.loop import micro_batch_seed, train
from headstart.training.recipe.recipe import Train, load_recipe
from headstart.training.run.checkpoint import find_state, read_state
from headstart.training.run.optimizer import Average, in_place_of_weights, learning_rate
from headstart.training.setup import prepare

KINDS = [{"kind": "medusa", "depth": 2}, {"kind": "eagle3", "depth": 3, "draft_vocab_size": 40}]


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("drafter", KINDS, ids=lambda drafter: drafter["kind"])
def test_training_teaches_the_drafter_and_nothing_else(tmp_path: Path, drafter: dict) -> None:
    recipe = load_recipe(make_recipe(tmp_path, drafter=drafter, train={"steps": 40, "schedule": "constant"}, log={"every": 10}))
    trained = prepare(recipe)
    weights = {name: weight.clone() for name, weight in trained.drafter.named_parameters()}
    frozen = {name: weight.clone() for name, weight in trained.backbone.model.state_dict().items()}
    assert {id(p) for p in trained.trainers[0].module.parameters()} == {id(p) for p in trained.drafter.parameters()}
    assert train(trained) == 0
    trained.log.close()
    assert not [name for name, weight in trained.drafter.named_parameters() if torch.equal(weight, weights[name])]
    assert not [name for name, weight in trained.backbone.model.state_dict().items() if not torch.equal(weight, frozen[name])]
    lines = [line for line in read_log(tmp_path / "out") if "loss" in line]
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"] and lines[-1]["alpha"][0] > lines[0]["alpha"][0]
    assert len(lines[0]["accuracy"]) == drafter["depth"] and lines[-1]["tokens"] > lines[0]["tokens"] > 0


def test_heads_can_be_loaded_and_say_where_they_come_from(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, drafter=KINDS[1])
    assert main([str(recipe), "train.steps=2"]) == 0
    loaded = load_drafter(tmp_path / "out", load_backbone(str(tmp_path / "backbone"), device="cpu"))
    assert loaded.vocabulary is not None and len(loaded.vocabulary) == 40
    origin = json.loads((tmp_path / "out" / "headstart.json").read_text())["provenance"]
    assert origin["recipe"]["train"]["steps"] == origin["steps"] == 2 and origin["versions"]["torch"] == torch.__version__
    evaluated = [line for line in read_log(tmp_path / "out") if "tau" in line]
    assert [line["step"] for line in evaluated] == [2] and origin["tau"] == evaluated[0]["tau"] >= 1


def test_neither_accumulation_nor_the_number_of_processes_changes_a_step(tmp_path: Path) -> None:
    """With terms, weights and a share of anchors that could depend on it; test_objective.py does the same for packing and padding."""
    wanted = {"terms": {"ce": 0.1, "lk": 1.0}, "depth_weights": "expected", "chunk_size": 50}
    train = {"steps": 4, "batch_size": 5, "optimizer": "muon", "ema_decay": 0.9}
    recipe = make_recipe(tmp_path, objective=wanted, drafter=KINDS[1] | {"deeper_share": 0.4}, train=train, eval={"prompts": 1})
    assert main([str(recipe), f"save.dir={tmp_path}/whole"]) == 0
    assert main([str(recipe), f"save.dir={tmp_path}/pieces", "train.micro_batch=1", "objective.chunk_size=7"]) == 0
    output = tmp_path / "said"
    assert Forked(2, [str(recipe), f"save.dir={tmp_path}/two"], output).wait() == 0 and "2 processes on cpu" in output.read_text()
    whole, *others = ([line for line in read_log(tmp_path / name) if "loss" in line] for name in ("whole", "pieces", "two"))
    assert len(whole) == train["steps"]
    for other in others:
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in other] == pytest.approx([line[key] for line in whole], rel=1e-4)


def test_autocast_in_bf16_leaves_the_weights_in_fp32(tmp_path: Path) -> None:
    trained = prepare(load_recipe(make_recipe(tmp_path, drafter=KINDS[1], train={"precision": "bf16", "steps": 3})))
    assert train(trained) == 0
    trained.log.close()
    assert {weight.dtype for weight in trained.drafter.parameters()} == {torch.float32}


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path, train={"lr": 1e30, "schedule": "constant", "warmup_ratio": 0.0}, save={"every": 1})
    error = error_of(capsys, "train", recipe)
    assert "at step 2" in error and "lower train.lr" in error and "step-00000001" in error
    assert [folder.name for folder in (tmp_path / "out" / "state").glob("step-*")] == ["step-00000001"]
    load_drafter(tmp_path / "out", load_backbone(str(tmp_path / "backbone"), device="cpu"))


def without(recipe: Path, out: Path, monkeypatch: pytest.MonkeyPatch, forwards: str, *changes: str) -> int:
    """Train to ``out``, with NaN from the given forward passes."""
    monkeypatch.setenv("HEADSTART_TEST_NAN", forwards)
    return main([str(recipe), f"save.dir={out}", "train.non_finite=skip", *changes])


def test_steps_not_finite_can_be_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A step has two forward passes and is skipped as a whole: 2, 5 and 6 of 12. A resumed run continues the count."""
    drafter = {"kind": "tests.helpers.dying", "depth": 2}
    train = {"micro_batch": 2, "ema_decay": 0.5, "schedule": "constant", "warmup_ratio": 0.0}
    recipe = make_recipe(tmp_path, drafter=drafter, train=train, log={"every": 3})
    assert without(recipe, tmp_path / "out", monkeypatch, "3,9,10,12") == 0
    output = capsys.readouterr().err
    assert "steps skipped since their loss or gradient was not finite: 3" in output and "1 steps skipped (not finite)" in output
    lines = [line for line in read_log(tmp_path / "out") if "loss" in line]
    assert [line.get("skipped", 0) for line in lines] == [1, 2, 0, 0] and all(line["loss"] > 0 for line in lines)
    load_drafter(tmp_path / "out", load_backbone(str(tmp_path / "backbone"), device="cpu"))
    assert without(recipe, tmp_path / "parts", monkeypatch, "3", "train.steps=4") == 0
    assert without(recipe, tmp_path / "parts", monkeypatch, "1,4") == 0
    assert "not finite: 3" in capsys.readouterr().err
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "parts")]
    assert weights[0] == weights[1]


def test_a_skipped_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(tmp_path, drafter={"kind": "tests.helpers.dying", "depth": 2}, train={"ema_decay": 0.5, "optimizer": "muon"})
    trained = prepare(load_recipe(recipe, ["train.steps=2", "train.non_finite=skip", "log.every=1"]))
    before = [parameter.clone() for parameter in trained.drafter.parameters()]
    monkeypatch.setenv("HEADSTART_TEST_NAN", "1,2")
    assert train(trained) == 0
    trained.log.close()
    assert all(torch.equal(a, b) for a, b in zip(before, trained.drafter.parameters(), strict=True))
    assert trained.trainers[0].average is not None and not trained.trainers[0].optimizer.state
    assert [(line["loss"], line["skipped"]) for line in read_log(tmp_path / "out") if "loss" in line] == [(None, 1), (None, 1)]


def test_ten_consecutive_skips_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path, drafter={"kind": "tests.helpers.dying", "depth": 2}, save={"every": 1})
    assert without(recipe, tmp_path / "out", monkeypatch, ",".join(map(str, [1, *range(3, 30)])), "train.steps=20") == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: the loss is nan") and "at step 12, the last of 10 such steps in a row" in message
    assert "step-00000011" in message


def test_late_steps_have_seeds(tmp_path: Path) -> None:
    """A step's seed grows with its number, and NumPy takes 32 bits of it."""
    trained = prepare(load_recipe(make_recipe(tmp_path), ["train.steps=1000000", f"seed={2**32 - 1}"]))
    trained.done = 999_999
    assert train(trained) == 0 and trained.done == 1_000_000
    trained.log.close()
    seeds = [micro_batch_seed(2**32 - 1, step, number, 1) for step in (1, 4_294, 4_295, 10**9) for number in (0, 1)]
    assert len({*seeds}) == 8 and all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize(("schedule", "middle", "last"), [("constant", 1.0, 1.0), ("linear", 0.55, 0.101), ("cosine", 0.55, 0.1)])
def test_learning_rate(schedule: str, middle: float, last: float) -> None:
    wanted = Train(lr=2.0, warmup_ratio=0.1, schedule=schedule, min_lr_ratio=0.1)  # type: ignore[arg-type]
    rates = [learning_rate(step, 1000, wanted) / 2.0 for step in range(1, 1001)]
    assert rates[0] == pytest.approx(0.01) and rates[49] == pytest.approx(0.5) and rates[99] == rates[100] == pytest.approx(1.0)
    assert rates[550] == pytest.approx(middle, abs=1e-3) and rates[-1] == pytest.approx(last, abs=1e-3)


STEPS = 8
CONSTANT = {"steps": STEPS, "schedule": "constant", "warmup_ratio": 0.0, "ema_decay": 0.5}


def test_the_average_follows_the_weights_and_replaces_them_in_a_block() -> None:
    layer = torch.nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    average, expected = Average(dict(layer.named_parameters()), 0.4), layer.weight.detach().clone()
    for step in range(1, 9):
        layer.weight.data += torch.randn(2, 3)
        average.update(step)
        decay = min(0.4, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * layer.weight.detach()
        torch.testing.assert_close(average.weights["weight"], expected)
    assert decay == 0.4 and set(average.weights) == {"weight"}
    weight, identity = layer.weight.detach().clone(), layer.weight
    with pytest.raises(KeyError), in_place_of_weights(average):
        torch.testing.assert_close(layer.weight.detach(), expected)
        raise KeyError
    assert torch.equal(layer.weight, weight) and layer.weight is identity
    torch.testing.assert_close(average.weights["weight"], expected)
    with in_place_of_weights(None):
        assert torch.equal(layer.weight, weight)


def test_what_is_saved_is_the_average_and_training_goes_on_from_the_weights(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, drafter={"kind": "eagle3", "depth": 2}, train=CONSTANT, eval={"every": 4})
    assert main([str(recipe), f"save.dir={tmp_path}/average"]) == 0
    assert main([str(recipe), f"save.dir={tmp_path}/weights", "train.ema_decay=null"]) == 0
    with_it, without = (load_file(tmp_path / name / "model.safetensors") for name in ("average", "weights"))
    folder = find_state(tmp_path / "average")
    assert folder is not None
    state = read_state(folder).tensors
    for name, tensor in with_it.items():
        assert torch.equal(state[f"drafter/{name}"], without[name])  # averaging does not disturb training
        assert torch.equal(state[f"average/{name}"], tensor) and not torch.equal(tensor, without[name])
    losses = [[line["loss"] for line in read_log(tmp_path / name) if "loss" in line] for name in ("average", "weights")]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
