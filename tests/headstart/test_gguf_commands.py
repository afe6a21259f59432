"""Every command on a backbone from a GGUF file, of which nothing else is there: no config.json, tokenizer or safetensors."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of, output_of, report_of
from gguf_models import chat_model, write_gguf
from small_run import train_once
from transformers import GenerationConfig

import headstart
from headstart.cli.main import main
from headstart.heads.backbone.fingerprint import tokenizer_digest
from headstart.heads.backbone.model_config import end_tokens, read_end_tokens
from headstart.serving.verify.vllm import VLLM
from headstart.training.recipe.recipe import load_recipe
from headstart.training.recipe.yaml_text import dump_yaml

TURNS = [("What is two and two?", "It is four."), ("And three?", "Six, I think."), ("What is it?", "Four, and six.")]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file, conversations, prompts, and a recipe that trains heads in three steps."""
    root = tmp_path_factory.mktemp("house")
    write_gguf(root / "chat.gguf", *chat_model(), kind="Q8_0")
    rows = [{"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]} for ask, say in 8 * TURNS]
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "prompts.jsonl").write_text('{"prompt": "What is two?"}\n{"prompt": "And three?"}\n')
    recipe: dict[str, Any] = {
        "backbone": {"path": str(root / "chat.gguf"), "dtype": "bf16"},
        "drafter": {"kind": "eagle3", "depth": 3, "draft_vocab_size": 64},
        "data": {"train": str(root / "chats.jsonl"), "eval_rows": 2, "max_length": 64},
        "train": {"steps": 3, "batch_size": 4, "lr": 1e-3, "precision": "no"},
        "eval": {"prompts": 1, "max_new_tokens": 8},
        "save": {"dir": str(root / "heads")},
    }
    (root / "recipe.yaml").write_text(dump_yaml(recipe))
    return root


@pytest.fixture
def at(house: Path, monkeypatch: pytest.MonkeyPatch, on_the_cpu: None) -> Path:
    monkeypatch.chdir(house)
    return house


@pytest.fixture(scope="module")
def trained(house: Path) -> Path:
    return train_once(house / "recipe.yaml") / "heads"


def test_training_keeps_where_the_weights_are_from(trained: Path, house: Path) -> None:
    card = json.loads((trained / "headstart.json").read_text())
    assert card["backbone"] == str(house / "chat.gguf") and card["provenance"]["recipe"]["backbone"]["path"] == card["backbone"]
    types = {"Q8_0": 30, "F32": 9}
    assert card["provenance"]["gguf"] | {"bytes": 0} == {"file": "chat.gguf", "bytes": 0, "architecture": "llama", "types": types}


def test_heads_name_their_tokenizer(trained: Path, at: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on, own = headstart.load_backbone("chat.gguf", device="cpu"), headstart.load_tokenizer("chat.gguf")
    apart = headstart.load_tokenizer("chat.gguf")
    apart.add_tokens(["12 eggs"])
    card = json.loads((trained / "headstart.json").read_text())
    assert card["contract"]["tokenizer"] == tokenizer_digest(own) != tokenizer_digest(apart) and "tokenizer" not in card["provenance"]
    line = "heads was trained with a tokenizer that gives other token ids for some texts than this one: fewer drafts may be accepted"
    shutil.copytree(trained, tmp_path / "earlier")
    del card["contract"]["tokenizer"]
    (tmp_path / "earlier" / "headstart.json").write_text(json.dumps(card))
    for path, tokenizer, lines in (("heads", own, []), ("heads", apart, [line]), (tmp_path / "earlier", apart, [])):
        caplog.clear()
        headstart.load(path, on, tokenizer=tokenizer, allow_finetuned=True)
        assert [said for said in caplog.messages if "tokenizer" in said] == lines


def test_generate_finds_the_file_by_the_heads(trained: Path, at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dtype", "fp32", "--chat", "--max-new-tokens", "24", "What is two?"]
    drafted = output_of(capsys, "generate", "--heads", "heads", *options)
    for named in ("chat.gguf", "."):
        assert drafted == output_of(capsys, "generate", "--backbone", named, *options)
    on, tokenizer = headstart.load_backbone("chat.gguf", dtype="fp32", device="cpu"), headstart.load_tokenizer("chat.gguf")
    asked: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is two?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    heads = headstart.load("heads", backbone=on, tokenizer=tokenizer)
    texts = [on.model.generate(**asked, do_sample=False, max_new_tokens=24, **way) for way in ({}, {"custom_generate": heads.generate})]
    assert torch.equal(*texts) and tokenizer.decode(texts[0][0, asked["input_ids"].shape[1] :], skip_special_tokens=True).strip() in drafted


def test_an_answer_ends_where_the_file_says(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The token that ends a turn is what the model writes third."""
    model, tokenizer = chat_model()
    ids = tokenizer("What is two?", return_tensors="pt")["input_ids"]
    third = int(model.generate(ids, do_sample=False, max_new_tokens=3, eos_token_id=None)[0, -1])
    (at / "ending").mkdir()
    write_gguf(at / "ending" / "short.gguf", model, tokenizer, "F32", tokenizer__ggml__eot_token_id=third)
    options = ["--backbone", "ending/short.gguf", "--dtype", "fp32", "--raw", "--max-new-tokens", "24"]
    assert report_of(at, "generate", *options, "What is two?")["tokens"] in (2, 3)  # the prefill's may count


def test_the_ends_are_those_of_the_file_whatever_lies_beside_it(at: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.gguf").symlink_to(at / "chat.gguf")
    GenerationConfig(eos_token_id=[3, 4]).save_pretrained(tmp_path)
    file = str(tmp_path / "chat.gguf")
    assert read_end_tokens(file) == end_tokens(headstart.load_backbone(file).model.generation_config) not in ((), (3, 4))


def test_plan_reads_the_header(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(at, "plan", "recipe.yaml", "drafter={kind: medusa}", "--no-calibration", "--memory", "0.4")
    out = capsys.readouterr().out
    size = sum(weight.numel() for weight in chat_model()[0].parameters())
    assert (report["gguf"]["memory"], report["gguf"]["bytes"]) == (2 * size, (at / "chat.gguf").stat().st_size)
    assert f"backbone  chat.gguf, Q8_0, 0.2 MB; dequantized to bf16 {2 * size / 1e6:.1f} MB of memory" in out
    assert all(parts["backbone weights"] >= 2 * size for parts in report["memory"]["phases"].values())


@pytest.mark.parametrize("names", [["backbone.path={house}", "backbone.gguf_file=chat.gguf"], ["backbone.path={house}/chat.gguf"]])
def test_a_recipe_names_a_file_or_a_folder_and_a_file(house: Path, names: list[str]) -> None:
    backbone = load_recipe(house / "recipe.yaml", [name.format(house=house) for name in names]).backbone
    assert (backbone.path, backbone.gguf_file) == (str(house / "chat.gguf"), None)


@pytest.mark.parametrize(("override", "message"), [
    ("backbone.gguf_file=model.bin", "backbone.gguf_file ends in .gguf"),
    ("backbone.gguf_file=other.gguf", "no GGUF file at '"),
    ("backbone.dtype=int8", "dtype int8 quantizes safetensors"),
])  # fmt: skip
def test_a_recipes_mistakes_are_a_line(at: Path, capsys: pytest.CaptureFixture[str], override: str, message: str) -> None:
    path = ["backbone.path=."] if "gguf_file" in override else []
    for command in ("plan", "train", "cache"):
        assert message in error_of(capsys, command, "recipe.yaml", *path, override, f"save.dir={at}/none", f"cache.dir={at}/none")
    assert not (at / "none").exists()


def test_cache_inspect_and_regenerate(trained: Path, at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output_of(capsys, "cache", "recipe.yaml", f"cache.dir={at}/cache")
    assert main(["train", "recipe.yaml", f"cache.dir={at}/cache", f"save.dir={at}/again", "train.steps=1"]) == 0
    assert "chat.gguf" in output_of(capsys, "inspect", "heads") and "label tokens" in output_of(capsys, "inspect", "recipe.yaml")
    output_of(capsys, "regenerate", "recipe.yaml", "regenerate.out=answers.jsonl", "regenerate.limit=4", "regenerate.max_new_tokens=32")


@pytest.mark.slow
def test_export_verify_and_import(trained: Path, at: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = output_of(capsys, "export", "--heads", "heads", "--to", "vllm", "--out", "served")
    assert "the backbone is a GGUF file, which few engines load" in out
    for folder in ("served", "heads"):
        assert "equal" in output_of(capsys, "verify", folder, "--max-new-tokens", "8").lower()
    output_of(capsys, "import", "served", "--backbone", "chat.gguf", "--out", "imported")
    output_of(capsys, "push", "heads", "someone/heads", "--dry-run", "pushed")
    assert 'model = headstart.load_backbone("chat.gguf").model' in (at / "pushed" / "README.md").read_text()
    monkeypatch.setenv(VLLM.variable, sys.executable)
    assert "vLLM is verified with a backbone of safetensors" in error_of(capsys, "verify", "served", "--engine", "vllm")


@pytest.mark.slow
def test_a_new_recipe(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output_of(capsys, "new-recipe", "chat.gguf", "--data", "chats.jsonl", "--memory", "8")
    recipe = load_recipe(at / "chat" / "eagle3.yaml")
    assert recipe.backbone.path == "chat.gguf"
    shutil.rmtree(at / "chat")


def test_a_draft_model_may_be_a_file_too(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dtype", "fp32", "--max-new-tokens", "12", "What is two?"]
    drafted = output_of(capsys, "generate", "--backbone", "chat.gguf", "--draft-model", "chat.gguf", *options)
    assert drafted == output_of(capsys, "generate", "--backbone", "chat.gguf", *options)
