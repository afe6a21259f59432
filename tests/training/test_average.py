"""The moving average of the weights: its value and where it is used; tests/heads/test_every_head.py resumes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_run import make_recipe, read_log

from headstart.cli.train import main
from headstart.training.run.checkpoint import find_state, read_state
from headstart.training.run.optimizer import Average, in_place_of_weights

STEPS = 8
CONSTANT = {"steps": STEPS, "schedule": "constant", "warmup_ratio": 0.0, "ema_decay": 0.5}


pytestmark = pytest.mark.usefixtures("on_the_cpu")


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


def test_features_are_refused_before_training_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path, objective={"terms": {"features": 1.0, "ce": 0.1}})
    assert main([str(recipe)]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "objective.terms.features" in errors[0] and "Medusa has a readout of its own" in errors[0]
    assert not list((tmp_path / "out").glob("*.safetensors"))
