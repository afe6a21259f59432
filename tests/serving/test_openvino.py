"""`headstart export --to openvino`: the checkpoint as it is, the lines that convert and use it, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from exported import exported, refused
from families import random_drafter
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.backbone.backbone import load_backbone
from headstart.serving.export import Request, export

REFUSED: dict[str, dict[str, Any]] = {
    "drafter.norm_output=false": {"norm_output": True}, "three drafter.taps": {"taps": [1, 3]},
    "drafter.taps from 1 on": {"taps": [0, 5, 8]},
    "drafter.layers=1": {"layers": 2}, "drafter.fc_norm=false": {"fc_norm": True}, "drafter.sliding_window=null": {"sliding_window": 8},
    "drafter.norm_before_fc=false": {"norm_before_fc": True}, "drafter.norm_before_residual=false": {"norm_before_residual": True},
    "drafter.qk_norm=false": {"qk_norm": True}, "layer.attention_bias=false": {"layer": {"attention_bias": True}},
}  # fmt: skip


def saved(folder: Path, of: int = 10, **arguments: Any) -> str:
    """A backbone of so many layers, and a folder of random heads for it."""
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=of, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(folder / "backbone")
    drafter = random_drafter("eagle3", load_backbone(str(folder / "backbone")), **{"depth": 3, "norm_output": False, **arguments})
    drafter.save_pretrained(folder / "heads")
    return str(folder / "heads")


def test_the_checkpoint_is_written_as_it_is(tmp_path: Path) -> None:
    heads = saved(tmp_path)
    report, config, tensors = exported(tmp_path, "heads", "openvino", tmp_path / "out")
    plain, theirs, same = exported(tmp_path, "heads", "vllm", tmp_path / "vllm")
    assert plain["layout"] == "eagle3" and config == theirs and tensors.keys() == same.keys() and "midlayer.mlp.up_proj.weight" in tensors
    line = report["launch"]["openvino"]["line"]
    assert line.count("optimum-cli export openvino --task text-generation-with-past") == 2 and "num_assistant_tokens=3" in line
    assert '<hidden_layers_list value="1 4 6" />' in line and config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert any("draft chains" in note for note in report["notes"])
    assert export(Request(heads, "openvino", tmp_path / "bf16", dtype="bf16"))["layout"] == "openvino"


@pytest.mark.parametrize("setting", REFUSED)
def test_what_openvino_would_draft_otherwise_is_refused(tmp_path: Path, setting: str) -> None:
    saved(tmp_path, **REFUSED[setting])
    message = refused(tmp_path, "heads", "openvino", tmp_path / "out")
    assert message.startswith("OpenVINO does not read") and setting in message


def test_backbones_of_few_layers_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, of=8)
    assert "backbones of at least 10 layers; this one has 8" in refused(tmp_path, "heads", "openvino", tmp_path / "out")
