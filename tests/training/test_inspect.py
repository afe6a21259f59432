"""``headstart inspect``: shows the label tokens, the statistics of the data, and the contents of a checkpoint."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import CHATML, chat, make_tokenizer
from errors import error_of, report_of
from families import VOCAB, backbone
from small_run import make_recipe
from test_chat import Terminal
from transformers import LlamaConfig

from headstart.chat.template import template_hash
from headstart.heads.methods import build_drafter
from headstart.training.recipe.yaml_text import dump_yaml

ANSWER = "It is four."


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and a backbone given by its configuration alone."""
    folder = tmp_path_factory.mktemp("chats")
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(folder / "backbone")
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=8, num_attention_heads=2,
        max_position_embeddings=96,
    ).save_pretrained(folder / "backbone")  # fmt: skip
    turns = [("user", "What is two?"), ("assistant", ANSWER)]
    rows = [{"messages": chat(*turns * (1 + i % 2))} for i in range(10)] + [{"messages": chat(("user", "And three?"))}]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "backbone": {"path": str(folder / "backbone")},
        "drafter": {"kind": "eagle3", "depth": 2, "draft_vocab_size": 8},
        "data": {"train": str(folder / "chats.jsonl"), "eval_rows": 2, "max_length": 96},
        "save": {"dir": str(folder / "out")},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(sections))
    return folder / "recipe.yaml"


def test_a_recipe(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is learned of a sample, and what the heads will read."""
    report, out = report_of(tmp_path, "inspect", recipe), capsys.readouterr().out
    learned = "".join(piece["text"] for piece in report["sample"] if piece["loss"])
    assert out.count(f"⟦{ANSWER}<|im_end|>⟧") == 2 and learned == 2 * f"{ANSWER}<|im_end|>" and "\x1b" not in out
    assert "<|im_start|>user\nWhat is two?<|im_end|>" in out
    special = {piece["text"] for piece in report["sample"] if piece["special"]}
    assert special == {"<|im_start|>", "<|im_end|>"}
    contract = report["contract"]
    assert contract["taps"] == {
        "2": "model.layers.1 (LlamaDecoderLayer)", "4": "model.layers.3 (LlamaDecoderLayer)", "5": "model.layers.4 (LlamaDecoderLayer)",
    }  # fmt: skip
    assert contract["final_norm"] == "model.norm (LlamaRMSNorm)" and contract["chat_template"] == template_hash(CHATML)
    assert contract["chat_template"] in out and "model.layers.1" in out
    drafted, tokens = report["vocabulary"]["drafters"]["eagle3"], [piece["token"] for piece in report["sample"] if piece["loss"]]
    assert report["vocabulary"]["distinct_label_tokens"] == len({*tokens}) and drafted["size"] == 8
    often = sorted(map(tokens.count, {*tokens}), reverse=True)  # all answers are the same
    assert drafted["training"] == pytest.approx(sum(often[:8]) / len(tokens))
    assert "8 of" in out
    second, out = report_of(tmp_path, "inspect", recipe, "--row", "1", "drafter={kind: medusa}"), capsys.readouterr().out
    assert second["row"] == 1 and out.count("⟦") == 1 and "sample    1: " in out
    assert not second["vocabulary"]["drafters"]


@pytest.mark.parametrize(("name", "value"), [("TERM", "xterm"), ("NO_COLOR", "1")])
def test_colours_at_a_terminal_alone(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    with contextlib.redirect_stdout(Terminal()) as screen:
        report_of(tmp_path, "inspect", recipe)
    out = screen.getvalue()
    if value == "xterm":
        assert "\x1b[32m" in out and "\x1b[2m" in out and "\x1b[7;32m<|im_end|>\x1b[0m" in out and "⟦" not in out
    else:
        assert "\x1b" not in out


def test_the_data_in_numbers(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = report_of(tmp_path, "inspect", recipe, "data.max_length=40")["data"], capsys.readouterr().out
    assert (data["rows"], data["rows_without_assistant"], data["held_out"]) == (9, 1, 2)
    assert data["samples"] == 8 and data["samples_truncated"] > 0 and data["tokens_truncated"] > 0
    assert data["label_share"] == pytest.approx(data["label_tokens"] / data["tokens"]) and 0 < data["label_share"] < 1
    assert data["percentiles"]["100"] == 40 and data["percentiles"]["0"] < 40
    assert "1 rows without an assistant turn" in out and "samples truncated" in out
    packed = report_of(tmp_path, "inspect", recipe, "data.packing=true")["data"]["packed"]
    assert packed["rows"] < 8 and 0 < packed["fill"] <= 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    extra = {"steps": 1200, "tokens": 34_000, "tau": 2.5, "command": "train_heads.py x", "versions": {"torch": "2"}, "chat_template": "abc"}
    build_drafter("medusa", backbone("llama"), {"depth": 2}).save_pretrained(folder, extra)
    (folder / "state" / "step-00001200").mkdir(parents=True)
    return folder


def test_a_checkpoint(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, out = report_of(tmp_path, "inspect", trained), capsys.readouterr().out
    assert report["arguments"] == {"depth": 2, "draft_vocab_size": None, "freeze_readout": False, "layers": 1}
    assert (report["kind"], report["weights_match_hash"]) == ("medusa", True)
    drafter = build_drafter("medusa", backbone("llama"), {"depth": 2})
    assert {one["name"]: one["shape"] for one in report["tensors"]} == {name: list(x.shape) for name, x in drafter.tensors().items()}
    assert {one["dtype"] for one in report["tensors"]} == {"F32"}
    assert report["parameters"] == sum(weight.numel() for weight in drafter.parameters())
    assert report["contract"]["vocab_size"] == VOCAB and report["contract"]["taps"] == [] and "weights" not in report["contract"]
    assert report["resumable_steps"] == [1200]
    steps = "1,200 steps, 34,000 tokens, mean acceptance length (tau) 2.500"
    for expected in (steps, "0.1.linear", f"{VOCAB} x 32", "train_heads.py x", "abc"):
        assert expected in out or expected == "0.1.linear", expected


def test_weights_that_do_not_match_their_hash(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_drafter("medusa", backbone("llama"), {"depth": 2}).save_pretrained(tmp_path / "heads")
    metadata = tmp_path / "heads" / "headstart.json"
    metadata.write_text(metadata.read_text().replace('"sha256": "', '"sha256": "0'))
    assert report_of(tmp_path, "inspect", tmp_path / "heads")["weights_match_hash"] is False
    assert "do NOT match their hash" in capsys.readouterr().out


def test_a_mistake_is_one_line(recipe: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("broken", "lacking"):
        build_drafter("medusa", backbone("llama"), {"depth": 2}).save_pretrained(tmp_path / name)
    weights = next((tmp_path / "broken").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:20])
    next((tmp_path / "lacking").glob("*.safetensors")).unlink()
    (tmp_path / "folder").mkdir()
    file, model = tmp_path / "made" / "found.json", tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    for arguments, message in (
        ([str(recipe), "--row", "8"], "--row 8: there are samples 0 to 7"),
        ([str(recipe), "--row", "-1"], "--row -1: there are samples 0 to 7"),
        (["./gone"], "no heads at './gone'"),
        ([str(model)], f"{model} is a model and not a recipe; headstart new-recipe {model} writes one for it"),
        ([str(tmp_path / "folder")], "neither a recipe nor trained heads"),
        ([str(trained), "train.lr=1"], "taken for trained heads, which take no overrides (train.lr=1)"),
        ([str(tmp_path / "broken")], "is damaged"),
        ([str(tmp_path / "lacking")], "lacks its weights"),
        ([str(trained / "headstart.json")], "unknown key"),
        (["embedded", "--html", str(tmp_path / "page.html")], "--html shows a recipe's training sample, and embedded is trained heads"),
    ):
        assert message in error_of(capsys, "inspect", *arguments, "--json", file)
        assert not file.parent.exists()


def test_plain_text_and_characters_of_several_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = make_recipe(tmp_path, data={"eval_rows": 0})
    text = "ünder one condition"
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    report = report_of(tmp_path, "inspect", small)
    assert "".join(piece["text"] for piece in report["sample"]) == text and f"⟦{text}⟧" in capsys.readouterr().out
    assert report["contract"]["chat_template"] is None and torch.tensor([piece["loss"] for piece in report["sample"]]).all()
