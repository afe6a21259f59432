"""`headstart export --quantize`: 8-bit weights in the layout of compressed-tensors, and the weights that they stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import random_drafter, tiny
from safetensors.torch import load_file, save_file

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


def packed(weight: torch.Tensor, bits: int, scales: tuple[int, int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Round a weight to values of so many bits, and pack them a value at a time; returns the tensors and what they stand for."""
    rows, width = weight.shape
    blocks = weight.view(scales[0], rows // scales[0], scales[1], width // scales[1])
    scale = blocks.abs().amax((1, 3)) / (2 ** (bits - 1) - 1)
    whole = (blocks / scale[:, None, :, None]).round()
    words = torch.zeros(rows, -(-width * bits // 32), dtype=torch.int64)
    for column in range(width):
        words[:, column * bits // 32] += (whole.view(rows, width)[:, column].long() + 2 ** (bits - 1)) << (column * bits % 32)
    parts = {"_packed": words.to(torch.int32), "_scale": scale, "_shape": torch.tensor([rows, width])}
    return {f"a.weight{end}": part for end, part in parts.items()}, (whole * scale[:, None, :, None]).view(rows, width)


def quantised_by_others(**changed: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}} | changed}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scales", [(6, 5), (6, 1), (1, 1), (3, 2)])
def test_what_others_pack_is_read(bits: int, scales: tuple[int, int]) -> None:
    tensors, want = packed(torch.randn(6, 20 if scales[1] != 2 else 18), bits, scales)
    found = dequantized(quantised_by_others(), tensors | {"norm.weight": torch.ones(3)})
    assert found.keys() == {"a.weight", "norm.weight"}
    torch.testing.assert_close(found["a.weight"], want)
    no_zero = {"a.weight_zero_point": torch.zeros(6, 1, dtype=torch.int32)}
    assert torch.equal(dequantized(quantised_by_others(), tensors | no_zero)["a.weight"], found["a.weight"])


def test_whole_numbers_unpacked_are_read() -> None:
    tensors = {"a.weight": torch.tensor([[-3, 4]], dtype=torch.int8), "a.weight_scale": torch.tensor([[0.5]])}
    assert dequantized(quantised_by_others(format="int-quantized"), tensors)["a.weight"].tolist() == [[-1.5, 2.0]]


@pytest.mark.parametrize(
    ("changed", "stated", "message"),
    [
        ({"a.weight_zero_point": torch.ones(6, 1)}, {}, "zero points or in the order of activations are not read"),
        ({"a.weight_packed": torch.zeros(6, 4, dtype=torch.int32)}, {}, r"weight_packed \[6, 4\] holds no values of 4 or 8 bits"),
        ({"a.weight_scale": torch.ones(6, 3)}, {}, r"\[6, 3\] scales do not divide a weight of \[6, 20\] evenly"),
        ({}, {"format": "nvfp4-pack-quantized"}, "quantised by compressed-tensors nvfp4-pack-quantized; read are"),
        ({}, {"transform_config": {"config_groups": {}}}, "with other weights left out or rotated"),
        ({}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with other weights left out or rotated"),
    ],
)  # fmt: skip
def test_what_is_not_read_of_others_is_one_line(changed: dict[str, torch.Tensor], stated: dict[str, Any], message: str) -> None:
    tensors = packed(torch.randn(6, 20), 4, (6, 1))[0] | changed
    with pytest.raises(UserError, match=message):
        dequantized(quantised_by_others(**stated), tensors)


def test_heads_in_groups_are_imported_and_not_verified_against_others(home: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert main(["export", "--heads", str(home / "eagle3"), "--to", "vllm", "--out", str(out)]) == 0
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if QUANTIZED.fullmatch(name)]:
        parts, _ = packed(tensors.pop(name), 4, (1, 2))
        tensors |= {key.replace("a.weight", name): part for key, part in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(json.loads((out / "config.json").read_text()) | quantised_by_others()))
    backbone = str(home / "backbone")
    assert main(["import", str(out), "--backbone", backbone, "--out", str(tmp_path / "imported"), "--max-new-tokens", "4"]) == 0
    assert "quantised weights became the fp32 weights" in (tmp_path / "imported" / "headstart.json").read_text()
    capsys.readouterr()
    assert main(["verify", str(out), "--heads", str(home / "eagle3"), "--backbone", backbone, "--max-new-tokens", "4"]) == 2
    assert "is quantised in another way than export --quantize does" in capsys.readouterr().err


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
    with pytest.raises(UserError, match="quantised by gptq; read are compressed-tensors' pack-quantized"):
        dequantized({"quantization_config": {"quant_method": "gptq"}}, {})
    assert not out.exists()
