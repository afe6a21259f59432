# ruff: noqa: E501
"""A selection of the mistakes of mistakes.py, in this process: each ends in a result, or in one line with status 2, and changes no file."""

from pathlib import Path

import pytest
from house import inside, make_house
from mistake import Mistake, write
from mistakes import mistakes
from trial import judge, snapshot, try_command

SECONDS = 60
ISSUE = ("recipe: list as key", "recipe: int of text", "recipe: nested mappings", "override: drafter.kind=../../etc", "override: drafter.depth=5000",
         "override: data.train=pipe.jsonl", "save.dir=/proc/x", "override: seed=-1", "data, train: surrogate in content", "data, bench: deep",
         "data, regenerate: images in content", "generate, standard input: closed", "chat, then: no UTF-8", "generate --temperature '1e308'",
         "generate --threads '100000'", "card, inspect: nested arguments", "generate --json /proc/x",
         "recipe: a long name", "override: train.batch_size=100000000000", "card, inspect: file of null", "saved state: deep", "plan --memory 1e308")  # fmt: skip
"""Of every kind one, and what was mended last."""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_house(tmp_path_factory.mktemp("house"))


def hold(house: Path, mistake: Mistake) -> None:
    with inside(house) as folder:
        for name, content in mistake.files.items():
            write(name, content)()
        if mistake.prepare is not None:
            mistake.prepare()
        before = snapshot(folder)
        outcome = try_command(mistake.argv, mistake.stdin, SECONDS)
        assert not outcome.fault, f"{mistake.name}: {outcome.fault}"
        after = snapshot(folder)
        if outcome.status == 2:
            assert {name: after.get(name) for name in before} == before, mistake.name


@pytest.mark.parametrize("name", ISSUE)
def test_one_of_every_kind(house: Path, name: str) -> None:
    hold(house, next(mistake for mistake in mistakes() if mistake.name == name))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_every_sixth(house: Path, part: int) -> None:
    for mistake in mistakes()[::6][part::6]:
        hold(house, mistake)


def test_the_judge_finds_what_breaks_the_promise() -> None:
    assert judge(0, "") == judge(2, "note\nerror: a\n") == ""
    for status, err in (
        (70, "error: a"),
        (2, ""),
        (2, "error: a\nerror: b"),
        (2, "error: a\nmore"),
        (2, "Traceback\nerror: a"),
        (None, ""),
    ):
        assert judge(status, err), (status, err)
