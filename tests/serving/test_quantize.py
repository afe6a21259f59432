"""`headstart quantize`: heads with weights of 4 bits, which draft as before."""

import json
from pathlib import Path

import pytest
import torch
from errors import error_of, report_of
from families import random_drafter, tiny
from safetensors.torch import load_file

from headstart import Backbone, load
from headstart.cli.main import main
from headstart.serving.quantize import quantize, rounded
from headstart.serving.reading import Wishes, measure
from headstart.support.errors import UserError


def most_numbers(weight_OI: torch.Tensor) -> int:
    """The most different numbers among 32 inputs of an output."""
    return max(len(group.unique()) for group in weight_OI.float().unflatten(1, (-1, 32)).flatten(0, 1))


def test_rounding_by_inputs_changes_outputs_least() -> None:
    torch.manual_seed(0)
    weight_OI, x_XI = torch.randn(24, 96), torch.randn(400, 8) @ torch.randn(8, 96) + 0.1 * torch.randn(400, 96)
    found = rounded(weight_OI, x_XI.T @ x_XI)
    alone = rounded(weight_OI, torch.eye(96))  # each number by itself
    errors = [((one - weight_OI) @ x_XI.T).norm() / (weight_OI @ x_XI.T).norm() for one in (found, alone)]
    assert most_numbers(found) <= 16 and torch.equal(found, found.bfloat16().float())
    assert errors[0] < 0.6 * errors[1] and errors[1] < 0.2


def test_the_heads_that_ship_are_rounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    found = report_of(tmp_path, "quantize", "embedded", "--out", out, "--max-new-tokens", "12")
    said = capsys.readouterr().out
    assert said.startswith("9 layers of 4 bits; on 40 prompts of prompts.jsonl: tau ")
    assert found["before"]["tau"] > 2 and found["after"]["tau"] > 0.95 * found["before"]["tau"]
    weights = load_file(out / "model.safetensors")
    assert all(most_numbers(weights[f"{name}.weight"]) <= 16 for name in found["layers"])
    card = json.loads((out / "headstart.json").read_text())
    assert card["provenance"]["quantized"] == found
    assert main(["generate", "--heads", str(out), "--max-new-tokens", "8", "def read_config(path):"]) == 0


@pytest.mark.parametrize("kind", ["medusa", "block", "mtp"])
def test_heads_of_other_kinds(kind: str, tmp_path: Path) -> None:
    on = Backbone(tiny("llama", hidden_size=64, intermediate_size=96))
    random_drafter(kind, on).save_pretrained(tmp_path / "heads")
    report = quantize(str(tmp_path / "heads"), tmp_path / "out", lambda: on, Wishes(new_tokens=8))
    drafter = load(tmp_path / "out", on).drafter
    assert report["layers"] and drafter is not None
    layers = dict(drafter.named_modules())
    assert all(most_numbers(layers[name].weight) <= 16 for name in report["layers"])
    assert measure(drafter, [torch.tensor([1, 2, 3])], 8)["passes"]


def test_wrong_heads_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "full" in error_of(capsys, "quantize", "embedded", "--out", tmp_path / "full")
    on = Backbone(tiny("llama", hidden_size=48, intermediate_size=80))
    random_drafter("medusa", on).save_pretrained(tmp_path / "heads")
    with pytest.raises(UserError, match="none of its layers has inputs that are a multiple of 32"):
        quantize(str(tmp_path / "heads"), tmp_path / "out", lambda: on, Wishes())
    assert not (tmp_path / "out").exists()
