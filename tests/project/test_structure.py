"""Limits of the size of the product, of what a command imports and of the depth of its calls: a change that needs less lowers them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from matrix import mark_slow_cells
from structure import PLUGIN, ROOT, counts, depths, generate, lines_of_code, size_of_tests

LIMITS = {"files": 210, "lines": 37_468, "lines of code": 26_615}
PLUGIN_LIMITS = {"files": 16, "lines": 2_877, "lines of code": 2_157}
TEST_LIMITS = {"lines": 34_417, "setattr": 57, "setattr of a private name": 0}
"""Before: 42,976 lines in 307 files, 38,377 of tests; 44,176 in 313 with what the first hour and silent differences took; 37,903 in 262
before small files were joined to the stories that used them; a plugin of 2,660.
Taken of 1,500 for every model: chains 258, codes of all types of GGUF file 348 of the plugin, the sweep 17; of 300 for heads that pay: what
`plan` says of them 108, kernels for AVX2 32, faster attention 43; of 2,000 for engines: llama.cpp 386, asking it by `verify`, DFlash2 322,
P-EAGLE 226, shortlists 165, EAGLE-4 94, confidence heads 63, OpenVINO 52; of 700 for images: decoding 350, training 261, rows of bench 22.
Beside them: heads of 4 bits 163, silent differences in calls, files and rows 251, faults of commands and rarer calls 98."""
IMPORTED = 76
FRAMES = {"generate": 11, "SpeculativeModel.generate": 8, "train": 13}
DEFAULT = {"frames": 10, "folders": 10}
"""From ``main`` to the pass that drafts, with the default flags: calls, and the folders of which functions have run by then."""
TEST_ENTRIES = 15


def test_the_size_of_the_product() -> None:
    for found, limits in ((counts(ROOT), LIMITS), (counts(ROOT, PLUGIN), PLUGIN_LIMITS)):
        over = {name: f"{count}, at most {limits[name]}" for name, count in found.items() if count > limits[name]}
        assert not over, f"the product has grown: {over}; take something away"


def test_the_size_of_the_tests() -> None:
    over = {name: f"{count}, at most {TEST_LIMITS[name]}" for name, count in size_of_tests(ROOT).items() if count > TEST_LIMITS[name]}
    assert not over, f"the tests have grown: {over}; take something away"


@pytest.mark.slow
def test_the_depth_of_calls() -> None:
    found = depths(ROOT)
    assert found == {name: min(count, FRAMES[name]) for name, count in found.items()} and min(found.values()) > 3


@pytest.mark.slow
def test_the_default_path_to_a_draft() -> None:
    seen = generate(ROOT, "draft_levels")
    folders = {file.rpartition("/")[0] for file in seen["ran"]}
    assert {"headstart/cli", "headstart/inference/capture"} <= folders
    assert len(seen["chain"]) <= DEFAULT["frames"] and len(folders) <= DEFAULT["folders"], (seen["chain"], sorted(folders))


def test_the_tests_stand_in_folders() -> None:
    assert len([path for path in (ROOT / "tests").iterdir() if path.name != "__pycache__"]) <= TEST_ENTRIES


def test_what_a_line_of_code_is(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    text = 'X = """a text\nof two lines"""\n\n\ndef f():\n    """One."""\n    return X\n'
    module.write_text(f'"""A docstring\n\nof three lines."""\n\n# a comment\n{text}')
    assert lines_of_code(module) == 4
    script = tmp_path / "kernel.cpp"
    script.write_text("// a comment\n\nint main() {\n}\n")
    assert lines_of_code(script) == 2


def test_growth_is_seen(tmp_path: Path) -> None:
    for folder in ("heads", "inference", "training", "headstart"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "heads" / "medusa.py", tmp_path / "heads")
    one = counts(tmp_path)
    (tmp_path / "training" / "script.js").write_text("let a = 1;\n")
    assert counts(tmp_path) == {name: count + 1 for name, count in one.items()}


# What stands beside the one decoding loop can be deleted: beam search, early exit, and each proposer are used by nothing else. Of the
# rest ``generate`` imports few files.

BESIDE = ("inference/beam", "inference/early_exit.py", "inference/engine/history.py")
PROGRAM = """
import sys
from headstart.cli.main import main

assert main(["generate", "--heads", "embedded", "--max-new-tokens", "8", "def read_config(path):"]) == 0
print("imported", *(file for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None) or "").startswith(ROOT)))

import headstart, torch
from headstart.heads.backbone.backbone import load_backbone

on = load_backbone("embedded")
heads = headstart.load("embedded", on, proposers="suffix", capture="off")
ids = torch.arange(40, 60)[None]
plain = on.model.generate(ids, max_new_tokens=12, do_sample=False)
drafted = on.model.generate(ids, custom_generate=heads.generate, max_new_tokens=12, do_sample=False)
assert torch.equal(plain, drafted)
"""


@pytest.mark.parametrize("gone", [BESIDE, *(pytest.param((name,), marks=pytest.mark.slow) for name in BESIDE)])
def test_decoding_goes_on_without(gone: tuple[str, ...], tmp_path: Path) -> None:
    for folder in ("heads", "inference", "training", "headstart"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for name in gone:
        path = tmp_path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", f"ROOT = {f'{tmp_path}/'!r}\n{PROGRAM}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (imported,) = (line.split()[1:] for line in done.stdout.splitlines() if line.startswith("imported "))
    assert len(imported) > 40 and len({*imported}) <= IMPORTED, "\n".join(imported)


# The rule of the marker `matrix`, which says which cells of a wide matrix are slow.

pytest_plugins = ["pytester"]
SOURCE = """
@pytest.mark.matrix{marker}
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind,arguments", [("medusa", {{}}), ("eagle3", {{}}), ("eagle3", {{"depth": 3}})], ids=["m", "e", "e3"])
@pytest.mark.parametrize("sample", [False, True])
def test_{number}(family, kind, arguments, sample):
    pass
"""
ALL = {f"{sample}-{kind}-{family}" for sample in ("False", "True") for kind in ("m", "e", "e3") for family in ("llama", "gpt2")}
FAST = {
    "": {"False-m-llama", "True-e-gpt2", "False-e3-llama"},
    "('kind', 'family')": {f"{sample}-{rest}" for sample in ("False", "True") for rest in ("m-llama", "e-gpt2", "e3-llama")},
    "('arguments', cells=2)": {name for name in ALL if "-e3-" not in name},
    "(cells=1)": {"False-m-llama"},
}
MISTAKEN = ("('no_such_axis')", "(rows=3)")


def test_the_diagonal_is_fast_and_a_mistaken_marker_an_error(pytester: pytest.Pytester) -> None:
    markers = [*FAST, *MISTAKEN]
    items = pytester.getitems("import pytest\n" + "".join(SOURCE.format(marker=one, number=i) for i, one in enumerate(markers)))
    for number, marker in enumerate(markers):
        cells = {item.name.partition("[")[2].removesuffix("]"): item for item in items if item.name.startswith(f"test_{number}[")}
        assert set(cells) == ALL
        if marker in MISTAKEN:
            with pytest.raises(AssertionError):
                mark_slow_cells([*cells.values()])
            continue
        mark_slow_cells([*cells.values()])
        assert {name for name, item in cells.items() if item.get_closest_marker("slow") is None} == FAST[marker], marker
