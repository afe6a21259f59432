"""The JSON schema of recipes and the tables of docs/recipe.md match the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from headstart.cli.main import main
from headstart.heads.methods import methods
from headstart.support.config import dotted_keys
from headstart.support.errors import UserError
from headstart.training.recipe.recipe import Recipe
from headstart.training.recipe.schema import recipe_schema, with_tables
from headstart.training.recipe.yaml_text import read_yaml

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(path for path in ROOT.glob("recipes/*/*.yaml") if path.parent.name not in ("accelerate", "shared"))
RENEW = "run: headstart schema --out recipes/schema.json --tables docs/recipe.md"


def faults(value: Any) -> list[Any]:
    return list(Draft202012Validator(recipe_schema()).iter_errors(value))


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


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("train", {"lrr": 1}), ("train", {"lr": "fast"}), ("train", {"precision": "fp8"}),
        ("drafter", {"kind": "medusa", "taps": [1]}),
        ("drafter", {"kind": "medusaa"}), ("drafter", {"kind": "medusa", "depth": 0}),
        ("heads", [{"kind": "medusa", "train": {"steps": 3}}]),
        ("objective", {"terms": {"kl": -1}}), ("sed", 1),
    ],
)  # fmt: skip
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
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: log -->\nold\n<!-- end of table -->\nafter\n")
    assert main(["schema"]) == 0 and json.loads(capsys.readouterr().out) == recipe_schema()
    assert main(["schema", "--out", str(tmp_path / "schema.json"), "--tables", str(page)]) == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == recipe_schema()
    assert "old" not in page.read_text() and "| `log.every` | a whole number of at least 1 | `10` |" in page.read_text()
    with pytest.raises(UserError, match="no table 'lgo'"):
        with_tables("<!-- table: lgo -->\n<!-- end of table -->")
