"""The embedded backbone and its data match the documentation, and heads can be trained on them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headstart
from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.inference.engine.tree import TreeShape
from headstart.support.errors import UserError
from headstart.support.hub import HEADS, resolve, resolve_heads

FOLDER = Path(resolve("embedded"))
PAGE = (Path(__file__).parents[2] / "docs" / "start.md").read_text()


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone("embedded")


def rows(name: str) -> list[str]:
    data = (FOLDER.parent / name).read_bytes()
    lines = (gzip.decompress(data) if name.endswith(".gz") else data).decode().splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_it_is_small_and_says_how_good_it_is(backbone: Backbone) -> None:
    facts = json.loads((FOLDER / "training.json").read_text())
    assert (FOLDER / "model.safetensors").stat().st_size <= 50_000_000
    assert 20_000_000 <= backbone.model.num_parameters() <= 25_000_000 and 12 <= backbone.num_layers <= 14
    assert facts["bits_per_byte"] <= 0.8 and f"{facts['bits_per_byte']:.2f} bits per byte" in PAGE
    assert backbone.name == "embedded"


def test_any_text_round_trips() -> None:
    tokenizer = load_tokenizer("embedded")
    for text in ("def f(x):\n\treturn x  # größer 漢字\r\n", "\x00 \U0001f600"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text


def test_it_predicts_python_better_than_noise(backbone: Backbone) -> None:
    """Recomputed on the shipped held-out prompts; a shuffle of the same tokens is far less likely."""
    tokenizer, nats = load_tokenizer("embedded"), {"python": 0.0, "shuffled": 0.0}
    texts = rows("prompts.jsonl")[:20]
    torch.manual_seed(0)
    for text in texts:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        for name, tokens in (("python", ids), ("shuffled", ids[torch.randperm(len(ids))])):
            logits = backbone.readout(backbone.read(tokens[None, :-1]).hidden_BTD)[0]
            nats[name] += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
    size = sum(len(text.encode()) for text in texts)
    assert nats["python"] / size / 0.6931 < 2.0, "openings of 64 tokens, without the context a file gives"
    assert nats["shuffled"] > 1.5 * nats["python"]


def test_prompts_are_enough_and_not_trained_on() -> None:
    prompts, train = rows("prompts.jsonl"), rows("train.jsonl.gz")
    assert len(prompts) >= 40 and len(set(prompts)) == len(prompts) and len(train) >= 1000
    joined = "\n".join(train)
    assert not [prompt for prompt in prompts if prompt in joined]


@pytest.mark.parametrize("name", ["embedded", "embedded-mlp"])
def test_heads_ship_with_it_and_accept_most_drafts(backbone: Backbone, name: str) -> None:
    heads = headstart.load(name, backbone)
    assert (FOLDER.parents[1] / HEADS[name] / "model.safetensors").stat().st_size <= 8_000_000
    row = load_tokenizer("embedded")(rows("prompts.jsonl")[0], return_tensors="pt")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 48, "return_dict_in_generate": True}
    out = backbone.model.generate(**row, custom_generate=heads.generate, tree=TreeShape(12, 4), **options)
    plain = backbone.model.generate(**row, **options)
    assert torch.equal(out.sequences, plain.sequences) and out.tau > 2


def test_other_names_of_shipped_heads_are_refused(backbone: Backbone) -> None:
    with pytest.raises(UserError, match="no heads 'embedded-medusa' ship .*; embedded, embedded-mlp, smollm2 do"):
        headstart.load("embedded-medusa", backbone)
    assert resolve_heads("embedded-lab/eagle3") is None, "a hub id"
