"""`headstart export`: what is written is what was trained, in the layout of an engine."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of, report_of
from exported import D, exported, refused
from families import VOCAB, prompts, random_drafter
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headstart.heads.backbone.adapter import new_adapter
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.serving.export import Request, export
from headstart.serving.layouts.files import PROVENANCE
from headstart.support.files import file_hash

COPIED = {
    "eagle3": "vllm sglang trtllm", "eagle3-small": "vllm", "peagle": "vllm",
    "eagle": "vllm sglang", "dflash": "vllm sglang trtllm", "dspark": "vllm sglang",
    "dflash2": "vllm sglang", "domino": "sglang", "draft_model": "vllm sglang trtllm transformers", "pard": "vllm trtllm", "mlp": "tgi",
}  # fmt: skip
"""Heads whose checkpoint an engine reads as it is."""


@pytest.mark.parametrize("name", COPIED)
def test_a_checkpoint_that_an_engine_reads_is_copied(home: Path, tmp_path: Path, name: str) -> None:
    stored = load_file(home / name / "model.safetensors")
    for engine in COPIED[name].split():
        report, config, tensors = exported(home, name, engine, tmp_path / engine)
        assert tensors.keys() == stored.keys() and all(torch.equal(tensors[key], stored[key]) for key in stored)
        expected = json.loads((home / name / "config.json").read_text())
        assert config == expected | ({"base_model_name_or_path": str(home / "backbone")} if name == "mlp" else {})
        assert "nothing changed" in report["notes"][0] and list(report["launch"]) == [engine]
        assert str(tmp_path / engine) in report["launch"][engine]["line"]
        provenance = json.loads((tmp_path / engine / PROVENANCE).read_text())
        assert provenance["heads"]["sha256"] == file_hash(home / name / "model.safetensors")
        assert provenance["heads"]["path"] == str(home / name) and provenance["backbone"] == str(home / "backbone")


def test_launch_lines(home: Path, tmp_path: Path) -> None:
    line = exported(home, "eagle3", "vllm", tmp_path / "a")[0]["launch"]["vllm"]["line"]
    program, serve, target, flag, config = shlex.split(line)
    assert (program, serve, target, flag) == ("vllm", "serve", str(home / "backbone"), "--speculative-config")
    assert json.loads(config) == {"method": "eagle3", "model": str(tmp_path / "a"), "num_speculative_tokens": 3}
    words = shlex.split(exported(home, "dspark", "sglang", tmp_path / "b")[0]["launch"]["sglang"]["line"])
    assert words[words.index("--speculative-algorithm") + 1] == "DSPARK" and words[-2:] == ["--speculative-dspark-block-size", "4"]
    options = shlex.split(exported(home, "eagle3", "trtllm", tmp_path / "c")[0]["launch"]["trtllm"]["line"])[1]
    assert json.loads(options)["speculative_config"]["eagle3_layers_to_capture"] == [0, 2, 4]
    words = shlex.split(exported(home, "dflash2", "sglang", tmp_path / "f")[0]["launch"]["sglang"]["line"])
    assert words[words.index("--speculative-algorithm") + 1] == "DFLASH" and words[-2:] == ["--speculative-dflash-block-size", "5"]
    assert '"method": "dflash"' in exported(home, "dflash2", "vllm", tmp_path / "g")[0]["launch"]["vllm"]["line"]
    block = exported(home, "dflash", "vllm", tmp_path / "e")[0]["launch"]["vllm"]["line"]
    assert '"num_speculative_tokens": 4' in block  # a block of another length gives other drafts
    pard = exported(home, "pard", "vllm", tmp_path / "d")[0]["launch"]["vllm"]["line"]
    assert '"parallel_drafting": true' in pard and '"method": "draft_model"' in pard
    peagle = exported(home, "peagle", "vllm", tmp_path / "h")[0]["launch"]["vllm"]["line"]
    assert '"parallel_drafting": true' in peagle and '"method": "eagle3"' in peagle


def test_paths_of_a_launch_line_are_absolute(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    request = Request("eagle3", "vllm", tmp_path / "out", "backbone")
    line = export(request)["launch"]["vllm"]["line"]
    assert f"vllm serve {home / 'backbone'} " in line and str(tmp_path / "out") in line


def test_dtype_is_written_and_stated(home: Path, tmp_path: Path) -> None:
    _, config, tensors = exported(home, "eagle3-small", "vllm", tmp_path / "out", dtype="bf16")
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert kinds.pop("d2t") == torch.int64 and kinds.pop("t2d") == torch.bool and {*kinds.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "name,layout,head", [("medusa-small", "medusa", "{}.2.weight"), ("mlp-small", "mlp-speculator", "speculator.head.{}.weight")]
)
def test_truncated_output_layers_are_written_over_all_tokens(home: Path, tmp_path: Path, name: str, layout: str, head: str) -> None:
    report, config, tensors = exported(home, name, layout, tmp_path / "out")
    stored = load_file(next((home / name).glob("*.safetensors")))
    drafted = stored["t2d"].nonzero().flatten()
    hidden = torch.randn(200, D, generator=torch.Generator().manual_seed(1))
    for k in range(2):
        full, small = tensors[head.format(k)], stored[head.format(k)]
        assert list(full.shape) == [VOCAB, D]
        assert torch.equal((hidden @ full.T).argmax(-1), drafted[(hidden @ small.T).argmax(-1)])
    assert "draft_vocab_size" not in config and not {"d2t", "t2d"} & set(tensors)
    assert any("whole vocabulary" in note for note in report["notes"])


def test_medusa_is_written_for_three_readers(home: Path, tmp_path: Path) -> None:
    report, config, tensors = exported(home, "medusa", "medusa", tmp_path / "out")
    assert "architectures" not in config and config["medusa_fc_bias"] and config["base_model_name_or_path"] == str(home / "backbone")
    pickled = torch.load(tmp_path / "out" / "medusa_lm_head.pt", weights_only=True)
    assert pickled.keys() == tensors.keys() and all(torch.equal(pickled[key], tensors[key]) for key in tensors)
    assert list(report["launch"]) == ["tgi", "vllm", "trtllm"]  # engines of today first
    assert "up to 0.32" in report["launch"]["vllm"]["support"]


def test_mtp_modules_are_stitched_into_a_copy(home: Path, tmp_path: Path) -> None:
    report, config, tensors = exported(home, "mtp", "mtp-stitch", tmp_path / "out")
    own = load_file(home / "mtp" / "model.safetensors")
    assert own.keys() < tensors.keys() and all(torch.equal(tensors[name], own[name]) for name in own)
    assert config["num_nextn_predict_layers"] == 1 and report["launch"] == {} and (tmp_path / "out" / PROVENANCE).is_file()
    assert "deepseek modules" in report["notes"][1]
    assert "--dtype bf16 is not for mtp-stitch" in refused(home, "mtp", "mtp-stitch", tmp_path / "b", dtype="bf16")
    assert "--to mtp-stitch writes" in refused(home, "mtp", "vllm", tmp_path / "b")


def adapted(home: Path, folder: Path, dora: bool = False) -> Backbone:
    on = load_backbone(str(home / "backbone"))
    on.adapter = new_adapter(on.model, 4, 8.0, 0.0, "all-linear", dora)
    torch.manual_seed(3)
    for name, weight in on.adapter.parameters.items():
        if "lora" in name:
            weight.data.normal_(std=0.2)
    random_drafter("medusa", on, depth=2).save_pretrained(folder)
    return on


def test_an_adapter_is_merged_or_kept(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    on, ids = adapted(home, tmp_path / "heads"), prompts((9,))[0][None]
    report = export(Request(str(tmp_path / "heads"), "medusa", tmp_path / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "backbone", dtype=torch.float32)
    assert torch.allclose(merged(ids).logits, on.model(ids).logits, atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(home / "backbone", dtype=torch.float32)
    assert not torch.allclose(merged(ids).logits, plain(ids).logits, atol=1e-2)
    assert f"vllm serve {tmp_path}/merged/backbone" in report["launch"]["vllm"]["line"]
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["base_model_name_or_path"] == f"{tmp_path}/merged/backbone"
    kept = export(Request(str(tmp_path / "heads"), "medusa", tmp_path / "kept", adapter="keep"))
    assert (tmp_path / "kept" / "adapter" / "adapter_model.safetensors").is_file() and list(kept["launch"]) == ["vllm"]
    assert f"--enable-lora --max-lora-rank 8 --lora-modules adapted={tmp_path}/kept/adapter" in kept["launch"]["vllm"]["line"]
    assert "is for vLLM" in refused(tmp_path, "heads", "tgi", tmp_path / "no", adapter="keep")
    adapted(home, tmp_path / "dora", dora=True)
    assert "DoRA" in refused(tmp_path, "dora", "medusa", tmp_path / "no", adapter="keep")
    assert "without an adapter" in refused(home, "medusa", "medusa", tmp_path / "no", adapter="keep")


def test_the_command(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", "--heads", str(home / "eagle3"), "--out", str(tmp_path / "out"), "--to"]
    assert report_of(tmp_path, *arguments, "vllm")["layout"] == "eagle3"
    printed = capsys.readouterr().out
    assert "layout eagle3" in printed and "vllm serve" in printed and "run in 0.32.0, 0.33.0" in printed
    error_of(capsys, *arguments, "vllm")


# `headstart export --to openvino`: the checkpoint as it is, the lines that convert and use it, and what is refused.

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
