"""``headstart regenerate`` in process: a row is written when it ends, progress is shown from the first step, unfinished answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from server import said, serving
from test_endpoint import ask as ask_server  # noqa: F401
from test_regenerate import ask, dialogues, result, rows_of, talker  # noqa: F401

from headstart.inference.decode import Decoder
from headstart.inference.sources.proposer_source import MAX_PROPOSER_ROWS, ProposerSource
from headstart.support import terminal

SAMPLED = ("regenerate.temperature=1", "regenerate.max_new_tokens=120")


def test_a_killed_run_keeps_every_row_that_has_ended(ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    rows = dialogues(12)
    assert ask(rows, *SAMPLED, out="whole.jsonl") == 0
    step, count = Decoder.step, iter(range(10_000))

    def dying(self: Decoder, *args: Any) -> Any:
        if next(count) == 25:
            raise KeyboardInterrupt
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", dying)
        assert ask(None, *SAMPLED) == 130
    kept = rows_of(tmp_path / "new.jsonl.partial")[1:]
    assert 3 <= len(kept) < 12 and not (tmp_path / "new.jsonl").exists()
    with (tmp_path / "new.jsonl.partial").open("ab") as half:
        half.write(b'{"row": 6, "tur')  # partly written when killed
    assert ask(None, *SAMPLED) == 0 and result(tmp_path)["rows_resumed"] == len(kept)
    assert (tmp_path / "new.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_progress_is_shown_from_the_first_step(ask: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:  # noqa: F811
    monkeypatch.setattr(terminal, "FILE_SECONDS", 0.0)
    assert ask(dialogues(9), *SAMPLED) == 0
    states = re.findall(r"(\d)/9 \[[\d:]+<([\d:?]+),[^],]*(, [\d,]+ tokens/s)?\]", capsys.readouterr().err)
    assert states[0] == ("0", "?", "") and states[1][0] == "0" and states[1][2]
    assert states[-1][0] == "9" and [int(rows) for rows, *_ in states] == sorted(int(rows) for rows, *_ in states)
    assert any(rows not in "09" and left != "?" for rows, left, _ in states)


def test_unfinished_answers_are_kept_if_asked_for(ask: Any, tmp_path: Path, capsys: Any) -> None:  # noqa: F811
    """A kept one is what was written until then, and the last of its conversation."""
    rows, short = dialogues(), ("regenerate.temperature=1", "regenerate.max_new_tokens=7")
    assert ask(rows, *SAMPLED, out="long.jsonl") == ask(rows, *short, out="dropped.jsonl") == 0
    dropped = result(tmp_path)
    assert f"{dropped['truncated']} rows had an answer that did not end within" in capsys.readouterr().err
    assert ask(rows, *short, "regenerate.unfinished=keep", out="kept.jsonl") == 0
    report = result(tmp_path)
    files = (rows_of(tmp_path / f"{name}.jsonl") for name in ("long", "dropped", "kept"))
    whole, less, kept = ({row["row"]: row["messages"] for row in rows} for rows in files)
    assert 0 < len(less) == len(rows) - dropped["rows_dropped"] < len(rows)
    assert len(kept) == len(rows) == report["rows_written"] and report["truncated"] == dropped["truncated"] > 0
    assert f"{report['truncated']} rows had an answer that did not end within regenerate.max_new_tokens, which is kept cut off" in (
        capsys.readouterr().err
    )
    cut = 0
    for row, messages in kept.items():
        before, last = messages[:-1], messages[-1]
        assert before == whole[row][: len(before)] and last["role"] == "assistant"
        answer = whole[row][len(before)]["content"]
        if last["content"] != answer:
            cut += 1
            assert answer.startswith(last["content"]) and less.get(row, []) == before[: len(less.get(row, []))]
    assert 0 < cut <= report["truncated"], "one that lacks nothing but its end is whole"
    assert ask(rows, *short, "regenerate.unfinished=cut", out="x.jsonl") == 2
    assert "regenerate.unfinished is one of 'drop', 'keep'; got 'cut'" in capsys.readouterr().err


def test_unfinished_answers_of_a_server_are_kept_too(ask_server: Any, tmp_path: Path) -> None:  # noqa: F811
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}]
    answers = iter([said("cut", "length"), said(None, "length"), said("cut", "length")])
    with serving(lambda path, body: next(answers)) as server:
        assert ask_server(rows, server.url, "regenerate.unfinished=keep") == 0
        assert [one["content"] for one in rows_of(tmp_path / "new.jsonl")[0]["messages"]] == ["a", "cut"]
        (tmp_path / "new.jsonl").unlink()
        assert ask_server(rows, server.url, "regenerate.unfinished=keep") == 2, "nothing was written"
        assert ask_server(rows, server.url) == 2


def test_proposers_do_not_draft_for_many_rows(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(ProposerSource, "most_rows", 4)
    assert MAX_PROPOSER_ROWS > 8, "those of regenerate.batch_size"
    drafted: list[int] = []
    draft = ProposerSource.draft
    monkeypatch.setattr(ProposerSource, "draft", lambda self, rows, *of: (drafted.append(len(rows.roots)), draft(self, rows, *of))[1])
    assert ask(dialogues(20), *SAMPLED) == 0
    assert drafted and max(drafted) <= 4, "they do again for the last rows"


def test_several_answers_to_each_row(ask: Any, tmp_path: Path) -> None:  # noqa: F811
    """Each is what one more equal row would get."""
    rows = dialogues(3)
    assert ask(rows, "regenerate.temperature=1", "regenerate.max_new_tokens=24", "regenerate.samples=2") == 0
    several = rows_of(tmp_path / "new.jsonl")
    assert ask([*rows, *rows], "regenerate.temperature=1", "regenerate.max_new_tokens=24", out="again.jsonl") == 0
    assert several == rows_of(tmp_path / "again.jsonl") and [row["row"] for row in several] == list(range(6))
    assert any(one["messages"] != other["messages"] for one, other in zip(several[:3], several[3:], strict=True))
