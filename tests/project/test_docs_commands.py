"""Every command of the README, of docs/ and of ``--help`` runs: on the embedded backbone (with a chat template) and on a few short rows.

What cannot run here is listed with the reason in `NOT_RUN` and is parsed all the same.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import NOT_RUN, PAGES, ROOT, blocks, clear, commands, make_home, reason_not_run, shorter

from headstart import load_backbone, load_recipe
from headstart.cli.main import _parser, main
from headstart.heads.methods import build_drafter, methods
from headstart.serving.engines import ENGINES, TABLE, Support
from headstart.support.hub import resolve

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
def test_it_runs(line: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdin: Callable[[str], None], capsys: Any) -> None:
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


# What the README says is so: its links, code, length and table of engines; workflows call pinned actions and targets of the Makefile.

README = (ROOT / "README.md").read_text()
METHODS_OF = {"block": ("dflash", "dspark", "domino"), "draft_model": ("draft_model", "pard")}
"""The methods that engines tell apart, of kinds that hold several."""


def test_it_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 160


def test_links_and_paths_lead_somewhere() -> None:
    paths = [*re.findall(r"\]\(([^)#:]+)[#)]", README), *re.findall(r"(?:recipes|benchmarks)/[\w./-]+\w", README)]
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_python_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    build_drafter("eagle3", load_backbone("embedded"), {"depth": 3}).save_pretrained(tmp_path)
    for page, least in ((README, 1), ((ROOT / "docs" / "decode.md").read_text(), 2)):
        blocks = re.findall(r"```python\n(.*?)```", page, re.S)
        assert len(blocks) >= least
        code = "".join(blocks).replace("Qwen/Qwen3-0.6B", resolve("embedded")).replace("out/mine", str(tmp_path))
        code = code.replace("models/chat.Q4_K_M.gguf", resolve("embedded"))  # tests/heads/test_gguf.py reads such files
        code = re.sub(r"max_new_tokens=\d+", "max_new_tokens=8", code)
        scope: dict[str, Any] = {}
        exec(code, scope)
        assert scope["out"].tau >= 1 and str(scope["out"].tau) in capsys.readouterr().out


def test_its_table_names_every_kind_and_the_engines_that_read_it() -> None:
    rows = {kind: cell for kind, cell in re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|$", README, re.M)}
    assert set(rows) == set(methods())
    for kind, cell in rows.items():
        names = METHODS_OF.get(kind, (kind,))
        for engine, name in ENGINES.items():
            entries = [TABLE.get((engine, method)) for method in names]
            read = [entry for entry in entries if isinstance(entry, Support)]
            if any(entry.until is None for entry in read):
                assert name in cell, (kind, name)
            elif name in cell:  # an older version: it must be said
                assert any(entry.until is not None and f"{name} up to {entry.until}" in cell for entry in read), (kind, name)


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_make_and_pinned_actions(path: Path) -> None:
    text = path.read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ran = re.findall(r"^\s+- run: (.+)$", text, re.MULTILINE)
    called = [re.fullmatch(r"make ([a-z-]+)( VERSIONS=\$\{\{ matrix\.versions \}\})?", line) for line in ran]
    assert ran and all(match and match[1] in targets for match in called), ran
    used = re.findall(r"uses: (\S+)", text)
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used), used
    assert re.search(r"^permissions:", text, re.MULTILINE)


def test_the_versions_of_the_matrix_are_those_of_the_makefile() -> None:
    tested = set(re.findall(r'versions: \[?"(\w+)"', (ROOT / ".github" / "workflows" / "ci.yml").read_text()))
    assert tested == set(re.findall(r"^PINS_(\w+) :=", (ROOT / "Makefile").read_text(), re.MULTILINE)) == {"pinned", "oldest", "newest"}


def test_the_oldest_versions_are_those_that_the_package_allows() -> None:
    allowed = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    oldest = dict(re.findall(r"^([\w-]+)==([\d.]+)\.\*$", (ROOT / ".github" / "oldest.txt").read_text(), re.MULTILINE))
    oldest |= {"torch": re.findall(r"^TORCH_oldest \?= torch==([\d.]+)\.\*$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]}
    assert len(oldest) > 5 and {name: allowed[name] for name in oldest} == {
        name: version if "." in version else f"{version}.0" for name, version in oldest.items()
    }


def test_a_reader_finds_how_to_report_and_to_cite() -> None:
    for name in ("SECURITY.md", "CITATION.cff", "CONTRIBUTING.md", ".pre-commit-config.yaml", ".github/pull_request_template.md"):
        assert (ROOT / name).stat().st_size > 100, name
    assert "@" not in (ROOT / "SECURITY.md").read_text(), "reports go through the platform"
