"""What stands beside the one decoding loop can be deleted: beam search, early exit, and each proposer are used by nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BESIDE = ("inference/beam", "inference/early_exit.py", "inference/proposers/history.py")
PROGRAM = """
import headstart, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
from headstart.heads.backbone.backbone import load_backbone

assert str(Path(headstart.__file__)).startswith(ROOT), headstart.__file__
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
    command = [sys.executable, "-c", f"ROOT = {str(tmp_path)!r}\n{PROGRAM}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
