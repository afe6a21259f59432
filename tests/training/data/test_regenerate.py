"""``headstart regenerate`` in process: turn by turn, independent of batch and order, resumed to the same file, errors named."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, GEMMA
from chat_templates import read_rows as rows_of

from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.support.files import locked
from headstart.training.recipe.recipe import Data
from headstart.training.regenerate.items import Conversation, Response, read_items
from headstart.training.regenerate.partial import PartialFile

SAMPLED = ("regenerate.temperature=1", "regenerate.max_new_tokens=24")
QUESTIONS = ["What is two?", "And three?", "Hi there", "Is it four?", "Six or two?", "What is it?"]


def turns(*contents: str) -> list[dict[str, Any]]:
    """Messages, alternately the user's and the assistant's."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def dialogues(count: int = 9) -> list[dict[str, Any]]:
    """Conversations of one to three questions, one of which appears twice."""
    rows = [{"messages": turns(*(text for q in QUESTIONS[: 1 + i % 3] for text in (f"{q} {i}", "old")))} for i in range(count - 1)]
    return [*rows, rows[0]]


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_every_turn_sees_the_answers_before_it(ask: Any, talker: Path, tmp_path: Path, capsys: Any) -> None:
    opened = [{"role": "assistant", "content": "Welcome"}, *turns("What is two?", "old", "And three?", "old")]
    conversation = [{"role": "system", "content": "Be brief", "name": "x"}, *turns("Hi there")]
    both = [{"messages": opened}, {"messages": conversation, "id": 7}]
    assert ask(both, "regenerate.temperature=0", "regenerate.max_new_tokens=40") == 0
    first, second = rows_of(tmp_path / "new.jsonl")
    assert (first["row"], second["row"], first["messages"][:2], first["messages"][3]) == (0, 1, opened[:2], opened[3])
    assert second["messages"][:2] == conversation and second["messages"][2]["role"] == "assistant", "a last question is answered"
    backbone, tokenizer = load_backbone(str(talker), device="cpu"), load_tokenizer(str(talker))
    for messages in (first["messages"], second["messages"]):
        for i, message in enumerate(messages[2:], 2):  # each equals transformers' own generate on the messages before it
            if message["role"] == "assistant":
                ids = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_tensors="pt", return_dict=True)
                answer = backbone.model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
                assert tokenizer.decode(answer[:-1], skip_special_tokens=True) == message["content"]
    report = result(tmp_path)
    assert (report["rows"], report["rows_written"], report["turns"], report["rows_dropped"]) == (2, 2, 3, 0)
    assert report["tau"] >= 1 and report["tokens"] > 3 and report["tokens_per_second"] > 0
    assert "2 of 2 rows, 3 answers" in (stderr := capsys.readouterr().err) and f"length (tau) {report['tau']:.2f}" in stderr
    assert not list(tmp_path.glob("*.partial"))


def test_rows_take_one_of_several_temperatures(ask: Any, tmp_path: Path) -> None:
    rows, found = dialogues(17), []
    for temperature in ("0", "1", "[0, 1]", "[0, 1, 1, 1, 1, 1]"):
        assert ask(rows, f"regenerate.temperature={temperature}", "regenerate.max_new_tokens=120", out=f"{temperature}.jsonl") == 0
        found.append({row["row"]: row["messages"] for row in rows_of(tmp_path / f"{temperature}.jsonl")})
    greedy, sampled, mixed, mostly = found
    assert all(mixed[row] in (greedy[row], sampled[row]) for row in greedy), "all turns of a row are of one temperature"
    assert 3 < sum(mixed[row] != greedy[row] for row in greedy) < sum(mostly[row] != greedy[row] for row in greedy), "by their number"
    assert ask([rows[i] for i in (5, 0)], "regenerate.max_new_tokens=120", out="order.jsonl") == 0  # the default
    assert [row["messages"] for row in rows_of(tmp_path / "order.jsonl")] == [mixed[5], mixed[0]], "whatever the order of the rows"


def test_what_was_answered_in_time_is_written(ask: Any, tmp_path: Path, capsys: Any) -> None:
    rows = [{"messages": turns(f"What is {i}?")} for i in range(60)]
    assert ask(rows, "regenerate.hours=1e-5", "regenerate.batch_size=2", "regenerate.unfinished=keep", *SAMPLED) == 0
    answered, report = [row["row"] for row in rows_of(tmp_path / "new.jsonl")], result(tmp_path)
    assert 0 < len(answered) < 60 and answered != [*range(len(answered))], "in random order"
    assert (report["rows_written"], report["rows_not_asked"], report["rows_dropped"]) == (len(answered), 60 - len(answered), 0)
    assert f"{report['rows_not_asked']} rows were not asked in time (regenerate.hours)" in capsys.readouterr().err
    assert ask(None, *SAMPLED, "regenerate.unfinished=keep", out="all.jsonl") == 0 and result(tmp_path)["rows_not_asked"] == 0
    assert [rows_of(tmp_path / "all.jsonl")[row] for row in answered] == rows_of(tmp_path / "new.jsonl")


def test_what_cannot_be_asked_is_dropped_counted_and_named(ask: Any, tmp_path: Path, capsys: Any) -> None:
    rows = [{"messages": turns("Hi")}, {"messages": turns("two three " * 99)}, {"messages": turns("Hi", "a")[1:]}, {"messages": []}]
    wrong = [{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}]
    assert ask(rows + wrong, "regenerate.temperature=1", "regenerate.max_new_tokens=90", f"data.chat_template={json.dumps(GEMMA)}") == 1
    said = capsys.readouterr().err
    assert "leaves no room for regenerate.max_new_tokens in the model's context: rows [2]\n" in said, said
    assert re.search(r"the endpoint refused \(.*\): rows \[5\]\n", said), said
    report = result(tmp_path)
    assert {name: report[name] for name in ("rows_written", "too_long", "empty", "refused")} == {
        "rows_written": 1, "too_long": 1, "empty": 2, "refused": 1,
    }  # fmt: skip
    assert ask(rows[1:], out="none.jsonl") == 2
    assert not (tmp_path / "none.jsonl").exists() and not list(tmp_path.glob("*.partial"))


def test_texts_are_continued_and_never_dropped(ask: Any, talker: Path, tmp_path: Path) -> None:
    texts = ["What is two and two? It is four. And three?", "Hi there", ""]
    options = ("regenerate.prompt_tokens=6", "regenerate.max_new_tokens=5")
    assert ask([{"text": text} for text in (*texts, f"<s>{texts[0]}")], *options) == 0
    (*rows, twice), tokenizer = rows_of(tmp_path / "new.jsonl"), load_tokenizer(str(talker))
    assert twice["input_ids"][:6] == rows[0]["input_ids"][:6], "with one first token"
    for row, text, kept in zip(rows, texts[:2], (6, (len(tokenizer(texts[1])["input_ids"]) + 1) // 2), strict=True):
        ids = tokenizer(row["text"])["input_ids"]
        assert ids[:kept] == tokenizer(text)["input_ids"][:kept] and row["text"] != text
    report = result(tmp_path)
    assert (report["rows_written"], report["empty"], report["truncated"]) == (3, 1, 0) and 3 <= report["tokens"] <= 15


@pytest.mark.matrix(cells=2)
@pytest.mark.parametrize(("change", "message"), [
    (["regenerate.temperature=0.5"], "regenerate.temperature was 1.0, now it is 0.5"),
    (["regenerate.max_new_tokens=25"], "regenerate.max_new_tokens was 24, now it is 25"),
    (["seed=4"], "seed was 0, now it is 4"),
    (["regenerate.limit=8"], "rows was 9, now it is 8"),
    (["data.train=other"], "data.train was"),
    (["rows"], "hash of the rows was"),
    (["backbone.path=embedded"], "backbone.path was"),
    ([f"data.chat_template={json.dumps(CHATML + ' ')}"], "chat template was"),
    (["regenerate.endpoint=http://localhost:1/v1"], "responses was 'in process', now it is 'from an endpoint'"),
])  # fmt: skip
def test_a_half_done_file_of_something_else_is_refused(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, change: list[str], message: str
) -> None:
    rows = dialogues()
    monkeypatch.setattr(PartialFile, "finish", lambda self: 1 / 0)
    ask(rows, *SAMPLED)
    before = (half := tmp_path / "new.jsonl.partial").read_bytes()
    if change == ["data.train=other"]:
        (tmp_path / "other.jsonl").write_text((tmp_path / "rows.jsonl").read_text())
        change = [f"data.train={tmp_path / 'other.jsonl'}"]
    if change == ["rows"]:
        rows[0], change = {"messages": turns("Another one")}, []
    assert ask(rows, *SAMPLED, *change) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error and str(half) in error and "delete the file to begin anew, or choose another regenerate.out" in error
    assert half.read_bytes() == before


def test_bad_input_is_one_line_and_nothing_is_written(ask: Any, tmp_path: Path, capsys: Any) -> None:
    there = tmp_path / "there.jsonl"
    there.write_text("mine")
    both = ("regenerate.heads=out/x", "regenerate.endpoint=http://localhost:8000/v1")
    cases = [
        (both, "new.jsonl", "regenerate.heads and regenerate.endpoint='http://localhost:8000/v1' are two ways to answer"),
        (("regenerate.out=null",), "new.jsonl", "regenerate.out is not set"),
        ((), "new.json", "regenerate.out is the name of a .jsonl file, or null"),
        ((), "there.jsonl/new.jsonl", "there.jsonl is not a folder that you may write to"),
        ((), "there.jsonl", "is there already; delete it, or choose another name"),
        (("data.train=nowhere.jsonl",), "new.jsonl", "data file nowhere.jsonl"),
        (("data.train=[a.jsonl, b.jsonl]",), "new.jsonl", "data.train mixes 2 datasets, and answers keep no weights; regenerate them one"),
        (("data.column=chats",), "new.jsonl", "has the columns messages, not chats"),
        (("data.format=text", "data.column=messages"), "new.jsonl", "row 1: plain text expected; got list"),
        (("regenerate.heads=nowhere",), "new.jsonl", "no heads at 'nowhere'"),
        (("regenerate.endpoint=localhost:8000",), "new.jsonl", "regenerate.endpoint is an http(s) address, or null; got 'localhost:8000'"),
        ((both[1], "regenerate.api_key=NO_KEY"), "new.jsonl", "regenerate.api_key=NO_KEY names no environment variable that is set"),
        (("regenerate.samples=2",), "new.jsonl", "regenerate.samples needs regenerate.temperature above 0, at which answers"),
    ]
    for overrides, out, message in cases:
        assert ask(dialogues(3), *overrides, out=out) == 2, overrides
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error and error.startswith("error: "), (overrides, error)
    assert there.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "recipe.yaml", "there.jsonl"}


def test_a_damaged_or_used_half_done_file_is_named(tmp_path: Path) -> None:
    out, half = tmp_path / "new.jsonl", tmp_path / "new.jsonl.partial"
    with PartialFile(out, {"seed": 1}) as partial:
        partial.append({"row": 0, "turns": 1, "tokens": 2, "error": "", "detail": "", "result": {"text": "a"}})
        with pytest.raises(ValueError, match="is being written by another process"):
            PartialFile(out, {"seed": 1})
    half.write_text(half.read_text() + "nonsense\n")
    with pytest.raises(ValueError, match="line 3 is damaged .* delete the file to begin anew"):
        PartialFile(out, {"seed": 1})
    half.write_text('{"headstart": "regen')  # torn before any row was written
    with PartialFile(out, {"seed": 2}) as partial:
        assert not partial.offsets
    with locked(tmp_path / ".new.jsonl.lock", "regenerate.out") as free:
        assert free


def test_seeds_follow_what_a_row_holds() -> None:
    data, rows = Data(train="x.jsonl"), [{"messages": turns("a")}, {"messages": turns("b")}, {"messages": turns("a")}]
    here, there = (read_items(order, data, "x") for order in (rows, rows[::-1]))
    seeds = [[one.seed(0) for one in asked] for asked in (here, there)]
    assert len(set(seeds[0])) == 3 and set(seeds[0]) == set(seeds[1]) and seeds[0][1] == seeds[1][1]
    assert seeds[0] != [one.seed(1) for one in here] and all(0 <= seed < 1 << 63 for seed in seeds[0])
    assert isinstance(here[0], Conversation) and here[0].pending
    here[0].add_response(Response({"role": "assistant", "content": "b"}, 2))
    assert here[0].seed(0) not in seeds[0], "each turn has its own"
