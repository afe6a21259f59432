"""A chat model in miniature on disk, with a recipe for its conversations."""

import functools
import json
from pathlib import Path
from typing import Any

from chat_templates import CHATML, SPECIAL, make_tokenizer
from families import build, random_drafter
from transformers import GenerationConfig

from headstart.chat.prompts import Prompter
from headstart.heads.backbone.backbone import Backbone
from headstart.inference.generate import SpeculativeModel
from headstart.training.recipe.yaml_text import dump_yaml

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "max_position_embeddings": 256}
MANY_ENDS = list(range(100, 140))
"""Tokens that end an answer too, so that a random model ends one after about ten tokens."""


def make_chat_model(
    folder: Path, template: str | None = CHATML, special: str = SPECIAL[CHATML], ends: list[int] | None = None, **sizes: int
) -> Path:
    """Write a random model whose decoding stops at ``<|im_end|>`` (or ``ends``), with a tokenizer of this template."""
    tokenizer = make_tokenizer(special=special)
    tokenizer.chat_template = template
    model = build("Llama", SIZES | {"vocab_size": len(tokenizer)} | sizes)
    stops = [tokenizer.convert_tokens_to_ids(special.split()[-1]), *MANY_ENDS] if ends is None else ends
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversations(count: int = 8) -> list[dict[str, Any]]:
    """Rows of one question and answer, or two."""
    turns = [{"role": "user", "content": "What is two?"}, {"role": "assistant", "content": "It is four."}]
    return [{"messages": [{"role": "user", "content": f"Hi {i}"}, turns[1], *turns * (i % 2)]} for i in range(count)]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def make_chat_recipe(folder: Path, model: Path, rows: list[dict[str, Any]] | None = None, **data: Any) -> Path:
    """Write rows and ``recipe.yaml`` into ``folder``; the run goes to ``folder/out``, answers to ``folder/answers.jsonl``."""
    train = str(write_rows(folder / "rows.jsonl", conversations() if rows is None else rows))
    recipe = {
        "backbone": {"path": str(model), "dtype": "fp32"},
        "drafter": {"kind": "medusa", "depth": 2},
        "data": {"train": train, "eval_rows": 0, "max_length": 128, **data},
        "train": {"steps": 2, "batch_size": 4, "lr": 1e-3},
        "eval": {"every": 0},
        "save": {"dir": str(folder / "out")},
        "regenerate": {"out": str(folder / "answers.jsonl"), "max_new_tokens": 40, "temperature": 1},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    return folder / "recipe.yaml"


# A tiny backbone with random heads, a chat template and a context of 96.


@functools.cache
def talker() -> tuple[SpeculativeModel, Prompter]:
    """The session's shared heads and prompter; tests must not modify them."""
    tokenizer = make_tokenizer(CHATML)
    on = Backbone(build("Llama", SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 96}))
    return SpeculativeModel(on, random_drafter("medusa", on, depth=3)), Prompter(tokenizer)
