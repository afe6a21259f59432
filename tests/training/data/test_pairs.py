"""Rows of two columns, a prompt and its answer, by their usual names and by those of the recipe."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, make_tokenizer
from test_regenerate import ask, rows_of, talker, turns  # noqa: F401
from tokenised import make_samples

from headstart.chat.prompts import Prompter, read_prompts
from headstart.cli.main import main
from headstart.support.errors import UserError
from headstart.training.data.data import load_data, sound_rows
from headstart.training.data.samples import find_column
from headstart.training.recipe.recipe import Data
from headstart.training.regenerate.items import Completion, Conversation, read_items

ASKED, SAID = "What is two?", "It is four."
TALK = turns(ASKED, SAID)
ALPACA = {"instruction": "What is", "input": "two?", "output": SAID}


def made(row: dict[str, Any], template: str | None = CHATML, ends: tuple[int, ...] = (), **data: Any) -> list[tuple[list[int], list[bool]]]:
    samples, _ = make_samples([row], make_tokenizer(template), Data(train="x", **data), source="x", ends=ends)
    return [(one.tokens.tolist(), one.loss_mask.tolist()) for one in samples]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "completion": SAID}, {"prompt": ASKED, "response": SAID}, {"query": ASKED, "response": SAID},
        {"question": ASKED, "answer": SAID}, {"problem": ASKED, "solution": SAID, "answer": "4"}, {"input": ASKED, "output": SAID},
        {"instruction": ASKED, "input": "", "output": SAID, "text": "### Instruction:"}, {"instruction": ASKED, "output": SAID},
        {"prompt": TALK[:1], "completion": TALK[1:]}, {"prompt": json.dumps(TALK[:1]), "completion": SAID},
    ],
)  # fmt: skip
def test_pairs_of_the_usual_names_are_conversations(row: dict[str, Any]) -> None:
    assert made(row) == made({"messages": TALK})


def test_an_instruction_goes_on_with_its_input_and_begins_with_the_system_message() -> None:
    expected = turns("What is\ntwo?", SAID)
    assert made(ALPACA) == made({"messages": expected})
    assert made({"instruction": "What is", "context": "two?", "response": SAID}) == made({"messages": expected})
    system = {"role": "system", "content": "Be brief."}
    assert made(ALPACA | {"system": "Be brief."}) == made({"messages": [system, *expected]})


def test_the_recipe_names_the_columns(tmp_path: Path) -> None:
    row = {"ask": ASKED, "say": SAID, "text": "no", "question": "no", "answer": "no"}
    columns = {"prompt": "ask", "completion": "say"}
    assert made(row, columns=columns) == made({"messages": TALK})
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 3)
    mixed = Data(train=[{"path": str(file), "columns": columns}], eval_rows=1)
    splits = load_data(mixed, make_tokenizer(CHATML), 2048, progress=False)
    assert splits.train[0].tokens.tolist() == made({"messages": TALK})[0][0] and splits.check is not None and splits.check.answers


def test_without_a_chat_template_the_answer_follows_as_it_is_and_ends() -> None:
    tokenizer = make_tokenizer()
    asked, said = tokenizer(ASKED)["input_ids"], tokenizer(f" {SAID}", add_special_tokens=False)["input_ids"]
    row = {"prompt": ASKED, "completion": f" {SAID}"}
    assert made(row, None, ends=(7, 8)) == [([*asked, *said, 7], [False] * len(asked) + [True] * (len(said) + 1))]
    assert made(row, None)[0][0][-1] == tokenizer.eos_token_id
    assert made(row, None, loss_on="all")[0][1] == [True] * (len(asked) + len(said) + 1)
    templated = made(row, CHATML, columns={"prompt": "prompt", "completion": "completion"}, format="text")[0]
    assert sum(templated[1]) == len(made(row, None)[0][0]) - len(asked), "the template is left out where the recipe says text"
    with pytest.raises(UserError, match="row 1: prompt and completion are text without a chat template; set data.chat_template"):
        made({"prompt": TALK[:1], "completion": TALK[1:]}, None)


def test_what_is_no_pair_is_as_before_and_errors_name_both_columns() -> None:
    assert find_column([{"text": "a", "question": "b"}], Data(train="x"), "x").name == "text"
    assert find_column([{"messages": TALK, "prompt": "a", "completion": "b"}], Data(train="x"), "x").name == "messages"
    with pytest.raises(UserError, match=r"x has the columns ask, say, not .*; name yours with .*data.columns=\{prompt: A, completion: B\}"):
        find_column([{"ask": ASKED, "say": SAID}], Data(train="x"), "x")
    with pytest.raises(UserError, match="data.columns.completion is not set"):
        find_column([{"ask": ASKED}], Data(train="x", columns={"prompt": "ask"}), "x")
    rows: list[dict[str, Any]] = [{"question": ASKED, "answer": SAID}] * 150
    bad = sound_rows([*rows, {"question": ASKED, "answer": None}], Data(train="x"), "x")[1]
    assert bad.bad_row == "x, row 151 has no answer; it has question, answer"


def test_both_ways_to_name_columns_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = ["data.columns={prompt: a, completion: b}", "data.column=c"]
    assert main(["inspect", "recipes/quickstart/eagle3.yaml", *change]) == 2
    assert "data.columns stands in place of data.column" in capsys.readouterr().err


def test_prompts_are_read_alike(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [ALPACA, {"query": "What is\ntwo?", "response": SAID}, {"problem": "What is\ntwo?"}, {"messages": turns("What is\ntwo?", SAID)}]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    prompts = [prompt.ids_T.tolist() for prompt in read_prompts(file, Prompter(make_tokenizer(CHATML)))]
    assert prompts == [prompts[0]] * 4


def test_prompts_are_regenerated(ask: Any, tmp_path: Path) -> None:  # noqa: F811
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
