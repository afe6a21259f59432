"""Atomic file writes, locks between processes, hashes; tokens as text, one after another."""

import os
from multiprocessing import get_context
from pathlib import Path

import pytest
from chat_templates import make_tokenizer
from errors import refuses

from headstart.support.errors import UserError
from headstart.support.files import atomic, discard_unfinished, file_hash, locked, require_file, value_hash, write_json
from headstart.support.text import TokenTextStream, token_texts


def test_a_file_that_is_not_there_is_compared_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "eagle3.yaml").touch()
    refuses(r"eagel3\.yaml: there is no such file; did you mean .*eagle3\.yaml\?", require_file, "recipe", tmp_path / "eagel3.yaml")
    (tmp_path / "train.jsonl").touch()
    for unlike in ("test.jsonl", "x.yaml"):  # the ending alone is no likeness
        refuses("there is no such file; check its name", require_file, "data", tmp_path / unlike)
    refuses("there is no such file; check its name", require_file, "recipe", tmp_path / "nothing" / "eagel3.yaml")


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
