"""The check before training: how many answers are tokenised as they are written, and an error that says which is not, and why."""

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
from chat_templates import (
    CHATML,
    OPENING,
    PLAIN,
    QWEN3,
    conversations,
    make_chat_model,
    make_chat_recipe,
    make_samples,
    make_tokenizer,
    write_rows,
)
from errors import refusal, refuses, report_of
from tokenizers import normalizers
from webpage import Reader

from headstart.chat import conversation
from headstart.chat.messages import read_conversation
from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_tokenizer
from headstart.support.errors import UserError
from headstart.training.data.data import load_data
from headstart.training.data.kept import ROWS, Splits
from headstart.training.data.rows import read_rows
from headstart.training.recipe.recipe import Data
from headstart.training.regenerate.items import Conversation, Response, read_items


def loaded(folder: Path, rows: list[dict[str, Any]], tokenizer: Any = None, **data: Any) -> Splits:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Data(train=str(folder / "rows.jsonl"), eval_rows=0, **data)
    tokenizer = tokenizer or make_tokenizer(CHATML)
    return load_data(settings, tokenizer, 4096, ends=(tokenizer.convert_tokens_to_ids("<|im_end|>"),), progress=False)


def with_ids(rows: list[dict[str, Any]], change: int = 0) -> list[dict[str, Any]]:
    """The rows with their exact tokens, of which ``change`` is added to the last but one of each answer."""
    chat = conversation.Chat(make_tokenizer(CHATML))
    found = []
    for row in rows:
        ((ids, mask),) = chat.samples(row["messages"])
        ids[-2] += change
        found.append(row | {"input_ids": ids, "loss_mask": [int(label) for label in mask]})
    return found


@pytest.mark.parametrize("template", [CHATML, QWEN3])
def test_answers_that_are_tokenised_as_written(template: str, tmp_path: Path) -> None:
    rows = conversations(ROWS + 30)
    check = loaded(tmp_path, rows, make_tokenizer(template)).check
    assert check is not None and str(check) == f"{check.answers} of {check.answers} answers are tokenised as they are written"
    assert ROWS <= check.answers <= 2 * ROWS and not check.warning and not check.stored
    kept = loaded(tmp_path, with_ids(rows)).check
    assert kept is not None and kept.stored and kept.same == kept.answers
    assert loaded(tmp_path, rows, loss_on="all").check is loaded(tmp_path, [{"text": "four five"}]).check is None


def test_a_text_may_begin_with_what_the_prompt_has_opened(tmp_path: Path) -> None:
    said = "<think>\nso\n</think>\n\nFour."
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]}]
    tokenizer = make_tokenizer(OPENING)
    check = loaded(tmp_path, rows, tokenizer).check
    assert check is not None and check.same == 1
    ((ids, mask),) = conversation.Chat(tokenizer).samples(rows[0]["messages"])
    kept = loaded(tmp_path, [rows[0] | {"input_ids": ids, "loss_mask": [int(label) for label in mask]}], tokenizer).check
    assert kept is not None and kept.same == 1


def test_another_prompt_than_transformers_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = conversation.Chat.tokens
    monkeypatch.setattr(conversation.Chat, "tokens", lambda self, texts: tokens(self, [text.replace("Hi", "Ho") for text in texts]))
    error = refusal(loaded, tmp_path, conversations())
    assert error.startswith("only 0 of 12 answers are tokenised as they are written (of some of the rows). ")
    assert "rows.jsonl, row 1, turn 1, its prompt: from token" in error and "the prompt is not what apply_chat_template gives" in error
    tokenizer = make_tokenizer(CHATML)
    for text in ("Hi", "Ho"):
        assert str(tokenizer(text, add_special_tokens=False)["input_ids"])[1:-1] in error, "both token lists"


def test_a_tokenizer_that_does_not_give_a_text_back_is_an_error(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(UserError, match=r"only 0 of 12 .* row 1, turn 1: .* likely cause: the tokenizer or the chat template changes the"):
        loaded(tmp_path, conversations(), tokenizer)


def test_few_exceptions_pass(tmp_path: Path) -> None:
    """Below 5 % where no tokens are kept: an answer that holds the end-of-sequence token is cut there."""
    odd = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It<|im_end|>is"}]}]
    check = loaded(tmp_path, conversations(60) + odd).check
    assert check is not None and check.answers - check.same == 1 and "row 61, turn 1" in str(check.first)
    refuses("only 12 of 13 answers", loaded, tmp_path, conversations(8) + odd)


def test_text_that_does_not_say_what_was_written_is_an_error(tmp_path: Path) -> None:
    rows = with_ids(conversations(), change=1)
    exact = loaded(tmp_path, with_ids(conversations()), format="messages").check
    assert exact is not None and exact.stored and exact.same == exact.answers == 12
    with pytest.raises(UserError, match=r"the text does not say all that was written; train on the tokens \(data.format=tokens\)"):
        loaded(tmp_path, rows, format="messages")


def test_tokens_of_another_tokenizer_are_an_error(tmp_path: Path) -> None:
    other = make_tokenizer(CHATML, special="<|im_start|> <|im_end|> <|a|> <|b|> <|c|>")
    refuses("only 0 of 12 .* or the token ids are another tokenizer's", loaded, tmp_path, with_ids(conversations()), other)


def test_train_and_inspect_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(make_chat_recipe(tmp_path, make_chat_model(tmp_path / "model", PLAIN)))
    page = tmp_path / "page.html"
    written = report_of(tmp_path, "inspect", recipe, "--row", "1", "--html", page)
    out = capsys.readouterr().out
    assert "answers   12 of 12 answers are tokenised as they are written" in out
    assert "warning the chat template writes no end-of-sequence token of the model" in " ".join(out.split())
    assert written["data"]["check"]["as_written"] == 12 and {"token", "loss"} <= written["sample"][0].keys()
    assert main(["train", recipe]) == 0
    said = capsys.readouterr().err
    assert "answers   12 of 12 answers are tokenised as they are written" in said and "warning   the chat template writes no" in said
    shown = Reader(page.read_text())
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert tokenizer.decode([one["token"] for one in written["sample"]]) in shown.words
    assert [value for _, name, value in shown.attributes if name == "title"] == [str(one["token"]) for one in written["sample"]]
    classes = {value for tag, name, value in shown.attributes if (tag, name) == ("span", "class")}
    assert {"a", "soft", "soft unused"} <= classes and "12 of 12 answers" in shown.words


# What a row says beside its text: nulls of tables, turns and tokens that are not to be learned, and fields that nothing reads.


def called(name: str, arguments: dict[str, Any], **properties: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    said = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "ok"},
    ]
    return {"messages": said, "tools": [tool]}


CALLED = [
    called("weather", {"city": "Oslo", "places": [{"x": 1}]}, city={"type": "string"}),
    called("add", {"a": 2, "value": 3, "places": [{"y": 2}]}, a={"type": "integer"}, value={"type": "integer", "minimum": 0}),
]


def read(source: Path) -> list[Any]:
    return [read_conversation(row, "messages", "x") for row in read_rows(str(source))]


def test_rows_of_tables_are_those_of_lines(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(CALLED)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    table.to_json(tmp_path / "table.jsonl")  # lines with the table's nulls, which its schemas betray
    write_rows(tmp_path / "rows.jsonl", CALLED)
    assert "null" in (tmp_path / "table.jsonl").read_text()
    want = read(tmp_path / "rows.jsonl")
    assert want[0][0][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo", "places": [{"x": 1}]}
    for name in ("rows.parquet", "saved", "table.jsonl"):
        assert read(tmp_path / name) == want, name


def test_calls_without_tools_and_maps_of_tables(tmp_path: Path) -> None:
    alone = [{"messages": row["messages"]} for row in CALLED]
    datasets.Dataset.from_list(alone).to_json(tmp_path / "table.jsonl")
    write_rows(tmp_path / "rows.jsonl", alone)
    assert read(tmp_path / "table.jsonl") == read(tmp_path / "rows.jsonl")
    text = pyarrow.string()
    function = pyarrow.struct({"name": text, "arguments": pyarrow.map_(text, text)})
    turn = pyarrow.struct({"role": text, "content": text, "tool_calls": pyarrow.list_(pyarrow.struct({"function": function}))})
    turns = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": [("city", "Oslo")]}}]}]
    pyarrow.parquet.write_table(pyarrow.table({"messages": pyarrow.array([turns], pyarrow.list_(turn))}), tmp_path / "maps.parquet")
    assert read(tmp_path / "maps.parquet")[0][0][0]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


def test_nulls_of_lines_are_values_and_contents_of_tables_stay(tmp_path: Path) -> None:
    own = called("f", {"unit": None}, unit={"type": ["string", "null"], "default": None})
    own["messages"][1]["content"] = None
    write_rows(tmp_path / "rows.jsonl", [own])
    ((messages, tools),) = read(tmp_path / "rows.jsonl")
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"unit": None} and messages[1]["content"] is None
    assert tools[0]["function"]["parameters"]["properties"]["unit"]["default"] is None
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": None}]
    datasets.Dataset.from_list([{"conversations": turns}]).to_parquet(tmp_path / "turns.parquet")
    assert read_rows(str(tmp_path / "turns.parquet")) == [{"conversations": turns}]


def talk(**mark: Any) -> list[dict[str, Any]]:
    turns = [("user", "Two and two?"), ("assistant", "Five, I think."), ("user", "Sure?"), ("assistant", "Four.")]
    return [{"role": role, "content": text} | (mark if i == 1 else {}) for i, (role, text) in enumerate(turns)]


def labels(row: dict[str, Any]) -> tuple[str, str]:
    tokenizer = make_tokenizer(CHATML)
    (sample,), _ = make_samples([row], tokenizer, Data(train="x"), source="x")
    return tokenizer.decode(sample.tokens), tokenizer.decode(sample.tokens[sample.loss_mask])


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"masked": True}])
def test_a_marked_turn_is_read_and_not_learned(mark: dict[str, Any]) -> None:
    text, learned = labels({"messages": talk(**mark)})
    assert "Five, I think." in text and "Five" not in learned and "Four." in learned
    ((name, value),) = mark.items()
    assert "Five" in labels({"messages": talk(**{name: 1 - value})})[1], "the other value"


def test_regenerating_keeps_a_marked_turn() -> None:
    (item,) = read_items([{"messages": talk(weight=0)}], Data(train="x"), "x")
    assert isinstance(item, Conversation) and [one["role"] for one in item.messages] == ["user", "assistant", "user"]
    item.add_response(Response({"role": "assistant", "content": "4"}))
    new = item.result()
    assert new is not None and not item.pending and new["messages"] == [*talk(weight=0)[:3], {"role": "assistant", "content": "4"}]


IDS = [5, 6, 7, 8, 9]


@pytest.mark.parametrize(("masks", "learned"), [
    ({"labels": [-100, -100, 7, 8, -100]}, [7, 8]),
    ({"completion_mask": [0, 0, 1, 1, 1]}, [7, 8, 9]),
    ({"completion_mask": [0, 1, 1, 1, 1], "assistant_masks": [1, 0, 1, 1, 0]}, [7, 8]),
    ({"loss_mask": [0, 0, 1, 1, 1], "labels": [-100, 6, 7, -100, 9]}, [7, 9]),
    ({"loss_mask": [0, 1, 1, 1, 1], "attention_mask": [0, 1, 1, 1, 1]}, [6, 7, 8, 9]),
])  # fmt: skip
def test_every_mask_counts(masks: dict[str, Any], learned: list[int]) -> None:
    for row in ({"input_ids": IDS} | masks, {"input_ids": [IDS]} | {name: [mask] for name, mask in masks.items()}):
        (sample,), _ = make_samples([row], make_tokenizer(CHATML), Data(train="x"), source="x")
        assert sample.tokens[sample.loss_mask].tolist() == learned
        assert sample.tokens.tolist() == [token for token, real in zip(IDS, masks.get("attention_mask", [1] * 5), strict=True) if real]


def test_what_nothing_reads_is_named_at_every_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {
        "chat_template_kwargs": {"enable_thinking": False}, "documents": [], "loss_mask": [1], "absent": None, "system": "Be brief.",
        "row": 3,
    }  # fmt: skip
    rows = [{"messages": talk(train_detail=[], name="x")} | extra, {"messages": [talk()[0] | {"train": True}, *talk()[1:]]}]
    write_rows(tmp_path / "rows.jsonl", rows)
    for _ in range(2):  # the second one takes the tokens of the first
        caplog.clear()
        with caplog.at_level(logging.WARNING, "headstart"):
            load_data(Data(train=str(tmp_path / "rows.jsonl"), eval_rows=0), make_tokenizer(CHATML), 4096, progress=False)
        fields = "chat_template_kwargs, documents, loss_mask, train of a turn that is not the assistant's, train_detail"
        assert caplog.messages == [f"rows have fields that are not read: {fields}"]
    write_rows(tmp_path / "plain.jsonl", [json.loads(json.dumps({"messages": talk(weight=0), "tools": []}))])
    caplog.clear()
    load_data(Data(train=str(tmp_path / "plain.jsonl"), eval_rows=0), make_tokenizer(CHATML), 4096, progress=False)
    assert not caplog.messages
