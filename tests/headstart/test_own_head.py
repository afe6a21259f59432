"""``headstart new-head`` and ``check-head``: the page docs/add_a_head.md as a reader follows it, and heads that break the contract."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from errors import error_of, output_of

from headstart.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "add_a_head.md").read_text()
LINES = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()  # type: ignore[index]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, without the modules of an earlier test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_head"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_the_page_from_an_empty_folder_to_tau(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smaller = {"train": ["train.steps=4", "eval.prompts=1", "eval.max_new_tokens=8"], "bench": ["--max-new-tokens", "8", "--limit", "1"]}
    for line in LINES:
        words = shlex.split(line, comments=True)[1:]
        assert main([*words, *smaller.get(words[0], [])]) == 0, line
    assert re.search(r"out/my_head.*1\.[0-9]+", capsys.readouterr().out)
    assert main(["generate", "--heads", "out/my_head", "--debug-head", "--max-new-tokens", "4", "--json", "a.json", "def f("]) == 0
    assert '"passes"' in (here / "a.json").read_text()
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my_head"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(tests, cwd=here, env=environment, capture_output=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_new_head_keeps_the_contract(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-head", "my_head"]) == 0
    assert "keeps the contract" in output_of(capsys, "check-head", "my_head.head", "depth=2")


@pytest.mark.parametrize(("old", "new", "rule"), [
    ("torch.where((last_B >= 0)[:, None, None], last_B1D, state[:, :1])", "last_B1D", "Rows of a batch"),
    pytest.param("tokens_BT[:, 1 + k :", "tokens_BT[:, k :", "What forward computes", marks=pytest.mark.slow),
    pytest.param("self.lm_head(hidden)", "self.lm_head(hidden.detach())", "Every weight has a gradient", marks=pytest.mark.slow),
    pytest.param("gather(1, parents_BN", "gather(1, 0 * parents_BN", "Siblings", marks=pytest.mark.slow),
    pytest.param("hidden + self.mix", "hidden + self.mixed", "Texts of one to four", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_head_that_breaks_a_rule_is_told_which(old: str, new: str, rule: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-head", "my_head"]) == 0
    head = here / "my_head" / "head.py"
    assert old in head.read_text()
    head.write_text(head.read_text().replace(old, new))
    out = output_of(capsys, "check-head", "my_head.head", status=1)
    assert any(line.startswith("broken") and rule in line for line in out.splitlines()), out
    assert new != "hidden + self.mixed" or re.search(r"head\.py:\d+: AttributeError: .*mixed", out), "where in the head"


@pytest.mark.parametrize(("words", "message"), [
    (["new-head", "my-head"], "can't name a package"),
    (["new-head", "json"], "can't name a package"),
    (["check-head", "nothing"], "unknown drafter 'nothing'"),
    (["check-head", "my_own.head"], "no module 'my_own.head'"),
    (["check-head", "medusa", "dept=2"], "did you mean drafter.depth"),
    (["generate", "--heads", "embedded", "--head-module", "nothing.here", "a"], "no module 'nothing.here'"),
])  # fmt: skip
def test_mistakes_are_one_line(words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(capsys, *words)
    assert not [*here.iterdir()]


def test_a_folder_that_is_there_is_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "my_head").mkdir()
    assert "is there already" in error_of(capsys, "new-head", "my_head")
    assert not [*(here / "my_head").iterdir()]
