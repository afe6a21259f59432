"""`headstart export --to eagle4`: every key and tensor, the tokens that its low rank chooses, what is refused, and heads read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import output_of
from exported import refused
from families import random_drafter, read, texts
from safetensors.torch import load_file

from headstart import Backbone, load, load_backbone
from headstart.heads.own_readout import largest
from headstart.serving.export import Request, export
from headstart.serving.layouts.files import read_files
from headstart.serving.reading import build, layout_of

ARGUMENTS = {"depth": 3, "fc_norm": True, "shortlist": {"rank": 6, "candidates": 9}, "sliding_window": 8}
LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
         "hidden_norm", "input_layernorm", "post_attention_layernorm")  # fmt: skip
REFUSED = {
    "drafter.norm_output=true": {"norm_output": False}, "drafter.fc_norm=true": {"fc_norm": False},
    "drafter.qk_norm=false": {"qk_norm": True},
    "drafter.norm_before_residual=false": {"norm_before_residual": True}, "three drafter.taps": {"taps": [1, 3]},
    "drafter.layers=1": {"layers": 2}, "attention_bias=false": {"layer": {"attention_bias": True}},
    "drafter.draft_vocab_size=null": {"draft_vocab_size": 32}, "drafter.shortlist=": {"shortlist": None},
}  # fmt: skip


def saved(home: Path, folder: Path, fit: bool = True, **arguments: Any) -> str:
    """A folder of random heads for the backbone, with a shortlist as at the end of training."""
    drafter = random_drafter("eagle3", load_backbone(str(home / "backbone")), **{**ARGUMENTS, **arguments})
    if fit and drafter.config.shortlist is not None:
        drafter.fit_shortlists(read(drafter.backbone, texts(2, 40, seed), drafter) for seed in range(4))
    drafter.save_pretrained(folder)
    return str(folder)


def test_every_key_and_tensor(home: Path, on: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads, out = saved(home, tmp_path / "heads"), tmp_path / "out"
    assert "it was not tried in an engine" in output_of(capsys, "export", "--heads", heads, "--to", "eagle4", "--out", str(out))
    config, found = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle4"] and config["eagle_config"] == {
        "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]}  # fmt: skip
    assert config["efficient_lm_head_config"] == {"type": "low_rank", "rank": 6, "num_candidates": 9}
    assert config["layer_types"] == ["sliding_attention"] and (config["sliding_window"], config["use_sliding_window"]) == (8, True)
    assert config["fc_norm"] is config["norm_output"] is True
    assert not {"draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"} & config.keys()
    assert found.keys() == {
        "fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight", *(f"fc_norm.{i}.weight" for i in range(3)),
        "efficient_lm_head.weight", "efficient_lm_head_down_proj.weight", *(f"layers.0.{part}.weight" for part in LAYER),
    }  # fmt: skip
    assert torch.equal(found["embed_tokens.weight"], on.embed.weight)
    drafter: Any = load(heads, on).drafter
    hidden_MD = torch.randn(50, on.dim, generator=torch.Generator().manual_seed(0))
    states_MD = drafter.output_state(hidden_MD)
    low_MV = states_MD @ found["efficient_lm_head_down_proj.weight"].T @ found["efficient_lm_head.weight"].T
    exact_MV = drafter.draft_logits(hidden_MD, 0).isclose(states_MD @ drafter.lm_head.weight.T, rtol=0, atol=1e-6)
    assert exact_MV.sum() < exact_MV.numel() / 2 and bool(exact_MV.gather(1, largest(low_MV, 9)[1]).all()), "other tokens are exact"


def test_read_back_they_are_the_same_heads(home: Path, on: Backbone, tmp_path: Path) -> None:
    heads = saved(home, tmp_path / "heads")
    export(Request(heads, "eagle4", tmp_path / "out"))
    files, before = read_files(str(tmp_path / "out")), load(heads, on).drafter
    layout = layout_of(files)
    readings = layout.parse(files, on).readings()
    assert layout.title == "EAGLE-4" and len(readings) == 1, "its keys leave nothing open"
    assert "the output layer of low rank is left out" in readings[0].notes[-1]
    drafter = build(readings[0], on, "out")
    assert before is not None and drafter.taps == before.taps and drafter.config.sliding_window == 8
    assert all(torch.equal(tensor, before.tensors()[name]) for name, tensor in drafter.tensors().items())


@pytest.mark.parametrize("advice", REFUSED)
def test_what_the_layout_does_not_hold(home: Path, tmp_path: Path, advice: str) -> None:
    out = tmp_path / "out"
    words = refused(home, saved(home, tmp_path / "heads", **REFUSED[advice]), "eagle4", out)
    assert "the layout eagle4 does not hold" in words and advice in words and words.endswith("or export --to eagle3") and not out.exists()


def test_before_the_end_of_training_there_is_no_shortlist(home: Path, tmp_path: Path) -> None:
    assert "it has a shortlist" in refused(home, saved(home, tmp_path / "heads", fit=False), "eagle4", tmp_path / "out")
