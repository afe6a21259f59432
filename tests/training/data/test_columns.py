"""Columns of JSON text, speakers of ShareGPT files, and bad rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, TURNS, chat, make_samples, make_tokenizer
from published import shapes
from test_regenerate import rows_of, turns

from headstart.chat.images import for_server
from headstart.chat.messages import read_messages
from headstart.chat.prompts import Prompter, read_prompts
from headstart.support.errors import UserError
from headstart.training.data.data import load_data, sound_rows
from headstart.training.data.samples import find_column
from headstart.training.recipe.recipe import Data
from headstart.training.regenerate.items import Completion, Conversation, read_items

QWEN_25 = shapes()["qwen2.5"]
TALK = chat(*TURNS)
SHAREGPT = [{"from": "human", "value": TURNS[0][1]}, {"from": "gpt", "value": TURNS[1][1]}]
TEXT = json.dumps(TALK)


def tokens_of(rows: list[dict[str, Any]], **data: Any) -> list[tuple[list[int], list[bool]]]:
    samples, _ = make_samples(rows, make_tokenizer(QWEN_25.template, special=QWEN_25.special), Data(train="x", **data), source="x")
    return [(one.tokens.tolist(), one.loss_mask.tolist()) for one in samples]


@pytest.mark.parametrize(("row", "data"), [
    ({"messages": TEXT}, {}), ({"messages": f"\n {TEXT} "}, {}), ({"messages": json.dumps(TEXT)}, {}),
    ({"messages": json.dumps(TALK, indent=2)}, {"format": "messages"}), ({"messages": [json.dumps(turn) for turn in TALK]}, {}),
    ({"conversations": TEXT}, {}), ({"text": TEXT}, {}),
    ({"chosen": TEXT}, {"column": "chosen"}), ({"prompt": TEXT}, {"column": "prompt"}),
])  # fmt: skip
def test_conversations_as_json_text_are_parsed(row: dict[str, Any], data: dict[str, Any]) -> None:
    assert tokens_of([row], **data) == tokens_of([{"messages": TALK}])


def test_text_stays_text_where_the_recipe_says_so_or_it_is_no_conversation() -> None:
    as_text = tokens_of([{"messages": TEXT}], format="text", column="messages")
    assert all(all(mask) for _, mask in as_text) and as_text != tokens_of([{"messages": TALK}])
    for text in ("[1] A footnote.", '[{"name": "x"}]', "[INST] Hello [/INST]", "[", '{"role": "x"}'):
        assert all(all(mask) for _, mask in tokens_of([{"text": text + " and so on"}]))


def test_the_format_and_the_column_are_not_guessed_from_the_first_row() -> None:
    rows: list[dict[str, Any]] = [{"body": "Hi"}, *[{"body": TEXT}] * 200]
    data = Data(train="x", column="body")
    assert find_column(rows, data, "x").kind == find_column(rows[::-1], data, "x").kind == "chat"
    assert sound_rows(rows, data, "x")[0] == rows[1:]
    plain: list[dict[str, Any]] = [{"text": TEXT}, *[{"text": "It is four."}] * 200]
    assert find_column(plain, Data(train="x"), "x").kind == "text"
    kept, bad = sound_rows(plain, Data(train="x"), "x")
    assert kept == plain[1:] and bad.rows_bad == 1 and "row 1: a conversation as JSON text among plain texts" in bad.bad_row
    with pytest.raises(UserError, match="row 1: a conversation as JSON text among plain texts"):
        make_samples(plain, make_tokenizer(CHATML), Data(train="x"), source="x")
    mixed: list[dict[str, Any]] = [{"messages": None, "text": "a"}, *[{"messages": TALK, "text": "a"}] * 3]
    assert find_column(mixed, Data(train="x"), "x").name == "messages"


def test_tools_and_calls_as_json_text_are_parsed() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}, TALK[1]]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    template = "{% if tools %}{{ tools[0].function.name }}{% endif %}" + QWEN_25.template
    tokenizer = make_tokenizer(template, special=QWEN_25.special)

    def made(row: dict[str, Any]) -> list[list[int]]:
        return [one.tokens.tolist() for one in make_samples([row], tokenizer, Data(train="x"), source="x")[0]]

    expected = made({"messages": messages, "tools": tools})
    assert expected != made({"messages": messages, "tools": ""}) == made({"messages": messages, "tools": "null"})
    as_text = [message | {"tool_calls": json.dumps([call])} if "tool_calls" in message else message for message in messages]
    for row in (
        {"messages": messages, "tools": json.dumps(tools)},
        {"messages": messages, "tools": [json.dumps(one) for one in tools]},
        {"messages": json.dumps(messages), "tools": json.dumps(json.dumps(tools))},
        {"messages": as_text, "tools": tools},
    ):
        assert made(row) == expected


@pytest.mark.parametrize("value", [
    '{"name": "add", "arguments": {"a": 2}}', '[{"name": "add", "arguments": {"a": 2}}]', {"name": "add", "arguments": {"a": 2}},
    '{"name": "add", "arguments": "{\\"a\\": 2}"}', '{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}',
])  # fmt: skip
def test_the_speakers_of_llama_factory(value: Any) -> None:
    turns = [
        {"from": "system", "value": "Be brief."}, {"from": "human", "value": "Add."}, {"from": "function_call", "value": value},
        {"from": "observation", "value": "4"}, {"from": "gpt", "value": "Four."},
    ]  # fmt: skip
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four."},
    ]  # fmt: skip
    for speaker, text in (("from", "value"), ("role", "content"), ("role", "value"), ("from", "content")):
        named = [{speaker: turn["from"], text: turn["value"]} for turn in turns]
        filled = [dict.fromkeys(("role", "content", "from", "value")) | turn for turn in named]
        for row in ({"conversations": named}, {"messages": named}, {"messages": json.dumps(named)}, {"messages": filled}):
            assert tokens_of([row]) == tokens_of([{"messages": messages}])


def test_thoughts_before_calls_several_calls_and_null_values() -> None:
    value = '<think>\nI add.\n</think>\n\n[{"name": "a", "arguments": {}}, {"name": "b"}]'
    first, second = read_messages([{"from": "function_call", "value": value}, {"from": "gpt", "value": None}], "x")
    assert first["reasoning_content"] == "I add." and [call["function"]["name"] for call in first["tool_calls"]] == ["a", "b"]
    assert second == {"role": "assistant", "content": None}
    assert read_messages([{"role": "function_call", "content": '{"name": "a"}'}], "x")[0]["role"] == "assistant"


BAD = {"messages": [TALK[0], {"role": "assistant", "content": 5}]}


@pytest.mark.parametrize("bad", [BAD, {"messages": None}, {"messages": "["}, {"messages": [{"from": "alien", "value": "x"}]}, {"other": 1}])
@pytest.mark.parametrize("place", [0, 77, 150])
def test_a_bad_row_among_many_is_left_out_and_named(tmp_path: Path, bad: dict[str, Any], place: int) -> None:
    rows: list[dict[str, Any]] = [{"messages": TALK}] * 150
    rows.insert(place, bad)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer(CHATML)
    splits = load_data(Data(train=str(file), eval_rows=8, max_length=256), tokenizer, 256, progress=False)
    assert (len(splits.train), len(splits.eval), splits.stats.rows_bad) == (142, 8, 1)
    assert f"1 bad rows left out ({file}, row {place + 1}" in str(splits.stats)
    with pytest.raises(UserError, match=f"rows.jsonl, row {place + 1}"):
        load_data(Data(train=str(file), max_length=256, on_bad_row="error"), tokenizer, 256, progress=False)


def test_held_out_rows_without_labels_are_named_as_such(tmp_path: Path) -> None:
    cut = {"messages": [{"role": "user", "content": "two " * 300}, TALK[-1]]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [cut, *[{"messages": TALK}] * 9]))
    with pytest.raises(UserError, match="no label tokens in the held-out rows of .*rows.jsonl: 1 rows"):
        load_data(Data(train=str(tmp_path / "rows.jsonl"), eval_rows=1, max_length=256), make_tokenizer(CHATML), 256, progress=False)


def test_from_one_percent_on_bad_rows_are_an_error() -> None:
    rows: list[dict[str, Any]] = [*[{"messages": TALK}] * 198, BAD, BAD]
    with pytest.raises(UserError, match=r"x, row 199, turn 1: content is text.*\(2 of 200 rows are bad; below 1 % they are skipped\)"):
        sound_rows(rows, Data(train="x"), "x")
    assert sound_rows(rows[:-1] + rows[:2], Data(train="x"), "x")[1].rows_bad == 1
    tokens = [*[{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]}] * 150, {"input_ids": [1, -2], "loss_mask": [1, 1]}]
    assert sound_rows(tokens, Data(train="x"), "x")[1].rows_bad == 1


# Rows of two columns, a prompt and its answer, by their usual names and by those of the recipe.

ASKED, SAID = "What is two?", "It is four."
PAIR = turns(ASKED, SAID)
ALPACA = {"instruction": "What is", "input": "two?", "output": SAID}


def made(row: dict[str, Any], template: str | None = CHATML, ends: tuple[int, ...] = (), **data: Any) -> list[tuple[list[int], list[bool]]]:
    samples, _ = make_samples([row], make_tokenizer(template), Data(train="x", **data), source="x", ends=ends)
    return [(one.tokens.tolist(), one.loss_mask.tolist()) for one in samples]


@pytest.mark.parametrize("row", [
    {"prompt": ASKED, "completion": SAID}, {"prompt": ASKED, "response": SAID}, {"query": ASKED, "response": SAID},
    {"question": ASKED, "answer": SAID}, {"problem": ASKED, "solution": SAID, "answer": "4"}, {"input": ASKED, "output": SAID},
    {"instruction": ASKED, "input": "", "output": SAID, "text": "### Instruction:"}, {"instruction": ASKED, "output": SAID},
    {"instruction": ASKED, "input": [], "context": None, "output": SAID, "system": {}},
    {"prompt": PAIR[:1], "completion": PAIR[1:]}, {"prompt": json.dumps(PAIR[:1]), "completion": SAID},
])  # fmt: skip
def test_pairs_of_the_usual_names_are_conversations(row: dict[str, Any]) -> None:
    assert made(row) == made({"messages": PAIR})


def test_answers_within_a_prompt_are_no_labels_and_stay() -> None:
    talk = turns(ASKED, "Two.", "Sure?", SAID)
    expected = [talk[0], talk[1] | {"weight": 0}, *talk[2:]]
    for prompt in (talk[:3], json.dumps(talk[:3])):
        for answer in (SAID, talk[3:]):
            assert made({"prompt": prompt, "completion": answer}) == made({"messages": expected}) != made({"messages": talk})
        (item,) = read_items([{"prompt": prompt, "completion": SAID}], Data(train="x"), "x")
        assert isinstance(item, Conversation) and item.pending and item.messages == expected[:3]
        assert for_server(item.messages, "x") == talk[:3]


def test_an_instruction_goes_on_with_its_input_and_begins_with_the_system_message() -> None:
    expected = turns("What is\ntwo?", SAID)
    assert made(ALPACA) == made({"messages": expected})
    assert made({"instruction": "What is", "context": "two?", "response": SAID}) == made({"messages": expected})
    system = {"role": "system", "content": "Be brief."}
    assert made(ALPACA | {"system": "Be brief."}) == made({"messages": [system, *expected]})


def test_the_recipe_names_the_columns(tmp_path: Path) -> None:
    row = {"ask": ASKED, "say": SAID, "text": "no", "question": "no", "answer": "no"}
    columns = {"prompt": "ask", "completion": "say"}
    assert made(row, columns=columns) == made({"messages": PAIR})
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 3)
    mixed = Data(train=[{"path": str(file), "columns": columns}], eval_rows=1)
    splits = load_data(mixed, make_tokenizer(CHATML), 2048, progress=False)
    assert splits.train[0].tokens.tolist() == made({"messages": PAIR})[0][0] and splits.check is not None and splits.check.answers


def test_without_a_chat_template_the_answer_follows_as_it_is_and_ends() -> None:
    tokenizer = make_tokenizer()
    asked, said = tokenizer(ASKED)["input_ids"], tokenizer(f" {SAID}", add_special_tokens=False)["input_ids"]
    row = {"prompt": ASKED, "completion": f" {SAID}"}
    assert made(row, None, ends=(7, 8)) == [([*asked, *said, 7], [False] * len(asked) + [True] * (len(said) + 1))]
    assert made(row | {"prompt": f"<s>{ASKED}"}, None) == made(row, None), "with one first token"
    assert made(row, None)[0][0][-1] == tokenizer.eos_token_id
    assert made(row, None, loss_on="all")[0][1] == [True] * (len(asked) + len(said) + 1)
    templated = made(row, CHATML, columns={"prompt": "prompt", "completion": "completion"}, format="text")[0]
    assert sum(templated[1]) == len(made(row, None)[0][0]) - len(asked), "the template is left out where the recipe says text"
    with pytest.raises(UserError, match="row 1: prompt and completion are text without a chat template; set data.chat_template"):
        made({"prompt": PAIR[:1], "completion": PAIR[1:]}, None)
    with pytest.raises(UserError, match="row 1: prompt and completion are text without a chat template"):
        made({"prompt": json.dumps(PAIR[:1]), "completion": SAID}, None)


def test_what_is_no_pair_is_as_before_and_errors_name_both_columns() -> None:
    assert find_column([{"text": "a", "question": "b"}], Data(train="x"), "x").name == "text"
    assert find_column([{"messages": PAIR, "prompt": "a", "completion": "b"}], Data(train="x"), "x").name == "messages"
    with pytest.raises(UserError, match=r"x has the columns ask, say, not .*; name yours with .*data.columns=\{prompt: A, completion: B\}"):
        find_column([{"ask": ASKED, "say": SAID}], Data(train="x"), "x")
    with pytest.raises(UserError, match="data.columns.completion is not set"):
        find_column([{"ask": ASKED}], Data(train="x", columns={"prompt": "ask"}), "x")
    rows: list[dict[str, Any]] = [{"question": ASKED, "answer": SAID}] * 150
    bad = sound_rows([*rows, {"question": ASKED, "answer": None}], Data(train="x"), "x")[1]
    assert bad.bad_row == "x, row 151 has no answer; it has question"


def test_prompts_are_read_alike(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [ALPACA, {"query": "What is\ntwo?", "response": SAID}, {"problem": "What is\ntwo?"}, {"messages": turns("What is\ntwo?", SAID)}]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    prompts = [prompt.ids_T.tolist() for prompt in read_prompts(file, Prompter(make_tokenizer(CHATML)))]
    assert prompts == [prompts[0]] * 4


def test_prompts_are_regenerated(ask: Any, tmp_path: Path) -> None:
    how = ("regenerate.max_new_tokens=40", "regenerate.unfinished=keep")
    assert ask([{"messages": turns(ASKED, SAID)}], *how, out="talk.jsonl") == 0
    for row in ({"prompt": ASKED, "completion": SAID}, {"question": ASKED}):
        (tmp_path / "new.jsonl").unlink(missing_ok=True)
        assert ask([row], *how) == 0
        new, old = rows_of(tmp_path / "new.jsonl"), rows_of(tmp_path / "talk.jsonl")
        assert [one["messages"] for one in new] == [one["messages"] for one in old] and new[0]["messages"][1]["content"] != SAID


def test_without_a_chat_template_the_whole_prompt_is_continued() -> None:
    rows, long = [{"prompt": ASKED * 9, "completion": SAID}], 90
    kinds = [type(read_items(rows, Data(train="x"), "x", templated)[0]) for templated in (True, False)]
    assert kinds == [Conversation, Completion]
    item = read_items(rows, Data(train="x"), "x", templated=False)[0]
    assert isinstance(item, Completion) and item.text == ASKED * 9 and item.prompt_length(long, 64) == long
