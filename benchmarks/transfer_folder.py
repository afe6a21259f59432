"""The folder of models and data that benchmarks/transfer.py reads: small enough to be carried to another machine."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Sequence
from pathlib import Path

from transfer_cells import BACKBONES, RECIPE, model_path

from headstart.training.recipe.recipe import load_recipe
from headstart.training.regenerate.regenerate import write_answers

SHIPPED, EVERY = Path(__file__).parent.parent / "recipes" / "quickstart" / "train.jsonl.gz", 20
"""The rows shipped with the embedded model, and one in how many is held out."""
MODELS = ("stories260K", "babyllama-tok105", "chat-7m")
OWN = ("prose2", "tasks5", "prose2-short", "tasks5-short")
"""Made by small_backbone.py; the short ones by ``--minutes 2``."""
CHARACTERS = {"stories": 2_200_000, "chat": 1_000_000}
"""Of the training rows, at most."""
HELD_OUT = 180_000
"""Characters of held-out rows, at most."""
OWN_TEXT = ("regenerate.limit=900", "regenerate.prompt_tokens=24", "regenerate.max_new_tokens=224", "regenerate.batch_size=32")
"""How a backbone goes on with the training rows, at the temperatures that are the default."""


def assemble(folder: Path, models: Path, rows: Path, own: Path) -> None:
    """Copy the models and cut the data; prints the size. Stops with a message if something is missing."""
    copied = [models / name for name in MODELS] + [own / name for name in OWN if (own / name).exists()]
    sources = copied + [rows / f"{name}_{part}.jsonl" for name in CHARACTERS for part in ("train", "val")]
    missing = [str(source) for source in sources if not source.exists()]
    if missing:
        raise SystemExit(f"not found: {', '.join(missing)}")
    for source in copied:
        shutil.copytree(source, folder / source.name, dirs_exist_ok=True)
    for name, most in CHARACTERS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        cut(rows / f"{name}_train.jsonl", folder / name / "train.jsonl.gz", most)
        cut(rows / f"{name}_val.jsonl", folder / name / "eval.jsonl.gz", HELD_OUT)
    (folder / "python").mkdir(exist_ok=True)
    with gzip.open(SHIPPED, "rt") as lines:
        split: dict[str, list[str]] = {"train": [], "eval": []}
        for number, line in enumerate(lines):
            split["eval" if number % EVERY == 0 else "train"].append(line)
    for name, kept in split.items():
        with gzip.open(folder / "python" / f"{name}.jsonl.gz", "wt") as target:
            target.writelines(kept)
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {total / 1e6:.1f} MB")


def write_own_text(folder: Path, backbones: Sequence[str]) -> None:
    """Write what each backbone itself writes after the beginnings of its training rows, unless it is there."""
    for name in backbones:
        out = folder / "own" / f"{name}.jsonl"
        if not out.exists():
            out.parent.mkdir(exist_ok=True)
            rows = folder / BACKBONES[name].rows / "train.jsonl.gz"
            given = [f"backbone.path={model_path(name, folder)}", f"data.train={rows}", f"regenerate.out={out}"]
            write_answers(load_recipe(RECIPE, [*given, "drafter.draft_vocab_size=null", *OWN_TEXT]))


def cut(source: Path, target: Path, characters: int) -> None:
    """Copy the first rows of a JSON-lines file, up to a number of characters."""
    with source.open() as lines, gzip.open(target, "wt") as kept:
        for line in lines:
            characters -= len(line)
            if characters < 0:
                break
            kept.write(line)
