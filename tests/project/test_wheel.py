"""The wheel, installed in a fresh environment outside the clone, trains and decodes: nothing it needs lies only in the clone."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from documented import clear, commands, make_home, reason_not_run, shorter

ROOT = Path(__file__).parents[2]
PACKAGED = ("headstart", "heads", "inference", "training", "recipes", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that sees neither the clone nor the network."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    build = (
        "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1], {'--build-option': '--compression=stored'})"
    )
    run(sys.executable, "-c", build, folder, cwd=source)  # as pip does, which would call it twice
    (path,) = folder.glob("headstart-*.whl")
    return path


def test_it_holds_the_data_that_the_code_reads(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("quickstart/backbone", "quickstart/heads/eagle3", "smollm2/heads"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "headstart/recipes" / folder).iterdir() if path.is_file()}
        assert files and files <= names, folder
    assert "headstart/support/page.html.j2" in names
    assert {"headstart/recipes/schema.json", "headstart/recipes/qwen3-8b/eagle3.yaml", "headstart/py.typed"} <= names
    assert not [name for name in names if name.startswith("tests/") or "__pycache__" in name]


@pytest.fixture(scope="module")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment with the wheel."""
    tmp_path = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    binaries = tmp_path / "env" / "bin"
    site = Path(run(binaries / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # .pth files in there are not read
    run(sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--no-deps", wheel, cwd=tmp_path)
    home = run(binaries / "python", "-c", "import headstart; print(headstart.__file__)", cwd=tmp_path).strip()
    assert Path(home).is_relative_to(site)
    return binaries


def test_installed_outside_the_clone_it_trains_and_decodes(binaries: Path, tmp_path: Path) -> None:
    recipe = "recipes/quickstart/eagle3.yaml"  # of the package: there is no such file here
    settings = ["train.steps=2", "train.epochs=null", "train.batch_size=2", "data.limit=12", "data.eval_rows=2", "data.max_length=64"]
    settings += ["eval.prompts=1", "eval.max_new_tokens=4", "drafter.depth=2"]
    generate = ["generate", "--heads", "out", "def add(a, b):", "--max-new-tokens", "8", "--json", "written.json"]
    commands = f"main({['train', recipe, 'save.dir=out', *settings]}) or main({generate})"  # in one process, which imports torch once
    run(binaries / "python", "-c", f"import sys; from headstart.cli.main import main; sys.exit({commands})", cwd=tmp_path)
    assert run(binaries / "headstart", "--version", cwd=tmp_path).startswith("headstart ")
    metadata = json.loads((tmp_path / "out" / "headstart.json").read_text())
    assert metadata["provenance"]["steps"] == 2 and (tmp_path / "out" / "log.jsonl").exists()
    assert json.loads((tmp_path / "written.json").read_text())["tokens"] == 8


@pytest.mark.slow
def test_every_command_of_the_readme_that_needs_no_clone_runs(binaries: Path, tmp_path: Path) -> None:
    """One after another, as a reader types them, on the small backbone and few rows."""
    home = make_home(tmp_path)
    shutil.rmtree(home / "out" / "quickstart")  # the README trains these
    every = commands([ROOT / "README.md"])
    lines = [line for line in every if not reason_not_run(line)]
    left_out = {line for line in every if line not in lines}
    assert len(lines) >= 8 and all("--heads smollm2" in line for line in left_out), "which need the model"
    for line in lines:
        words = [word.replace("save.dir=out/new", "save.dir=out/quickstart/eagle3") for word in shorter(line, home)]
        clear(words, home)
        run(binaries / "headstart", *words, cwd=home)
    assert (home / "out" / "served" / "headstart_export.json").exists() and (home / "report.html").exists()
