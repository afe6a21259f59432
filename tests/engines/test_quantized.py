"""vLLM loads 8-bit heads exported here: its drafts are those of the weights that the 8-bit values stand for, token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines_alone import headstart
from safetensors.torch import load_file
from trained import HEADS, trained

from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.checkpoint import load_drafter
from headstart.inference.generate import SpeculativeModel
from headstart.inference.serving.export import Request, export
from headstart.inference.serving.layouts.quantize import How, dequantized
from headstart.inference.serving.verify import decode, vllm
from headstart.inference.serving.verify.drafts import EngineSettings, mean_acceptance_length


@pytest.mark.parametrize("how", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["eagle3", "eagle", "dflash"])
def test_vllm_drafts_with_the_quantised_weights(
    name: str, how: How, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, out, settings = trained(name), tmp_path / "out", EngineSettings(HEADS[name].depth, 24)
    export(Request(str(heads), "vllm", out, dtype="fp32", quantize=how))
    monkeypatch.setattr(vllm, "DRIVER", Path(__file__).with_name("dequantizing_driver.py"))
    served, _ = vllm.serve(out, "embedded", prompts, settings)

    drafter = load_drafter(heads, load_backbone("embedded", dtype="fp32", device="cpu"))
    drafter.load_tensors(dequantized(json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")))
    assert served == decode.headstart_drafts(SpeculativeModel(drafter.backbone, drafter), prompts, settings)
    print(f"{name} {how}: mean acceptance length {mean_acceptance_length(served):.3f}, "
          f"as trained {mean_acceptance_length(headstart(heads, 'embedded', prompts, settings)):.3f}")  # fmt: skip
