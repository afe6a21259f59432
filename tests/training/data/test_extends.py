"""Recipes that extend others: what is merged, in which order, what is refused, and what is saved and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_run import make_recipe
from test_recipe import LEAST

from headstart.cli.main import main
from headstart.support.errors import UserError
from headstart.training.recipe.recipe import load_recipe
from headstart.training.recipe.yaml_text import read_extended


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_sections_are_merged_key_by_key_and_the_recipe_comes_last(tmp_path: Path) -> None:
    write(tmp_path / "shared/loss.yaml", "objective: {terms: {kl: 1, ce: 0.5}, chunk_size: 64}\ntrain: {lr: 1e-3, batch_size: 4}\n")
    write(tmp_path / "shared/more.yaml", "extends: loss.yaml\ntrain: {lr: 2e-3}\nseed: 5\n")
    path = write(tmp_path / "own/recipe.yaml", "extends: [../shared/more.yaml]\ntrain: {lr: 3e-3}\nobjective: {terms: {ce: 0}}\n" + LEAST)
    recipe = load_recipe(path)
    assert (recipe.train.lr, recipe.train.batch_size, recipe.seed) == (3e-3, 4, 5)
    assert recipe.objective.terms == {"kl": 1.0, "ce": 0.0} and recipe.objective.chunk_size == 64
    assert load_recipe(path, ["train.batch_size=9"]).train.batch_size == 9
    assert [file.name for file in read_extended(path)[1]] == ["loss.yaml", "more.yaml"]


def test_later_files_replace_keys_of_earlier_ones_and_null_empties_a_section(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "train: {lr: 1e-3, batch_size: 4}\nseed: 1\n")
    write(tmp_path / "b.yaml", "train: {lr: 2e-3}\n")
    recipe = load_recipe(write(tmp_path / "recipe.yaml", "extends: [a.yaml, b.yaml]\n" + LEAST))
    assert (recipe.train.lr, recipe.train.batch_size, recipe.seed) == (2e-3, 4, 1)
    assert load_recipe(write(tmp_path / "null.yaml", "extends: a.yaml\ntrain:\n" + LEAST)).train.lr == "auto"
    emptied = load_recipe(write(tmp_path / "emptied.yaml", "extends: b.yaml\ntrain: null\n" + LEAST))
    assert emptied.train.lr == load_recipe(write(tmp_path / "least.yaml", LEAST)).train.lr


def test_several_drafters_are_extended_by_name(tmp_path: Path) -> None:
    several = LEAST.replace("drafter: {kind: medusa, depth: 4}", "heads: [{kind: medusa, depth: 4}, {name: deep, kind: medusa, depth: 6}]")
    write(tmp_path / "several.yaml", several)
    recipe = load_recipe(write(tmp_path / "recipe.yaml", "extends: several.yaml\nheads: {deep: {depth: 7}}\n"))
    assert {name: head["depth"] for name, head in recipe.heads.items()} == {"medusa": 4, "deep": 7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: nowhere.yaml\n", "recipe.yaml: extends: no file 'nowhere.yaml'; its path is relative to"),
        ("extends: recipe.yaml\n", "extends: 'recipe.yaml' leads back to a file that extends it"),
        ("extends: other.yaml\n", "extends: 'recipe.yaml' leads back to a file that extends it"),
        ("extends: 3\n", "extends is the path of a recipe, or a list of paths; got 3"),
        ("extends: [a.yaml, 3]\n", "extends is the path of a recipe, or a list of paths; got ['a.yaml', 3]"),
        ("extends: ''\n", "extends is the path of a recipe, or a list of paths; got ''"),
        ("extends: list.yaml\n", "list.yaml: a recipe is a mapping of keys to values; got [1]"),
        ("extends: broken.yaml\n", "broken.yaml, line 1: not valid YAML"),
        ("extends: unknown.yaml\n", "unknown key train.lrr; did you mean train.lr?"),
        ("extends: sub\n", "extends: no file 'sub'"),
    ],
)
def test_what_cannot_be_extended_is_named(tmp_path: Path, text: str, message: str) -> None:
    for name, content in {
        "other.yaml": "extends: recipe.yaml\n", "list.yaml": "[1]", "broken.yaml": "train: {lr: 1", "unknown.yaml": "train: {lrr: 1}",
        "sub/x.yaml": "",
    }.items():  # fmt: skip
        write(tmp_path / name, content)
    with pytest.raises(UserError) as caught:
        load_recipe(write(tmp_path / "recipe.yaml", text + LEAST))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("on_the_cpu")
def test_the_whole_recipe_is_saved_and_the_extended_files_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = make_recipe(tmp_path)
    part = write(tmp_path / "part.yaml", "extends: recipe.yaml\ntrain: {steps: 2}\n")
    assert main(["inspect", str(part), "--json", str(tmp_path / "inspect.json")]) == 0
    assert "recipe.yaml" in capsys.readouterr().out
    assert json.loads((tmp_path / "inspect.json").read_text())["extends"] == [str(whole)]
    assert main(["train", str(part)]) == 0
    saved = json.loads((tmp_path / "out" / "headstart.json").read_text())["provenance"]["recipe"]
    assert saved["train"]["steps"] == 2 and saved["backbone"]["path"] == str(tmp_path / "backbone") and "extends" not in saved
