"""``headstart regenerate`` on rows of a test, in process and from a server; answers go to ``new.jsonl``, the report to ``result.json``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import make_chat_model, write_rows

from headstart.cli.main import main
from headstart.training.recipe.yaml_text import dump_yaml


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone with a chat template whose answers end after about ten tokens, since one token in ten ends them."""
    return make_chat_model(tmp_path_factory.mktemp("talker"), num_hidden_layers=3, max_position_embeddings=192)


@pytest.fixture
def ask(talker: Path, tmp_path: Path) -> Callable[..., int]:
    """Run the command on the rows (None: on those there are), with the overrides."""

    def ask(rows: list[dict[str, Any]] | None, *overrides: str, out: str = "new.jsonl") -> int:
        if rows is not None:
            write_rows(tmp_path / "rows.jsonl", rows)
        recipe = {
            "backbone": {"path": str(talker)}, "drafter": {"kind": "medusa", "depth": 2},
            "data": {"train": str(tmp_path / "rows.jsonl")}, "save": {"dir": str(tmp_path / "out")},
        }  # fmt: skip
        (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
        command = ["regenerate", str(tmp_path / "recipe.yaml"), f"regenerate.out={tmp_path / out}", *overrides]
        return main([*command, "--json", str(tmp_path / "result.json")])

    return ask


@pytest.fixture
def ask_server(ask: Callable[..., int]) -> Callable[..., int]:
    """Run it on the rows against the server of that address."""
    return lambda rows, url, *overrides: ask(rows, "backbone.path=some/model", f"regenerate.endpoint={url}", *overrides)
