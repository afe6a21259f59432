"""transformers reads what is exported for it: its assisted decoding drafts what Headstart drafts and writes what the model writes alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_alone import headstart_drafts
from families import prompts, random_drafter, tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.heads.methods import build_drafter
from headstart.inference.generate import load
from headstart.serving.export import Request, export
from headstart.serving.verify.drafts import EngineSettings
from headstart.serving.verify.transformers import draft
from headstart.support.errors import UserError

VOCAB = 5
"""So few tokens that random heads are right now and then."""
PROMPTS = [(prompt % 4 + 1).tolist() for prompt in prompts((9, 1))]
BLOCK = {"correction": "none", "depth": 4, "layers": 2, "taps": [1, 3, 5]}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny("qwen3", vocab_size=VOCAB).save_pretrained(folder)
    return folder


def saved(on: Path, kind: str, folder: Path, **arguments: Any) -> Path:
    random_drafter(kind, load_backbone(str(on), dtype="fp32", device="cpu"), **arguments).save_pretrained(folder)
    return folder


def exported(heads: Path, to: str, out: Path) -> Path:
    export(Request(str(heads), to, out))
    return out


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize(("kind", "to", "arguments"), [("block", "dflash-hf", BLOCK), ("draft_model", "draft-model", {"layers": 2})])
def test_it_drafts_what_headstart_drafts(model_folder: Path, tmp_path: Path, kind: str, to: str, arguments: dict[str, Any]) -> None:
    checkpoint = saved(model_folder, kind, tmp_path / "heads", **arguments)
    folder = exported(checkpoint, to, tmp_path / "out")
    heads = load(checkpoint, load_backbone(str(model_folder), dtype="fp32", device="cpu"), capture="off")
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for depth, ends in ((4, ()), (2, (3,))):
        settings = EngineSettings(depth, 16, ends)
        ours, theirs = headstart_drafts(heads, PROMPTS, settings), draft(folder, str(model_folder), PROMPTS, settings)
        assert theirs == ours and sum(one.kept for transcript in theirs for one in transcript.rounds) > 0
        for transcript, prompt in zip(theirs, PROMPTS, strict=True):
            ids, end = torch.tensor([prompt]), list(ends) or None
            alone = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=end)
            assert list(transcript.text) == alone[0].tolist()


def test_the_documented_examples_run(tmp_path: Path) -> None:
    """The code of docs/serving.md, on the embedded backbone; all of it writes what the model writes alone."""
    on = load_backbone("embedded", dtype="fp32", device="cpu")
    on.model.save_pretrained(tmp_path / "model")
    load_tokenizer("embedded").save_pretrained(tmp_path / "model")
    for name, kind, arguments in (
        ("eagle3", "eagle3", {}), ("dflash", "block", {"correction": "none", "layers": 1}), ("draft-model", "draft_model", {"layers": 1})
    ):  # fmt: skip
        build_drafter(kind, on, arguments).save_pretrained(tmp_path / name)
    exported(tmp_path / "dflash", "dflash-hf", tmp_path / "for-transformers")
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    section = page.partition("\n## transformers\n")[2].partition("\n## ")[0]
    code = "".join(re.findall(r"```python\n(.*?)```", section, re.S)).replace("max_new_tokens=32", "max_new_tokens=12")
    scope: dict[str, Any] = {}
    exec(code.replace("Qwen/Qwen3-0.6B", str(tmp_path / "model")).replace("out/", f"{tmp_path}/"), scope)
    model, one = scope["model"], scope["one"]
    assert torch.equal(scope["text"], model.generate(**scope["inputs"], max_new_tokens=12))
    alone = model.generate(**one, max_new_tokens=12)
    assert all(torch.equal(scope[name], alone) for name in ("dflash", "drafted"))


def test_the_command_on_a_backbone_without_a_tokenizer(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It verifies on texts that the backbone wrote; AutoTokenizer gives an empty tokenizer for this folder."""
    folder = saved(model_folder, "draft_model", tmp_path / "heads", layers=1)
    command = ["verify", str(folder), "--engine", "transformers", "--depth", "2", "--max-new-tokens", "6", "--threads", "1"]
    assert main(command) == 0 and capsys.readouterr().out.startswith("EQUAL")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    assert main([*command, "--prompts", str(tmp_path / "prompts.jsonl")]) == 2
    assert "no tokenizer" in capsys.readouterr().err


def refused(folder: Path, backbone: Path, depth: int = 3) -> str:
    with pytest.raises(UserError) as caught:
        draft(folder, str(backbone), PROMPTS, EngineSettings(depth, 4))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_it_does_not_read_is_refused(model_folder: Path, tmp_path: Path) -> None:
    for kind, arguments in (("eagle3", {}), ("medusa", {}), ("block", BLOCK), ("draft_model", {"layers": 1, "parallel": True, "depth": 3})):
        heads = saved(model_folder, kind, tmp_path / kind, **arguments)
        assert "use --engine reference or vllm" in refused(heads, model_folder)
    folder = exported(tmp_path / "block", "dflash-hf", tmp_path / "out")
    assert "use at most 4" in refused(folder, model_folder, depth=5)
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("encoder.fc", "fc"): tensor for name, tensor in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    assert "1 missing tensors" in (fault := refused(folder, model_folder)) and "encoder.fc.weight" in fault
    save_file(weights | {"encoder.fc.weight": torch.zeros(3, 3)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert "1 mismatched tensors" in (fault := refused(folder, model_folder)) and "encoder.fc.weight" in fault
    (folder / "model.safetensors").write_bytes(b"half")
    assert "does not load" in refused(folder, model_folder)
    (folder / "config.json").write_text("{")
    assert "config.json is damaged (not valid JSON" in refused(folder, model_folder)
    shutil.rmtree(folder)
    assert "config.json: there is no such file" in refused(folder, model_folder)
    causal = saved(model_folder, "block", tmp_path / "causal", **BLOCK, causal=True)
    with pytest.raises(UserError, match="causal inside a block"):
        exported(causal, "dflash-hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    tiny("llama", vocab_size=9, num_hidden_layers=1).save_pretrained(tmp_path / "other")
    assert "another vocabulary" in refused(tmp_path / "other", model_folder)
    assert json.loads((tmp_path / "block" / "config.json").read_text())["model_type"] == "qwen3"
