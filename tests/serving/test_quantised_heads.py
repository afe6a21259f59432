"""Heads that others quantised in the layout of compressed-tensors, and the weights that their values stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import random_drafter, tiny
from safetensors.torch import load_file, save_file

from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_backbone
from headstart.serving.layouts.files import dequantized
from headstart.support.errors import UserError


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


def test_eight_bit_floats_are_read() -> None:
    tensors = {"a.weight": torch.tensor([[-3.0, 4.0]]).to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor([[0.5]])}
    assert dequantized(quantised_by_others(format="float-quantized"), tensors)["a.weight"].tolist() == [[-1.5, 2.0]]


def test_whole_numbers_unpacked_are_read() -> None:
    tensors = {"a.weight": torch.tensor([[-3, 4]], dtype=torch.int8), "a.weight_scale": torch.tensor([[0.5]])}
    assert dequantized(quantised_by_others(format="int-quantized"), tensors)["a.weight"].tolist() == [[-1.5, 2.0]]


@pytest.mark.parametrize(
    ("changed", "stated", "message"),
    [
        ({"a.weight_zero_point": torch.ones(6, 1)}, {}, "zero points or in the order of activations are not read"),
        ({"a.weight_packed": torch.zeros(6, 4, dtype=torch.int32)}, {}, r"weight_packed \[6, 4\] holds no values of 4 or 8 bits"),
        ({"a.weight_scale": torch.ones(6, 3)}, {}, r"\[6, 3\] scales do not divide a weight of \[6, 20\] evenly"),
        ({}, {"quant_method": "gptq", "format": None}, "quantised by gptq; read are compressed-tensors' pack-quantized"),
        ({}, {"format": "nvfp4-pack-quantized"}, "quantised by compressed-tensors nvfp4-pack-quantized; read are"),
        ({}, {"transform_config": {"config_groups": {}}}, "with other weights left out or rotated"),
        ({}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with other weights left out or rotated"),
    ],
)  # fmt: skip
def test_what_is_not_read_of_others_is_one_line(changed: dict[str, torch.Tensor], stated: dict[str, Any], message: str) -> None:
    tensors = packed(torch.randn(6, 20), 4, (6, 1))[0] | changed
    with pytest.raises(UserError, match=message):
        dequantized(quantised_by_others(**stated), tensors)


def test_heads_in_four_bits_are_imported_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("llama").save_pretrained(tmp_path / "backbone")
    random_drafter("eagle3", load_backbone(str(tmp_path / "backbone"))).save_pretrained(tmp_path / "heads")
    out = tmp_path / "out"
    assert main(["export", "--heads", str(tmp_path / "heads"), "--to", "vllm", "--out", str(out)]) == 0
    tensors, stands_for = load_file(out / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, stands_for[name] = packed(tensors.pop(name), 4, (1, 2))
        tensors |= {key.replace("a.weight", name): part for key, part in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(json.loads((out / "config.json").read_text()) | quantised_by_others()))
    imported, backbone = tmp_path / "imported", str(tmp_path / "backbone")
    assert main(["import", str(out), "--backbone", backbone, "--out", str(imported), "--max-new-tokens", "4"]) == 0
    assert "quantised weights became the fp32 weights" in (imported / "headstart.json").read_text()
    found = load_file(imported / "model.safetensors")
    assert main(["verify", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "the folder's weights are quantised (pack-quantized), which changes drafts by itself" in printed and "damaged" not in printed
    assert len(stands_for) == 7 and all(torch.allclose(found[name], weight) for name, weight in stands_for.items())
