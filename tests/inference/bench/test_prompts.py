"""Prompts: rows of every kind, the usual benchmarks, several turns, and errors in one line."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from chat_templates import CHATML, TURNS, chat, make_samples, make_tokenizer
from errors import refusal

from headstart.chat.prompts import Prompter, read_prompts
from headstart.training.recipe.recipe import Data


def decoded(path, **arguments) -> list[str]:
    tokenizer = make_tokenizer(arguments.pop("template", None))
    limit = arguments.pop("limit", None)
    return [tokenizer.decode(prompt.ids_T) for prompt in read_prompts(path, Prompter(tokenizer, **arguments), limit)]


def test_rows_of_every_kind(tmp_path):
    conversation = [{"from": "human", "value": "What is two?"}, {"from": "gpt", "value": "It is four."}]
    rendered = "<|im_start|>user\nWhat is two?<|im_end|>\n<|im_start|>assistant\n"
    rows = [
        {"messages": chat(*TURNS)}, {"conversations": conversation}, {"turns": ["What is two?", "And three?"]},
        {"prompt": "What is two?"}, {"prompt": chat(TURNS[0])}, {"question": "What is two?"}, {"text": "two two two two", "id": 7},
    ]  # fmt: skip
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress("\n\n".join(json.dumps(row) for row in rows).encode()))
    whole = f"{rendered}It is four.<|im_end|>\n<|im_start|>user\nAnd three?<|im_end|>\n<|im_start|>assistant\n"
    assert decoded(file, template=CHATML)[:6] == [whole, rendered, rendered, rendered, rendered, rendered]
    assert decoded(file, template=CHATML, limit=2) == [whole, rendered]
    plain = tmp_path / "rows.txt"
    plain.write_text("What is two?\n\n<s>And three?\n")
    assert decoded(plain) == ["<s>What is two?", "<s>And three?"], "with one first token"
    assert decoded(plain, template=CHATML, chat=False) == decoded(plain)
    assert decoded(plain, template=CHATML)[0] == rendered


def test_rows_ask_what_training_asks(tmp_path):
    """In several turns, after a question or a result, beside tools: the prompt of the row's last label."""
    template = "{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML
    talk, tools = chat(("user", "One?"), ("assistant", "Two."), ("user", "Three?"), ("assistant", "Four.")), {"tools": [{"name": "add"}]}
    result = [*talk[:2], {"role": "observation", "content": "4"}]
    rows = [
        {"prompt": talk[:3], "completion": "Four."}, {"prompt": json.dumps(talk[:3]), "completion": "Four."},
        {"question": talk[:3], "answer": talk[3:]}, {"prompt": "One?", "completion": "Two."} | tools,
        {"prompt": talk[:3], "completion": "Four."} | tools, {"messages": [*talk, talk[0], talk[1] | {"weight": 0}]},
        {"messages": talk[:3]}, {"messages": result}, {"text": talk}, {"text": json.dumps(talk)},
    ]  # fmt: skip
    tokenizer = make_tokenizer(template, special="<|im_start|> <|im_end|>")
    for row in rows:
        messages = row.get("messages", [])
        trained = row | ({"messages": [*messages, *talk[3:]]} if messages and messages[-1]["role"] != "assistant" else {})
        (sample,) = make_samples([trained], tokenizer, Data(train="x"), source="x")[0]
        (tmp_path / "row.jsonl").write_text(json.dumps(row))
        (prompt,) = read_prompts(tmp_path / "row.jsonl", Prompter(tokenizer))
        last = [i for i in range(1, len(sample.tokens)) if sample.loss_mask[i] and not sample.loss_mask[i - 1]][-1]
        assert prompt.ids_T.tolist() == sample.tokens[:last].tolist(), row
    first = Prompter(tokenizer).of_row({"turns": ["One?", "Three?"]} | tools)
    for prompt in (first, Prompter(tokenizer).follow(first, sample.tokens[-2:])):
        assert tokenizer.decode(prompt.ids_T).startswith("add<|im_start|>user")


def test_text_is_cut(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "What is two and two? It is four."}\n')
    tokenizer = make_tokenizer()
    ids = tokenizer("What is two and two? It is four.")["input_ids"]
    assert read_prompts(file, Prompter(tokenizer, prompt_tokens=3))[0].ids_T.tolist() == ids[:3]
    assert read_prompts(file, Prompter(tokenizer))[0].ids_T.tolist() == ids[: (len(ids) + 1) // 2]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("p.csv", "a", "its name should end in .jsonl"),
    ("p.jsonl", None, "there is no such file"),
    ("p.jsonl", "\n\n", "holds no prompts"),
    ("p.jsonl", '{"text": "a b c d"}\n{"text": ', "line 2: not valid JSON"),
    ("p.jsonl", "[1]", "line 1: a row is a mapping"),
    ("p.jsonl", '{"body": "a"}', "line 1: no column to ask with (found body; known: messages, conversations"),
    ("p.jsonl", '{"prompt": 3}', "prompt: text expected; got int"),
    ("p.jsonl", '{"turns": ["a", 3]}', "turns: text expected; got int"),
    ("p.jsonl", '{"messages": "a"}', "messages: a conversation is a list of turns, each a mapping; got 'a'"),
    ("p.jsonl", '{"messages": [{"speaker": "a"}]}', "this one has speaker"),
    ("p.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}', "nothing is asked"),
    ("p.jsonl", '{"messages": [{"role": "user", "content": "a"}]}', "no chat template"),
    ("p.jsonl", json.dumps({"prompt": json.dumps(chat(TURNS[0]))}), "no chat template"),
    ("p.jsonl", json.dumps({"prompt": chat(*TURNS[:2])}), "prompt ends with the assistant's turn: nothing is asked; end it with"),
    ("p.jsonl", '{"text": "a", "question": "b"}', "the row has question and text, of which either may be what to ask; leave one"),
    ("p.jsonl", '{"instruction": "a", "input": 3}', "instruction, input go together where all are text; got input 3"),
    ("p.jsonl.gz", "not compressed", "line 1: not valid JSON"),
])  # fmt: skip
def test_faults_in_files_of_prompts(tmp_path, name, content, message):
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    error = refusal(decoded, file)
    assert message in error and name in error


def rows(path, *contents: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in contents))
    return path


def tasks(path, **how) -> list[str]:
    return [prompt.task for prompt in read_prompts(path, Prompter(make_tokenizer()), **how)]


def turns(category: str, *questions: str) -> dict:
    return {"question_id": 81, "category": category, "turns": list(questions), "reference": ["no"]}


def test_the_usual_sets_are_known_by_their_keys(tmp_path):
    humaneval = {"task_id": "HumanEval/0", "prompt": "def two():\n", "entry_point": "two", "canonical_solution": "    return 2\n"}
    gsm8k = {"question": "What is two?", "answer": "It is <<1+1=2>>2.\n#### 2"}
    own = {"question": "And three?", "answer": "Six.", "task": "sums"}
    file = rows(tmp_path / "mixed.jsonl", humaneval, gsm8k, own, {"prompt": "four"}, turns("coding", "five"))
    assert tasks(file) == ["HumanEval", "GSM8K", "sums", "mixed", "coding"]
    assert decoded(file)[:2] == ["<s>def two():\n", "<s>What is two?"]
    mt_bench = [turns("writing", "one", "two"), turns("math", "three", "four")]
    assert tasks(rows(tmp_path / "question.jsonl", *mt_bench)) == ["writing", "math"]
    spec_bench = rows(tmp_path / "question.jsonl", *mt_bench, turns("math_reasoning", "five"), turns("rag", "six"))
    assert tasks(spec_bench) == ["mt_bench", "mt_bench", "math_reasoning", "rag"]


def test_limits_on_files_and_tasks(tmp_path):
    file = rows(tmp_path / "q.jsonl", *(turns(task, "two") for task in ("qa", "qa", "qa", "rag", "rag", "rag")))
    assert tasks(file, limit=4) == ["qa", "qa", "qa", "rag"]
    assert tasks(file, per_task=2) == ["qa", "qa", "rag", "rag"]
    assert tasks(file, limit=4, per_task=1) == ["qa", "rag"]


@pytest.mark.parametrize("template", [CHATML, None])
def test_later_turns_follow_the_answers(tmp_path, template):
    tokenizer = make_tokenizer(template)
    prompter = Prompter(tokenizer)
    first = read_prompts(rows(tmp_path / "q.jsonl", turns("qa", "What is two?", "And three?", "six")), prompter)[0]
    answer = tokenizer("It is four.", add_special_tokens=False)["input_ids"]
    second = prompter.follow(first, torch.tensor([*answer, tokenizer.eos_token_id]))
    third = prompter.follow(second, torch.tensor(answer))
    assert first.later == ("And three?", "six") and second.later == ("six",) and third.later == () and third.task == "qa"
    messages = [("user", "What is two?"), ("assistant", "It is four."), ("user", "And three?")]
    if template:
        assert second.ids_T.tolist() == prompter.converse(chat(*messages)).tolist()
    else:
        assert tokenizer.decode(second.ids_T) == "<s>What is two?\n\nIt is four.\n\nAnd three?"
    assert len(third.ids_T) > len(second.ids_T) > len(first.ids_T)
