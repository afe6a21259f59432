"""`headstart export --quantize`: 8-bit weights in the layout of compressed-tensors, and the weights that they stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import random_drafter, tiny
from safetensors.torch import load_file

from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone
from headstart.inference.serving.layouts.quantize import LARGEST, QUANTIZED, dequantized, quantized
from headstart.support.errors import UserError

KINDS: dict[str, dict[str, Any]] = {"eagle3": {"layers": 2}, "eagle": {}, "block": {"correction": "none"}, "medusa": {}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    tiny("llama").save_pretrained(folder / "backbone")
    model = type(tiny("llama")).from_pretrained(folder / "backbone")
    for kind, arguments in KINDS.items():
        random_drafter(kind, Backbone(model), **arguments).save_pretrained(folder / kind)
    return folder


@pytest.mark.parametrize("how", ["int8", "fp8"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle", "block"])
def test_the_written_values_stand_for_the_weights(home, tmp_path, kind, how, capsys):
    out = tmp_path / "out"
    assert main(["export", "--heads", str(home / kind), "--to", "vllm", "--quantize", how, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert f"stored in {how}" in shown and "were not run here" in shown and "nothing changed" not in shown
    tensors, before = (load_file(folder / "model.safetensors") for folder in (out, home / kind))
    restored = dequantized(json.loads((out / "config.json").read_text()), tensors)
    changed = {name for name in before if QUANTIZED.fullmatch(name)}
    assert restored.keys() == before.keys() and len(changed) >= 7 and not any("fc." in name or "lm_head" in name for name in changed)
    for name, weight in before.items():
        if name in changed:
            row = weight.abs().amax(1, keepdim=True)
            worst = row / LARGEST[how] * (0.51 if how == "int8" else 16.1)  # half a step; of fp8's largest, 448 to 416
            assert bool(((restored[name] - weight).abs() <= worst).all()), name
            assert (f"{name}_packed" in tensors) == (how == "int8") and f"{name}_scale" in tensors
        else:
            assert torch.equal(restored[name], weight), name
    assert (out / "model.safetensors").stat().st_size < (home / kind / "model.safetensors").stat().st_size


def test_values_are_packed_as_compressed_tensors_packs_them():
    weight = torch.tensor([[-127.0, 0.0, 1.0, 127.0], [0.0, 0.0, 0.0, 0.0]])
    config, tensors = quantized({}, {"layers.0.mlp.up_proj.weight": weight}, "int8")
    packed = tensors["layers.0.mlp.up_proj.weight_packed"]
    words = [int(word) & 0xFFFFFFFF for word in packed.flatten()]
    assert packed.shape == (2, 1) and words == [0xFF818001, 0x80808080]  # each value plus 128, the first in the lowest bits
    assert tensors["layers.0.mlp.up_proj.weight_shape"].tolist() == [2, 4]
    assert torch.equal(dequantized(config, tensors)["layers.0.mlp.up_proj.weight"], weight)
    stated = config["quantization_config"]
    assert (stated["quant_method"], stated["format"]) == ("compressed-tensors", "pack-quantized")
    assert stated["config_groups"]["group_0"]["input_activations"] is None


def refused(capsys: Any, *argv: object) -> str:
    assert main(["export", *map(str, argv)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_what_no_engine_reads_is_refused(home, tmp_path, capsys):
    out = tmp_path / "out"

    def line(kind: str, to: str) -> str:
        return refused(capsys, "--heads", home / kind, "--to", to, "--quantize", "int8", "--out", out)

    assert "no engine is known to read int8 Medusa heads in the layout medusa" in line("medusa", "medusa")
    assert "in the layout speculators" in line("eagle3", "speculators")
    assert "TensorRT-LLM is not known to read int8 EAGLE-3" in line("eagle3", "trtllm")
    with pytest.raises(UserError, match="rows of 6 values; int8 weights are packed by four"):
        quantized({}, {"layers.0.mlp.up_proj.weight": torch.ones(2, 6)}, "int8")
    with pytest.raises(UserError, match="quantised by gptq; Headstart reads its own"):
        dequantized({"quantization_config": {"quant_method": "gptq"}}, {})
    assert not out.exists()
