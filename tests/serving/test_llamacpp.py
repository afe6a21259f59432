"""`headstart export --to llama.cpp`: keys and tensors of the GGUF file, what is refused, and the file read back."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import yaml
from errors import error_of, output_of
from exported import DV, refused
from families import VOCAB, random_drafter, tiny
from gguf_models import rope_factors
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.serving.export import Request, export
from headstart.serving.layouts.files import PROVENANCE
from headstart.serving.layouts.llamacpp import recipe_values

REFUSED = {
    "drafter.norm_output=false": {"norm_output": True}, "three drafter.taps": {"taps": [1, 3]}, "drafter.layers=1": {"layers": 2},
    "drafter.fc_norm=false": {"fc_norm": True}, "drafter.sliding_window=null": {"sliding_window": 8},
    "drafter.qk_norm=false": {"qk_norm": True},
    "layer.attention_bias=false": {"layer": {"attention_bias": True}},
    "layer.rope_parameters": {"layer": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}},
}  # fmt: skip


LAYER = {
    "attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def saved(home: Path, folder: Path, **arguments: Any) -> str:
    """A folder of random heads for the backbone."""
    drafter = random_drafter("eagle3", load_backbone(str(home / "backbone")), **{"depth": 3, "norm_output": False, **arguments})
    if arguments.get("draft_vocab_size"):
        drafter.use_vocabulary(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:DV])
    drafter.save_pretrained(folder)
    return str(folder)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Channels i and i + half of each attention head, which Llama rotates together, side by side."""
    return torch.stack(weight.view(heads, 2, -1, weight.shape[-1]).unbind(1), 2).reshape(weight.shape)


def test_every_key_and_tensor(home: Path, tmp_path: Path) -> None:
    heads = saved(home, tmp_path / "heads", draft_vocab_size=DV, norm_before_fc=True, norm_before_residual=True)
    report = export(Request(heads, "llama.cpp", tmp_path / "out"))
    file = gguf.GGUFReader(tmp_path / "out" / "eagle3.gguf")
    found = {name.removeprefix("eagle3."): field.contents() for name, field in file.fields.items()}
    stored, config = load_file(tmp_path / "heads" / "model.safetensors"), json.loads((tmp_path / "heads" / "config.json").read_text())
    assert found["general.architecture"] == "eagle3" and found["target_layers"] == [1, 3, 5]
    assert found["target_hidden_size"] == found["embedding_length"] == config["hidden_size"] and found["block_count"] == 1
    assert found["norm_before_fc"] is found["norm_before_residual"] is True and found["vocab_size"] == VOCAB
    assert found["attention.head_count_kv"] == config["num_key_value_heads"] and found["rope.freq_base"] == config["rope_theta"]
    expected = {f"blk.0.{theirs}.weight": stored[f"midlayer.{ours}.weight"] for theirs, ours in LAYER.items()}
    for name, heads_of in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        expected[f"blk.0.attn_{name}.weight"] = interleaved(expected[f"blk.0.attn_{name}.weight"], config[heads_of])
    whole = {"fc": "fc", "enc.output_norm": "input_norm", "output_norm": "norm", "output": "lm_head"}
    expected |= {f"{theirs}.weight": stored[f"{ours}.weight"] for theirs, ours in whole.items()}
    expected["d2t"] = stored["t2d"].nonzero().flatten()
    torch.testing.assert_close({one.name: torch.from_numpy(one.data.copy()) for one in file.tensors}, expected, rtol=0, atol=0)
    assert f"-m BACKBONE.gguf --spec-type draft-eagle3 --spec-draft-model {tmp_path}" in report["launch"]["llama.cpp"]["line"]


BLOCK = {
    "attn_norm.weight": "input_layernorm.weight", "attn_q.weight": "self_attn.q_proj.weight", "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight", "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight", "ffn_gate.weight": "mlp.gate_proj.weight", "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight", "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight", "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}  # fmt: skip
SECOND = {"correction": "selector", "convolution": True, "selector_candidates": 4, "correction_rank": 6, "layers": 2, "depth": 3}


@pytest.mark.parametrize("arguments", [SECOND, {"correction": "none", "depth": 3}], ids=["dflash2", "dflash"])
def test_every_key_and_tensor_of_a_block(home: Path, tmp_path: Path, arguments: dict[str, Any]) -> None:
    drafter = random_drafter("block", load_backbone(str(home / "backbone")), **arguments, taps=[1, 4])
    drafter.save_pretrained(tmp_path / "heads")
    report = export(Request(str(tmp_path / "heads"), "llama.cpp", tmp_path / "out", dtype="bf16"))
    file, ours = gguf.GGUFReader(tmp_path / "out" / "dflash.gguf"), drafter.tensors()
    found = {name.removeprefix("dflash."): field.contents() for name, field in file.fields.items()}
    assert found["general.architecture"] == "dflash" and found["block_size"] == 4 and found["target_layers"] == [1, 4]
    assert found["attention.causal"] is found["sample_from_anchor"] is False and found["tokenizer.ggml.mask_token_id"] == VOCAB - 1
    second = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 4}
    assert {key: found.get(key) for key in second} == (second if arguments is SECOND else dict.fromkeys(second))
    names = {f"blk.{i}.{theirs}": f"layers.{i}.{name}" for theirs, name in BLOCK.items() for i in range(len(drafter.layers))}
    names |= {"fc.weight": "fc.weight", "enc.output_norm.weight": "hidden_norm.weight", "output_norm.weight": "norm.weight"}
    names |= {f"selector_{x}.weight": f"candidate_selector.{x}_codebook" for x in ("predecessor", "successor")}
    names |= {"selector_hidden.weight": "candidate_selector.hidden_projection.weight"}
    assert {one.name for one in file.tensors} == {theirs for theirs, name in names.items() if name in ours}
    for one in file.tensors:
        values, wanted = gguf.quants.dequantize(one.data, one.tensor_type), ours[names[one.name]].bfloat16().float()
        assert torch.equal(torch.from_numpy(values.copy()), wanted) and (one.tensor_type.name == "F32") == (wanted.ndim != 2), one.name
    assert "-m BACKBONE.gguf --spec-type draft-dflash --spec-draft-model" in report["launch"]["llama.cpp"]["line"]
    assert main(["verify", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(("setting", "change"), [
    ("drafter.sliding_window=null", {"sliding_window": 8}), ("drafter.causal=false", {"causal": True}),
    ("drafter.correction=selector", {"convolution": False}), ("layer.rope_parameters", REFUSED["layer.rope_parameters"]),
])  # fmt: skip
def test_blocks_that_llama_cpp_would_draft_otherwise(home: Path, tmp_path: Path, setting: str, change: dict[str, Any]) -> None:
    random_drafter("block", load_backbone(str(home / "backbone")), **SECOND | change).save_pretrained(tmp_path / "heads")
    assert setting in refused(tmp_path, "heads", "llama.cpp", tmp_path / "out")


@pytest.mark.parametrize(("prompt", "note"), [
    ("[x{% if enable_thinking %}?{% endif %}]", 'send chat_template_kwargs {"enable_thinking": false}'),
    ("[x{{ enable_thinking }}]", "train with data.template_kwargs.enable_thinking"),
    ("[x{% if enable_thinking is defined and not enable_thinking %}?{% endif %}]", None),
])  # fmt: skip
def test_the_variable_that_its_server_turns_on(home: Path, tmp_path: Path, prompt: str, note: str | None) -> None:
    shutil.copytree(home / "backbone", tmp_path / "backbone")
    tokenizer = load_tokenizer("embedded")
    tokenizer.chat_template = prompt
    tokenizer.save_pretrained(tmp_path / "backbone")
    notes = export(Request(saved(tmp_path, tmp_path / "heads"), "llama.cpp", tmp_path / "out"))["notes"]
    assert [note is not None and note in line for line in notes if "enable_thinking" in line] == [True] * (note is not None)


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp16"])
def test_what_is_written_is_read_back(home: Path, tmp_path: Path, dtype: Any, capsys: pytest.CaptureFixture[str]) -> None:
    heads = saved(home, tmp_path / "heads", draft_vocab_size=DV)
    export(Request(heads, "llama.cpp", tmp_path / "out", dtype=dtype))
    assert "EQUAL" in output_of(capsys, "verify", str(tmp_path / "out"))
    file = gguf.GGUFReader(tmp_path / "out" / "eagle3.gguf", "r+")
    next(one for one in file.tensors if one.name == "blk.0.attn_k.weight").data[:] = 0
    file.data.flush()
    assert main(["verify", str(tmp_path / "out")]) == 1
    assert "tensor midlayer.self_attn.k_proj.weight is not as in the original heads" in capsys.readouterr().out
    (tmp_path / "out" / PROVENANCE).unlink()
    with (tmp_path / "out" / "eagle3.gguf").open("r+b") as cut:
        cut.truncate(5000)
    assert main(["verify", str(tmp_path / "out"), "--backbone", str(home / "backbone")]) == 2


def test_llama_3s_rotation_is_written_as_factors(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16}  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**tiny("llama").config.to_dict(), "rope_parameters": rope}))
    model.save_pretrained(tmp_path / "backbone")
    export(Request(saved(tmp_path, tmp_path / "heads"), "llama.cpp", tmp_path / "out"))
    factors = next(one.data for one in gguf.GGUFReader(tmp_path / "out" / "eagle3.gguf").tensors if one.name == "rope_freqs.weight")
    assert factors == pytest.approx(rope_factors(model), rel=1e-5) and max(factors) == pytest.approx(8)


@pytest.mark.parametrize("setting", REFUSED)
def test_what_llama_cpp_would_draft_otherwise_is_refused(home: Path, tmp_path: Path, setting: str) -> None:
    saved(home, tmp_path / "heads", **REFUSED[setting])
    message = refused(tmp_path, "heads", "llama.cpp", tmp_path / "out")
    assert message.startswith("llama.cpp does not read") and setting in message and "all the same" not in message


def test_backbones_that_give_no_layers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("gemma3").save_pretrained(tmp_path / "backbone")
    saved(tmp_path, tmp_path / "heads")
    assert "it cannot give heads the layers of a gemma3" in refused(tmp_path, "heads", "llama.cpp", tmp_path / "out")
    error = error_of(capsys, "new-recipe", tmp_path / "backbone", "--for", "llama.cpp", "--out", tmp_path / "recipe.yaml")
    assert "it cannot give heads the layers of a gemma3" in error and not (tmp_path / "recipe.yaml").exists()


def test_a_recipe_for_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its layer is one that llama.cpp rotates, whatever the backbone's are."""
    rope = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 16}
    LlamaForCausalLM(LlamaConfig(**{**tiny("llama").config.to_dict(), "rope_parameters": rope})).save_pretrained(tmp_path / "backbone")
    out = tmp_path / "recipe.yaml"
    command = ["new-recipe", str(tmp_path / "backbone"), "--for", "llama.cpp", "--data", "text", "--memory", "0.8", "--out", str(out)]
    assert main(command) == 0
    drafter = yaml.safe_load(out.read_text())["drafter"]
    assert drafter["norm_output"] is False and drafter["layer"] == {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    assert recipe_values("eagle3", tiny("llama").config) == {"drafter": {"norm_output": False}}
    assert "--for llama.cpp is of --method eagle3" in error_of(capsys, *command, "--method", "medusa", "--overwrite")
