"""The heads that ship for SmolLM2-135M-Instruct, without the model: whole, small, found by name, and drafting on a model of that shape."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import headstart
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.checkpoint import load_drafter, read_metadata
from headstart.support.errors import UserError
from headstart.support.files import file_hash

ROOT = Path(__file__).parents[2]
MOST_BYTES = 30e6


def model() -> LlamaForCausalLM:
    """A model of SmolLM2-135M's shape with weights by chance."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    theta = {"rope_type": "default", "rope_theta": 100000.0}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=49152, num_hidden_layers=30, tie_word_embeddings=True, rope_parameters=theta, **sizes)
    ).eval()


def test_they_are_whole_and_small() -> None:
    folder, card = read_metadata("smollm2")
    assert folder.resolve() == ROOT / "recipes" / "smollm2" / "heads"
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < MOST_BYTES
    weights = folder / card["weights"]["file"]
    assert file_hash(weights) == card["weights"]["sha256"]
    assert {tensor.dtype for tensor in load_file(weights).values() if tensor.is_floating_point()} == {torch.bfloat16}


def test_no_prompt_is_both_trained_on_and_measured() -> None:
    trained, measured = (
        [json.loads(line) for line in (ROOT / "recipes" / "smollm2" / f"{name}.jsonl").read_text("utf-8").splitlines()]
        for name in ("train", "measure")
    )
    assert {*Counter(row["task"] for row in trained).values()} == {14} and {*Counter(row["task"] for row in measured).values()} == {6}
    long = [{part for row in rows for part in row["messages"][0]["content"].split("\n") if len(part) > 120} for rows in (trained, measured)]
    asked = {row["messages"][0]["content"] for row in (*trained, *measured)}
    assert len(asked) == len(trained) + len(measured) and len(long[0]) > 28 and not long[0] & long[1], "no text either"


def test_what_they_say_of_themselves() -> None:
    folder, card = read_metadata("smollm2")
    assert card["backbone"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and card["contract"]["precision"] == "bfloat16 gguf Q4_1"
    said = (folder / "README.md").read_text()
    assert "license: apache-2.0" in said and "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in said and "gguf Q4_1" in said
    assert card["provenance"]["acceptance"]["levels"], "adaptive trees begin with what training measured"


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").mkdir()
    assert read_metadata("smollm2")[0].resolve() == ROOT / "recipes" / "smollm2" / "heads"
    Path("smollm2/headstart.json").write_text("{}")
    with pytest.raises(UserError, match="smollm2/headstart.json is damaged"):
        read_metadata("smollm2")


def test_another_model_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"smollm2 was trained on HuggingFaceTB/SmolLM2-135M-Instruct \(hidden_size 576\)"):
        load_drafter("smollm2", Backbone(tiny("llama")))


@pytest.mark.slow
def test_they_draft_on_a_model_of_that_shape() -> None:
    on = model()
    with pytest.raises(UserError, match="of that shape with other weights"):
        headstart.load("smollm2", on)
    heads = headstart.load("smollm2", on, allow_finetuned=True, capture="off")
    ids = torch.arange(100, 120)[None]
    alone = on.generate(ids, max_new_tokens=8, do_sample=False)
    tree = headstart.TreeShape(8, 2, 3)
    assert torch.equal(alone, on.generate(ids, custom_generate=heads.generate, max_new_tokens=8, do_sample=False, tree=tree))
