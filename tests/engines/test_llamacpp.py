"""llama.cpp drafts with an exported GGUF what Headstart drafts, token by token. ``make engines`` does not install it:

python -m venv .venv-llamacpp && .venv-llamacpp/bin/pip install xllamacpp==2026.10.11549
"""

from __future__ import annotations

import json
import os
import re
import subprocess
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
from headstart.serving.verify.drafts import EngineSettings, Transcript, acceptance

PYTHON = Path(os.environ.get("HEADSTART_LLAMACPP_PYTHON", ROOT / ".venv-llamacpp" / "bin" / "python"))
SETTINGS = EngineSettings(4, 25)
CANDIDATE = re.compile(r"draft candidate +0, pos +(\d+): +(\d+) ")


@pytest.fixture(scope="session", autouse=True)
def engine() -> None:
    if not PYTHON.is_file():
        pytest.skip(f"there is no {PYTHON}: a Python with xllamacpp 2026.10.11549 (HEADSTART_LLAMACPP_PYTHON)")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded backbone as a GGUF file in fp32."""
    return write_gguf(tmp_path_factory.mktemp("target") / "t.gguf", load_backbone("embedded").model, load_tokenizer("embedded"), "F32")


def served(target: Path, draft: Path | None, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Of each prompt the tokens, the numbers of tokens drafted and accepted, and each draft, as the debug log names it."""
    request = {"target": str(target), "draft": draft and str(draft), "prompts": prompts}
    request |= {"depth": SETTINGS.depth, "new_tokens": SETTINGS.new_tokens}
    driver = Path(__file__).with_name("llamacpp_driver.py")
    done = subprocess.run([PYTHON, "-I", driver, json.dumps(request)], capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stderr[-2000:]
    found, logs = json.loads(done.stdout.splitlines()[-1]), done.stderr.split("processing task, is_child")[1:]
    for one, log in zip(found, logs, strict=True):
        one["drafts"] = []
        for place, token in CANDIDATE.findall(log):
            one["drafts"] += [[]] if place == "0" else []
            one["drafts"][-1].append(int(token))
    return found


def accepted(one: Transcript) -> int:
    """The written drafts of a text: all tokens but one a pass, the first pass being the prompt's."""
    return SETTINGS.new_tokens - 1 - len(one.rounds)


def test_llama_cpp_drafts_what_headstart_drafts(target: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = trained("eagle3-for-llama.cpp")
    export(Request(str(folder), "llama.cpp", tmp_path / "out"))
    found, plain = served(target, tmp_path / "out" / FILE, prompts), served(target, None, prompts)
    ours = headstart(folder, "embedded", prompts, SETTINGS)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in plain] == [list(one.written) for one in ours]
    assert [one["accepted"] for one in found] == [accepted(one) for one in ours]
    for theirs, one in zip(found, ours, strict=True):  # of the last round llama.cpp drafts no more than the text takes, or nothing
        assert len(one.rounds) - 1 <= len(theirs["drafts"]) <= len(one.rounds)
        assert theirs["drafts"] == [list(at.drafts[: len(draft)]) for draft, at in zip(theirs["drafts"], one.rounds, strict=False)]
    kept = acceptance(ours)["acceptance_rate_per_pos"]
    print(sum(len(one["drafts"]) for one in found), "drafts,", sum(one["drafted"] for one in found), "tokens; accepted by depth:", kept)
    assert kept[1] > 0.05, "few drafts were accepted: this test compares heads that have learnt nothing"


def test_heads_that_are_refused_are_accepted_less(target: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """Heads that feed back the normed state, written all the same: why the export refuses them."""
    folder = ROOT / "recipes" / "quickstart" / "heads" / "eagle3"
    assert read_metadata(folder)[1]["arguments"]["norm_output"]
    heads = read_checkpoint(str(folder), "embedded")
    assert "drafter.norm_output=false" in LlamaCpp().unread(heads)["llama.cpp"]
    LlamaCpp().write(heads, tmp_path)
    theirs = sum(one["accepted"] for one in served(target, tmp_path / FILE, prompts))
    ours = sum(map(accepted, headstart(folder, "embedded", prompts, SETTINGS)))
    print(f"accepted: Headstart {ours}, llama.cpp {theirs}")
    assert theirs < 0.8 * ours
