"""The commands, paths and code in the README work."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import dynamic_module_utils

from headstart.cli.main import _parser
from headstart.heads.backbone.backbone import load_backbone, resolve
from headstart.heads.methods import build_drafter
from headstart.support.config import dotted_keys
from headstart.training.recipe.recipe import Recipe, load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [line.partition(" # ")[0].strip() for block in re.findall(r"```\n(.*?)```", README, re.S) for line in block.splitlines()]


def starting(word: str) -> list[str]:
    commands = [line for line in COMMANDS if line.startswith(word + " ")]
    assert commands
    return commands


@pytest.mark.parametrize("line", starting("headstart"))
def test_headstart_commands_parse(line: str) -> None:
    words = shlex.split(line.partition("<")[0])[1:]
    args = _parser().parse_args(words)
    assert args.command.name == words[0]


@pytest.mark.parametrize("line", starting("accelerate"))
def test_training_commands_name_recipes_that_load(line: str) -> None:
    _, _, arguments = line.partition("train_heads.py ")
    recipe, *overrides = shlex.split(arguments)
    load_recipe(ROOT / recipe, overrides)


def test_links_and_paths_lead_somewhere() -> None:
    paths = [*re.findall(r"\]\(([^)#:]+)\)", README), *re.findall(r"recipes/[\w./-]+\w", README)]
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    build_drafter("eagle3", load_backbone("embedded"), {"depth": 3}).save_pretrained(tmp_path)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    code = "".join(re.findall(r"```python\n(.*?)```", README, re.S))
    code = code.replace("Qwen/Qwen3-0.6B", resolve("embedded")).replace("out/qwen3-0.6b/eagle3", str(tmp_path))
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert scope["text"].shape[0] == 2
    assert scope["out"].tau >= 1 and str(scope["out"].tau) in capsys.readouterr().out


def test_every_recipe_key_is_documented() -> None:
    page = (ROOT / "docs" / "recipe.md").read_text()
    keys = list(dotted_keys(Recipe))
    assert len(keys) > 30
    assert [key for key in keys if f"`{key}`" not in page] == []
