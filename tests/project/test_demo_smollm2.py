"""The demo on a released model: its prompts, its recipe, and the stages of `make demo-smollm2` with commands that only note their words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headstart.training.recipe.recipe import load_recipe

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "smollm2"
TASKS = ("chat", "maths", "code", "summary", "translation", "questions", "questions on a text")
COMMAND = """#!/bin/sh
echo "$(basename $0) $*" >> {log}
for word in "$@"; do
  case $word in regenerate.out=*) touch ${{word#*=}} ;; esac
done
case "$(basename $0) $1" in "${{FAILS:-none}}"*) exit 1 ;; esac
"""


def prompts(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_twenty_prompts_of_each_task_and_none_is_both_trained_on_and_measured() -> None:
    train, measure = prompts("train"), prompts("measure")
    assert Counter(row["task"] for row in train) == dict.fromkeys(TASKS, 14)
    assert Counter(row["task"] for row in measure) == dict.fromkeys(TASKS, 6)
    asked = [row["messages"][0]["content"] for row in (*train, *measure)]
    assert len(set(asked)) == 140 and all([message["role"] for message in row["messages"]] == ["user"] for row in (*train, *measure))
    trained = {part for row in train for part in row["messages"][0]["content"].split("\n") if len(part) > 120}
    measured = {part for row in measure for part in row["messages"][0]["content"].split("\n") if len(part) > 120}
    assert len(trained) > 28 and not trained & measured, "no text either"


def test_further_prompts_are_written_by_a_script() -> None:
    def written(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(FOLDER / "prompts.py"), *arguments], capture_output=True, text=True)

    rows = [json.loads(line) for line in written("--count", "700").stdout.splitlines()]
    assert Counter(row["task"] for row in rows) == dict.fromkeys(TASKS, 100)
    asked = {row["messages"][0]["content"] for row in rows}
    assert len(asked) == 700 and not asked & {row["messages"][0]["content"] for row in prompts("measure")}
    assert written("--count", "20").stdout.splitlines() == [json.dumps(row) for row in rows[:20]]
    for count, words in (("1000000", "there are no 1,000,000 different prompts; "), ("0", "--count is at least 1; got 0")):
        refused = written("--count", count)
        assert (refused.returncode, refused.stdout) == (2, "") and f"error: {words}" in refused.stderr


def test_the_recipe_fits_a_cpu() -> None:
    recipe = load_recipe(FOLDER / "eagle3.yaml")
    assert recipe.drafter["depth"] == 4 and recipe.drafter["draft_vocab_size"] == 8192 and recipe.regenerate.samples > 1
    assert recipe.save.every is not None, "so that training goes on where it was stopped"


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Run the target in a folder of its own; returns what it printed, and the commands since the last time."""
    log = tmp_path / "log"
    for name in ("python", "headstart"):
        (tmp_path / name).write_text(COMMAND.format(log=log))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "installed").touch()
    (tmp_path / "demo").mkdir()

    def make(*words: str, fails: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
        log.write_text("")
        (tmp_path / "installed").touch()
        given = [f"BIN={tmp_path}", f"INSTALLED={tmp_path / 'installed'}", f"DEMO={tmp_path / 'demo'}", f"SMOLLM2={tmp_path / 'gguf'}"]
        environment = os.environ | {"FAILS": fails}
        done = subprocess.run(["make", "demo-smollm2", *given, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
        (tmp_path / "gguf").touch()
        return done, [" ".join(line.split()[:2]) for line in log.read_text().splitlines()]

    return make


def test_each_stage_says_how_long_and_is_not_repeated(make: Any, tmp_path: Path) -> None:
    done, commands = make(fails="headstart train")
    assert done.returncode and commands == ["python tests/real/fetch.py", "headstart regenerate", "headstart train"]
    stages = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert [stage.split(",")[0] for stage in stages] == ["== 1 of 4", "== 2 of 4", "== 3 of 4"]
    assert all("minutes" in stage or "MB" in stage for stage in stages)
    done, commands = make()
    assert done.returncode == 0 and commands == ["headstart train", "headstart bench"], "it goes on where it was stopped"
    assert "10 minutes" in done.stdout and f"done: {tmp_path / 'demo'}/report.html" in done.stdout
    assert make(fails="headstart")[1] == []
    (tmp_path / "mine.jsonl").touch()
    for fails in ("headstart", ""):  # a fault is not taken for a result
        assert make(f"MEASURED={tmp_path / 'mine.jsonl'}", fails=fails)[1] == ["headstart bench"], "other prompts are measured anew"


def test_prompts_and_settings_are_handed_on(make: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.touch()
    done, _ = make(f"PROMPTS={mine}", "SETTINGS=train.epochs=1", "BENCH=--per-task 2")
    assert f"eagle3.yaml train.epochs=1 data.train={mine} regenerate.out={tmp_path / 'demo'}/answers.jsonl" in done.stdout
    assert f"train.epochs=1 data.train={tmp_path / 'demo'}/answers.jsonl save.dir={tmp_path / 'demo'}/heads" in done.stdout
    assert "--prompts recipes/smollm2/measure.jsonl --propose suffix recycling --include-heads-only --per-task 2" in done.stdout


def test_the_small_demo_says_its_stages_too(tmp_path: Path) -> None:
    """Only printed, since it takes minutes."""
    (tmp_path / "installed").touch()
    given = ["make", "--dry-run", "demo", f"BIN={tmp_path}", f"INSTALLED={tmp_path / 'installed'}"]
    lines = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    stages = [(line, following) for line, following in zip(lines, lines[1:], strict=False) if line.startswith('echo "== ')]
    assert ["train_heads.py" in following or "headstart bench" in following for _, following in stages] == [True, True]
    assert all("on two idle cores" in line for line, _ in stages)
