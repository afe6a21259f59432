"""llama.cpp drafts with an exported GGUF as Headstart does: its texts, and as many drafts accepted. ``make engines`` does not install it:

    python -m venv .venv-llamacpp && .venv-llamacpp/bin/pip install xllamacpp==2026.10.11549
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines_alone import headstart
from gguf_models import write_gguf
from trained import ROOT, trained

from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.heads.checkpoint import read_metadata
from headstart.serving.export import Request, export
from headstart.serving.layouts.checkpoint import read_checkpoint
from headstart.serving.layouts.llamacpp import FILE, LlamaCpp
from headstart.serving.verify.drafts import EngineSettings, Transcript

PYTHON = Path(os.environ.get("HEADSTART_LLAMACPP_PYTHON", ROOT / ".venv-llamacpp" / "bin" / "python"))
SETTINGS = EngineSettings(4, 25)


@pytest.fixture(scope="session", autouse=True)
def engine() -> None:
    if not PYTHON.is_file():
        pytest.skip(f"there is no {PYTHON}: a Python with xllamacpp 2026.10.11549 (HEADSTART_LLAMACPP_PYTHON)")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded backbone as a GGUF file in fp32."""
    return write_gguf(tmp_path_factory.mktemp("target") / "t.gguf", load_backbone("embedded").model, load_tokenizer("embedded"), "F32")


def served(target: Path, draft: Path | None, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Tokens, and numbers of tokens drafted and accepted, of each prompt."""
    request = {"target": str(target), "draft": draft and str(draft), "prompts": prompts}
    request |= {"depth": SETTINGS.depth, "new_tokens": SETTINGS.new_tokens}
    driver = Path(__file__).with_name("llamacpp_driver.py")
    done = subprocess.run([PYTHON, "-I", driver, json.dumps(request)], capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def accepted(one: Transcript) -> int:
    """The written drafts of a text: all tokens but one a pass, the first pass being the prompt's."""
    return SETTINGS.new_tokens - 1 - len(one.rounds)


def test_llama_cpp_accepts_what_headstart_accepts(target: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = trained("eagle3-for-llama.cpp")
    export(Request(str(folder), "llama.cpp", tmp_path / "out"))
    found, plain = served(target, tmp_path / "out" / FILE, prompts), served(target, None, prompts)
    ours = headstart(folder, "embedded", prompts, SETTINGS)
    print([one["accepted"] for one in found], [accepted(one) for one in ours], [one["drafted"] for one in found])
    assert [one["tokens"] for one in found] == [one["tokens"] for one in plain] == [list(one.written) for one in ours]
    assert [one["accepted"] for one in found] == [accepted(one) for one in ours]
    assert sum(map(accepted, ours)) > 20, "few drafts were accepted: this test compares heads that have learnt nothing"


def test_heads_that_are_refused_are_accepted_less(target: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """Heads that feed back the normed state, written all the same: why the export refuses them."""
    folder = ROOT / "recipes" / "quickstart" / "heads" / "eagle3"
    assert read_metadata(folder)[1]["arguments"]["norm_output"]
    heads = read_checkpoint(str(folder), "embedded")
    assert "drafter.norm_output=false" in LlamaCpp().unread(heads)["llama.cpp"]
    LlamaCpp().write(replace(heads), tmp_path)
    theirs = sum(one["accepted"] for one in served(target, tmp_path / FILE, prompts))
    ours = sum(map(accepted, headstart(folder, "embedded", prompts, SETTINGS)))
    print(f"accepted: Headstart {ours}, llama.cpp {theirs}")
    assert theirs < 0.8 * ours
