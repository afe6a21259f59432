"""A complete training run in miniature: a random backbone and a byte-level tokenizer on disk, text, and a recipe."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.cli.main import main
from headstart.training.recipe.yaml_text import dump_yaml

ROOT = Path(__file__).parents[2]
WORDS = "the a cat dog sun moon sees likes finds and so it is red blue old new".split()


def make_backbone(folder: Path, layers: int = 2) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=16,
        intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, initializer_range=0.3,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def rows_of_text(folder: Path) -> Path:
    """Write ``folder/text.jsonl``: 40 short texts."""
    rng = random.Random(0)
    lines = [{"text": " ".join(rng.choices(WORDS, k=rng.randint(3, 9)))} for _ in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "text.jsonl"


def make_recipe(folder: Path, layers: int = 2, **sections: dict[str, Any]) -> Path:
    """Write backbone, data and ``recipe.yaml`` into ``folder``; the run goes to ``folder/out``."""
    make_backbone(folder / "backbone", layers)
    text = rows_of_text(folder)
    recipe: dict[str, Any] = {
        "backbone": {"path": str(folder / "backbone")},
        "drafter": {"kind": "medusa", "depth": 2},
        "data": {"train": str(text), "eval_rows": 4, "max_length": 64},
        "objective": {"chunk_size": 50},
        "train": {"steps": 12, "batch_size": 4, "lr": 3e-3},
        "eval": {"prompts": 2, "max_new_tokens": 8},
        "save": {"dir": str(folder / "out")},
        "log": {"every": 1},
        "seed": 7,
    }
    for name, section in sections.items():
        recipe[name] = {**recipe[name], **section}
    path = folder / "recipe.yaml"
    path.write_text(dump_yaml(recipe))
    return path


def run(*arguments: str | Path, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command a user types, in its own process."""
    command = [sys.executable, *launcher, str(ROOT / "train_heads.py"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **environment}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The log without timings and without the recipe, which names the folder."""
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in read_log(folder) if "recipe" not in line]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_log(folder) if "loss" in line]


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The first error that a command has said."""
    return next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))


def train_once(recipe: Path, *changes: str) -> Path:
    """Train on the CPU, without the state of earlier runs; returns the folder of the recipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(True)
        assert main(["train", str(recipe), *changes]) == 0
    return recipe.parent


def status_of(words: Sequence[str]) -> int:
    """The status with which a command ends, by argparse's own wording too."""
    try:
        return main(list(words))
    except SystemExit as ended:
        return int(ended.code or 0)
