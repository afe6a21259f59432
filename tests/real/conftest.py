"""The released model in a new folder, with conversations from this project's pages and a recipe."""

import json
import re
from pathlib import Path

import pytest
from command import ROOT, Folder
from fetch import FILE, PACKAGE

from headstart.training.recipe.yaml_text import dump_yaml


def conversations(rows: int) -> list[dict[str, list[dict[str, str]]]]:
    """Questions about headings, answered by what stands below them."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    found = re.findall(r"^##+ ([^\n]+)\n\n([A-Z][^\n]+(?:\n[^\n#|`-][^\n]*)*)", text, re.MULTILINE)
    asked = [(f"Tell me about this: {title}", " ".join(answer.split())) for title, answer in found if 80 < len(answer) < 900]
    turns = [[{"role": "user", "content": ask}, {"role": "assistant", "content": say}] for ask, say in asked[:rows]]
    assert len(turns) == rows
    return [{"messages": turn} for turn in turns]


def write_rows(path: Path, rows: list[dict[str, list[dict[str, str]]]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def at(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    if not FILE.is_file():
        pytest.skip(f"{PACKAGE} is not there: make test-real fetches it")
    folder = Folder(tmp_path_factory.mktemp("real"))
    (folder.path / FILE.name).symlink_to(FILE)
    write_rows(folder.path / "chats.jsonl", conversations(24))
    prompts = ["What is the capital of France?", "Write a function that adds two numbers in Python.", "Why is the sky blue?"]
    (folder.path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    recipe = {
        "backbone": {"path": FILE.name, "dtype": "bf16"},
        "drafter": {"kind": "eagle3", "depth": 2, "draft_vocab_size": 8192},
        "data": {"train": "chats.jsonl", "max_length": 256, "eval_rows": 4},
        "train": {"steps": 3, "batch_size": 4},
        "eval": {"prompts": 2, "max_new_tokens": 16},
        "save": {"dir": "heads", "every": 2},
    }
    (folder.path / "recipe.yaml").write_text(dump_yaml(recipe))
    return folder


@pytest.fixture(scope="session")
def heads(at: Folder) -> str:
    """Heads after three steps."""
    at.run("train", "recipe.yaml")
    return "heads"
