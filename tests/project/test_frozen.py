"""What a move of code must not change: texts, exported files, the keys of bench's report, and the help of every command,
as kept in frozen.json.

``FROZEN=write pytest tests/project/test_frozen.py -m ""`` writes it anew, after a change that CHANGELOG.md names.
"""

import hashlib
import json
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from errors import report_of
from exported import KINDS, make_home
from families import heads, say
from random_calls import draw

from headstart.cli.main import COMMANDS, main
from headstart.serving.engines import ENGINES
from headstart.serving.export import Request, export
from headstart.serving.layouts.files import PROVENANCE
from headstart.support.errors import UserError

FROZEN = Path(__file__).with_name("frozen.json")
CALLS, QUICK = 200, 20


def compare(name: str, found: Any) -> None:
    """Hold a value to the kept one, or keep it."""
    kept = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    if os.environ.get("FROZEN") == "write":
        FROZEN.write_text(json.dumps(kept | {name: found}, indent=0, sort_keys=True) + "\n")
    else:
        assert found == kept[name]


def text_of(seed: int) -> str:
    """What a random call writes, or the kind of its error."""
    call = draw(random.Random(seed))
    try:
        found = say(heads(call.family, "eagle3", "off"), {}, **call.given(), **call.own)
    except Exception as error:
        return type(error).__name__
    return str((found if isinstance(found, torch.Tensor) else found.sequences).tolist())


@pytest.mark.parametrize(("first", "last"), [(0, QUICK), pytest.param(QUICK, CALLS, marks=pytest.mark.slow)])
def test_texts_of_random_calls(first: int, last: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(f"texts {first} to {last}", [text_of(seed) for seed in range(first, last)])


def exports(home: Path, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """For each kind of heads and engine, a digest of each file but the one that names versions; or that it is refused."""
    for kind in KINDS:
        for engine in (*ENGINES, "speculators"):
            out = folder / f"{kind}-{engine}"
            try:
                export(Request(str(home / kind), engine, out))
            except UserError:
                yield out.name, {"refused": ""}
                continue
            files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name != PROVENANCE]
            named = {str(home): b"HOME", str(out): b"OUT", transformers.__version__: b"5.23.0"}  # generation_config.json names the version
            contents = {path.name: path.read_bytes() for path in files}
            for name, standing in named.items():
                contents = {file: content.replace(name.encode(), standing) for file, content in contents.items()}
            yield out.name, {name: hashlib.sha256(content).hexdigest()[:16] for name, content in contents.items()}


def test_bytes_of_exports(tmp_path: Path) -> None:
    compare("exports", dict(exports(make_home(tmp_path / "home"), tmp_path)))


def keys(value: Any) -> Any:
    """The shape of a report: names of its fields, and of those of the first item of a list."""
    if isinstance(value, dict):
        return {key: keys(item) for key, item in sorted(value.items())}
    return [keys(value[0])] if isinstance(value, list) and value else None


def test_report_of_bench(tmp_path: Path) -> None:
    options = ["--limit", "2", "--max-new-tokens", "6", "--nodes", "6", "--rounds", "1", "--capture", "off", "--no-compile"]
    report = report_of(tmp_path, "bench", "--heads", "embedded", "--prompts", "recipes/quickstart/prompts.jsonl", *options)
    compare("bench", keys(report))


def test_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command.name, "--help"])
        compare(f"help {command.name}", capsys.readouterr().out.splitlines())
