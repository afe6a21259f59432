"""The JSON schema of recipes and the tables of docs/recipe.md match the models; recipes that extend others are merged as they say."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from errors import refusal, report_of
from jsonschema import Draft202012Validator
from small_run import make_recipe
from tables import with_tables
from test_recipe import LEAST

from headstart.cli.main import main
from headstart.heads.methods import methods
from headstart.support.config import dotted_keys
from headstart.training.recipe.recipe import Recipe, load_recipe, recipe_schema
from headstart.training.recipe.yaml_text import read_extended, read_yaml

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(path for path in ROOT.glob("recipes/*/*.yaml") if path.parent.name not in ("accelerate", "shared"))
RENEW = "run: headstart schema --out recipes/schema.json, python tests/helpers/tables.py docs/recipe.md"


@cache
def validator() -> Draft202012Validator:
    return Draft202012Validator(recipe_schema())


def faults(value: Any) -> list[Any]:
    return list(validator().iter_errors(value))


def stated(schema: str) -> Any:
    """Without permissions that hold anyway; pydantic 2.10 writes none."""
    return json.loads(schema, object_hook=lambda part: {k: v for k, v in part.items() if (k, v) != ("additionalProperties", True)})


def test_the_committed_schema_and_tables_are_current() -> None:
    assert stated((ROOT / "recipes" / "schema.json").read_text()) == stated(json.dumps(recipe_schema())), RENEW
    page = (ROOT / "docs" / "recipe.md").read_text()
    assert with_tables(page) == page, RENEW
    assert [key for key in dotted_keys(Recipe) if f"| `{key}` |" not in page] == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_shipped_recipe_names_the_schema_and_fits_it(path: Path) -> None:
    assert path.read_text().startswith("# yaml-language-server: $schema=../schema.json\n")
    assert faults(read_yaml(path)) == []


@pytest.mark.parametrize(("section", "value"), [
    ("train", {"lrr": 1}), ("train", {"lr": "fast"}), ("train", {"precision": "fp8"}),
    ("drafter", {"kind": "medusa", "taps": [1]}),
    ("drafter", {"kind": "medusaa"}), ("drafter", {"kind": "medusa", "depth": 0}),
    ("heads", [{"kind": "medusa", "train": {"steps": 3}}]),
    ("objective", {"terms": {"kl": -1}}), ("sed", 1),
])  # fmt: skip
def test_the_schema_finds_mistakes(section: str, value: Any) -> None:
    assert faults({**read_yaml(SHIPPED[0]), section: value}) != []


def test_the_schema_knows_every_drafter_and_allows_others() -> None:
    assert {f"drafter-{kind}" for kind in methods()} <= set(recipe_schema()["$defs"]) and {"eagle3", "medusa"} <= set(methods())
    recipe = {key: value for key, value in read_yaml(SHIPPED[0]).items() if key != "drafter"}
    mine = {"kind": "my.drafter", "anything": 3}
    several = [{"kind": "eagle3", "depth": 3}, {"kind": "medusa", "name": "two", "objective": {"terms": {"ce": 1}}}]
    assert faults({**recipe, "drafter": mine}) == faults({**recipe, "heads": several}) == []
    assert faults(recipe) != []


def test_the_command_prints_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0 and json.loads(capsys.readouterr().out) == recipe_schema()
    assert main(["schema", "--out", str(tmp_path / "schema.json")]) == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == recipe_schema()


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


@pytest.mark.parametrize(("text", "message"), [
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
])  # fmt: skip
def test_what_cannot_be_extended_is_named(tmp_path: Path, text: str, message: str) -> None:
    for name, content in {
        "other.yaml": "extends: recipe.yaml\n", "list.yaml": "[1]", "broken.yaml": "train: {lr: 1", "unknown.yaml": "train: {lrr: 1}",
        "sub/x.yaml": "",
    }.items():  # fmt: skip
        write(tmp_path / name, content)
    assert message in refusal(load_recipe, write(tmp_path / "recipe.yaml", text + LEAST))


def test_the_whole_recipe_is_saved_and_the_extended_files_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = make_recipe(tmp_path)
    part = write(tmp_path / "part.yaml", "extends: recipe.yaml\ntrain: {steps: 2}\n")
    assert report_of(tmp_path, "inspect", part)["extends"] == [str(whole)]
    assert "recipe.yaml" in capsys.readouterr().out
    assert main(["train", str(part)]) == 0
    saved = json.loads((tmp_path / "out" / "headstart.json").read_text())["provenance"]["recipe"]
    assert saved["train"]["steps"] == 2 and saved["backbone"]["path"] == str(tmp_path / "backbone") and "extends" not in saved
