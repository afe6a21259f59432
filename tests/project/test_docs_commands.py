"""Every command of the README, of docs/ and of ``--help`` runs: on the embedded backbone (with a chat template) and on a few short rows.

What cannot run here is listed with the reason in `NOT_RUN` and is parsed all the same.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from documented import NOT_RUN, PAGES, ROOT, blocks, clear, commands, make_home, reason_not_run, shorter

from headstart.cli.main import _parser, main
from headstart.training.recipe.recipe import load_recipe

FAST = ('headstart generate --heads out/mine "Why is the sky blue?"',)
ALL = commands()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


def log_of(folder: Path) -> None:
    """Give a folder of heads the log of a run."""
    recipe = {"backbone": {"path": "x"}, "drafter": {"kind": "eagle3"}, "save": {"dir": str(folder)}}
    step = {"step": 1, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "accuracy": [0.5], "tokens": 9, "tokens_per_second": 3.0}
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ({"recipe": recipe, "steps": 1}, step)))


def test_there_are_many_and_the_pages_of_use_have_some() -> None:
    assert len(ALL) > 40 and set(FAST) <= set(ALL)
    assert all(any(part in line for line in ALL) for part in NOT_RUN), "an entry of NOT_RUN is out of date"


def test_they_parse() -> None:
    for line in ALL:
        words = shlex.split(line.partition(" < ")[0])[1:]
        assert _parser(words).parse_args(words).command.name == words[0], line


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("line", [pytest.param(line, marks=() if line in FAST else pytest.mark.slow) for line in ALL])
def test_it_runs(
    line: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdin: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    if (reason := reason_not_run(line)) is not None:
        pytest.skip(f"parsed only: {reason}")
    place = tmp_path / "place"
    shutil.copytree(home, place, ignore=shutil.ignore_patterns("backbone"))
    (place / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "recipe.md", place / "docs")
    monkeypatch.chdir(place)
    stdin("Why is the sky blue?\n")
    words = shorter(line, home)
    clear(words, place)
    if words[0] == "compare":
        for name in ("mine", "other", "eagle3", "medusa"):
            log_of(place / "out" / name)
        report(place)
    if words[0] in ("verify", "push"):
        heads = words[words.index("--heads") + 1] if "--heads" in words else "out/eagle3"
        assert main(["export", "--heads", heads, "--to", "vllm", "--out", "out/served"]) == 0
    if words[0] == "schema":
        (place / "recipes").mkdir()
    status = main(words)
    assert status == 0, capsys.readouterr().err


def report(folder: Path) -> None:
    """Three small reports of bench."""
    arguments = ["--prompts", "prompts.jsonl", "--limit", "1", "--max-new-tokens", "4", "--capture", "off", "--json", "report.json"]
    assert main(["bench", "--heads", "out/mine", *arguments]) == 0
    for name in ("before.json", "after.json"):
        shutil.copy(folder / "report.json", folder / name)


LAUNCHED = [line.strip() for page in PAGES for text in blocks(page) for line in text.splitlines() if "train_heads.py recipes/" in line]


@pytest.mark.parametrize("line", dict.fromkeys(LAUNCHED))
def test_launched_commands_name_recipes_that_load(line: str) -> None:
    _, _, arguments = line.partition(" # ")[0].partition("train_heads.py ")
    recipe, *overrides = shlex.split(arguments)
    load_recipe(ROOT / recipe, overrides)
    configuration = re.search(r"--config_file (\S+)", line)
    assert configuration is None or (ROOT / configuration.group(1)).exists()
