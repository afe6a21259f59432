"""Tokens are made in several processes, kept in the cache folder by what they depend on, and made once for a launch."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from chat_templates import CHATML, TURNS, VICUNA, chat, make_samples, make_tokenizer
from errors import refuses
from safetensors.torch import save_file
from small_run import Forked, make_recipe
from watched import watched

import headstart
from headstart.cli import main as command
from headstart.training.data import kept, tokenise
from headstart.training.data.data import load_data
from headstart.training.data.kept import Splits
from headstart.training.data.tokenise import free_cpus, in_parts
from headstart.training.recipe.recipe import Data

TALK = chat(*TURNS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headstart" / "tokens"


def write(path: Path, count: int = 40, words: str = "four") -> str:
    rows = [{"messages": [*TALK[:1], {"role": "assistant", "content": f"It is {words}, not {i}."}, *TALK[2:]]} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbers(splits: Splits) -> list[Any]:
    samples = [[(one.tokens.tolist(), one.loss_mask.tolist(), one.tokens.dtype) for one in part] for part in (splits.train, splits.eval)]
    return [samples, splits.stats, splits.mix, splits.check]


def load(train: Any, *, tokenizer: Any = None, ends: tuple[int, ...] = (), **data: Any) -> Splits:
    settings = Data.model_validate({"train": train, "eval_rows": 4, "max_length": 256} | data)
    return load_data(settings, tokenizer or make_tokenizer(CHATML), 4096, ends=ends, progress=False)


def in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "PART", 3)
    monkeypatch.setattr(tokenise, "LEAST", 5)


def test_several_processes_make_what_one_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"messages": [TALK[0], {"role": "tool", "content": "4"}, TALK[1]]}
    rows = [{"messages": TALK[: 2 + 2 * (i % 2)]} if i % 7 else refused for i in range(50)]
    made = []
    for processes in (1, 3):
        state = torch.get_rng_state()
        samples, stats = make_samples(rows, make_tokenizer(VICUNA), Data(train="x", processes=processes, max_length=40), source="x")
        assert torch.equal(torch.get_rng_state(), state)
        made.append(([(one.tokens.tolist(), one.loss_mask.tolist()) for one in samples], stats))
        in_children(monkeypatch)
    assert made[0] == made[1] and made[0][1].rows_refused == 8 and made[0][1].rows == 50


def test_each_part_has_its_process_and_small_data_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(in_parts(lambda part: os.getpid(), 2 * tokenise.LEAST - 1, 2)) == {os.getpid()}
    in_children(monkeypatch)
    assert len(set(in_parts(lambda part: (time.sleep(0.05), os.getpid())[1], 40, 2)) - {os.getpid()}) == 2
    assert set(in_parts(lambda part: signal.getsignal(signal.SIGINT), 40, 2)) == {signal.SIG_IGN}, "an interrupt is the first one's alone"
    assert list(in_parts(lambda part: [*part], 11, 2)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]] and not list(in_parts(len, 0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(24))
    assert free_cpus() == 16
    for processes, free in (("17", 8), ("64", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert free_cpus() == free


def test_a_fault_in_a_process_is_the_same_line(monkeypatch: pytest.MonkeyPatch) -> None:
    in_children(monkeypatch)
    rows = [{"text": "a b c d e " * (9 if i == 30 else 1)} for i in range(40)]
    data = Data(train="x", processes=2, max_length=40, overlong="error")
    refuses("^x, row 31 has ", make_samples, rows, make_tokenizer(), data, source="x")
    with pytest.raises(ZeroDivisionError):
        list(in_parts(lambda part: part.start // 0, 40, 2))


def test_the_processes_end_with_the_one_that_started_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def big(part: range) -> bytes:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(0.05)  # so that the other one has parts too
        return bytes(1 << 20)  # more than a pipe takes

    def alive(pid: str) -> bool:
        status = Path(f"/proc/{pid}/stat")
        return status.exists() and status.read_text().split()[2] != "Z"

    in_children(monkeypatch)
    if not (parent := os.fork()):
        try:
            made = in_parts(big, 100, 2)  # kept: it ends the processes when it is gone
            next(made)
            time.sleep(60)
        finally:
            os._exit(1)
    end = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    started = [path.name for path in tmp_path.iterdir()]
    while any(map(alive, started)) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(started) == 2 and not any(map(alive, started))


def test_a_killed_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(part: range) -> int:
        if part.start == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return part.start

    in_children(monkeypatch)
    refuses("a process that tokenises has ended .*; give it more memory, or set data.processes=1", list, in_parts(dies, 40, 2))


def test_a_second_start_reads_what_the_first_has_kept(folder: Path, tmp_path: Path) -> None:
    train = [{"path": write(tmp_path / f"{name}.jsonl", 40, name), "weight": 2} for name in ("one", "two")]
    first = load(train, ends=(5,))
    (file,) = folder.iterdir()
    again = load(train, ends=(5,), processes=7)
    assert numbers(again) == numbers(first) and (first.kept, again.kept) == (False, True) and list(folder.iterdir()) == [file]
    assert first.mix is not None and first.check is not None and first.check.warning and "tokens of an earlier start" in str(again)
    assert folder.stat().st_mode & 0o777 == 0o700  # for the user alone


def test_whatever_the_tokens_depend_on_has_its_own_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, other = write(tmp_path / "rows.jsonl"), write(tmp_path / "held.jsonl", 9)
    bpe, tokenizer = make_tokenizer(CHATML), make_tokenizer(CHATML)
    tokenizer.add_tokens(["four"])
    changes: list[dict[str, Any]] = [
        {}, {"max_length": 40}, {"eval_rows": 5}, {"limit": 30}, {"ends": (7,)}, {"template_kwargs": {"a": 1}}, {"loss_on": "all"},
        {"chat_template": CHATML + " "}, {"tokenizer": tokenizer}, {"eval": other}, {"tokenizer": make_tokenizer(VICUNA)},
    ]  # fmt: skip
    for number, change in enumerate(changes, 1):
        assert not load(source, **{"tokenizer": bpe} | change).kept and len(list(folder.iterdir())) == number
    assert all(load(source, **{"tokenizer": bpe} | change).kept for change in changes)
    write(Path(other), 9, "five")
    assert not load(source, tokenizer=bpe, eval=other).kept and load(source, tokenizer=bpe).kept
    write(Path(source), 40, "five")
    assert not load(source, tokenizer=bpe).kept
    used = {Path(sys.modules[one].__file__ or "").parent for one in ("headstart.chat.conversation", tokenise.__name__)}
    assert used <= {Path(headstart.__file__).parent / folder for folder in kept.CODE}
    kept._code.cache_clear()
    monkeypatch.setattr(headstart, "__version__", "another")
    assert not load(source, tokenizer=bpe).kept


def test_files_of_patterns_folders_and_datasets_count_by_content(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows").mkdir()
    for name in ("a", "b"):
        write(tmp_path / "rows" / f"{name}.jsonl", 10, name)
    pattern = f"{tmp_path}/rows/*.jsonl"
    assert not load(pattern).kept and load(pattern).kept
    write(tmp_path / "rows" / "c.jsonl", 10)
    assert not load(pattern).kept
    datasets.disable_progress_bars()
    for count in (10, 12):
        datasets.Dataset.from_list([{"messages": TALK}] * count).save_to_disk(str(tmp_path / "saved"))
        assert not load(str(tmp_path / "saved")).kept and load(str(tmp_path / "saved")).kept
    (tmp_path / "someone" / "corpus").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for count in (20, 15):
        write(tmp_path / "someone" / "corpus" / "rows.jsonl", count)
        assert not load("someone/corpus").kept and load("someone/corpus").kept


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [
    flipped, lambda file: file.write_bytes(file.read_bytes()[:-9]), lambda file: file.write_bytes(b""),
    lambda file: file.write_text("something else"), lambda file: save_file({"x": torch.zeros(3)}, file),
    lambda file: save_file({"x": torch.zeros(3)}, file, {"about": "[]"}), lambda file: save_file({}, file, {"about": '{"format": 1}'}),
    lambda file: file.write_bytes(next(one for one in file.parent.iterdir() if one != file).read_bytes()), lambda file: file.unlink(),
])  # fmt: skip
def test_a_damaged_or_foreign_file_is_made_again(damage: Callable[[Path], Any], folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl")
    first = load(source)
    (file,) = folder.iterdir()
    content = file.read_bytes()
    load(source, max_length=40)
    damage(file)
    again = load(source)
    assert not again.kept and numbers(again) == numbers(first) and file.read_bytes() == content and load(source).kept


def test_a_cache_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reference = write(tmp_path / "rows.jsonl"), None
    for place in ("/dev/null/none", str(tmp_path / "rows.jsonl")):
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        reference = reference or numbers(load(source))
        assert numbers(load(source)) == reference and not load(source).kept


def test_a_template_that_prints_the_date_is_kept_with_its_instant_alone(folder: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer("{{ strftime_now('%d %b') }}" + CHATML, special="<|im_start|> <|im_end|>")
    source = write(tmp_path / "rows.jsonl")
    assert not load(source, tokenizer=tokenizer).kept and not folder.exists()
    for time_ in ("2026-11-26T09:00:00", "2026-11-27T09:00:00"):
        assert not load(source, tokenizer=tokenizer, template_time=time_).kept
        assert load(source, tokenizer=tokenizer, template_time=time_).kept


def test_the_files_used_last_remain(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "rows.jsonl")
    for age, length in enumerate((40, 50, 60)):
        load(source, max_length=length)
        for file in folder.iterdir():
            os.utime(file, (time.time() - 60, file.stat().st_mtime - 60 * (age + 1)))
    left, fresh = folder / ".x.tokens.1a.tmp", folder / ".y.tokens.1a.tmp"
    for name, days in ((left, 2), (fresh, 0)):
        name.touch()
        os.utime(name, (0, time.time() - 86400 * days))
    assert load(source, max_length=40).kept  # used last now
    monkeypatch.setattr(kept, "MOST_FILES", 4)  # with the unfinished one
    load(source, max_length=70)
    assert fresh.exists() and not left.exists()
    assert [load(source, max_length=length).kept for length in (40, 60, 70)] == [True] * 3 and not load(source, max_length=50).kept
    monkeypatch.setattr(kept, "MOST_BYTES", 1)
    load(source, max_length=80)
    assert len(list(folder.glob("*.tokens"))) == 1 and load(source, max_length=80).kept


def test_a_launch_tokenises_once_and_a_fault_ends_every_process(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, calls = make_recipe(tmp_path, train={"steps": 1}, eval={"prompts": 1}), tmp_path / "calls"

    def noted(*args: Any) -> None:
        with calls.open("a") as file:
            file.write(f"{os.environ['RANK']}\n")

    watched(monkeypatch, tokenise, "in_parts", noted)
    log = tmp_path / "log.txt"
    assert Forked(2, [str(recipe), f"save.dir={tmp_path / 'out'}"], log).wait() == 0, log.read_text()[-3000:]
    assert set(calls.read_text().split()) == {"0"} and len(list(folder.iterdir())) == 1
    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=lambda _: None))  # the others wait to be ended
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": 5}\n')
    assert Forked(2, [str(recipe), f"save.dir={tmp_path / 'other'}", f"data.train={bad}"], log).wait() == 2
    assert "error (process 1): " in log.read_text() and log.read_text().count("bad.jsonl, row 1: plain text expected; got int") == 2
