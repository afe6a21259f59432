"""Rows of exact tokens: as a data format, as `headstart regenerate` keeps them, and that what is trained on is what was written."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import CHATML, MANY_ENDS, QWEN3, make_chat_model, make_chat_recipe, make_samples, make_tokenizer, read_rows, write_rows
from server import Reply, said, serving
from watched import watched

from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_tokenizer
from headstart.training.data.data import load_data
from headstart.training.recipe.recipe import Data, load_recipe
from headstart.training.regenerate.items import Item

IDS, MASK = [5, 6, 7, 8, 9], [0, 0, 1, 1, 0]
Samples = list[tuple[list[int], list[int]]]


def made(rows: list[dict[str, Any]], **data: Any) -> Samples:
    samples, _ = make_samples(rows, make_tokenizer(CHATML), Data(train="x", **data), source="x.jsonl")
    return [(sample.tokens.tolist(), sample.loss_mask.int().tolist()) for sample in samples]


def test_tokens_are_trained_on_as_they_are() -> None:
    row = {"input_ids": IDS, "loss_mask": MASK, "attention_mask": [1] * 5, "messages": "whatever stands beside them", "text": "a"}
    assert made([row]) == [(IDS, MASK)]
    assert made([row | {"loss_mask": [False, False, True, True, False]}]) == [(IDS, MASK)]
    assert made([{"tokens": IDS, "loss_mask": MASK}], column="tokens", format="tokens") == [(IDS, MASK)]
    assert made([row], loss_on="all") == made([{"input_ids": IDS}], loss_on="all") == [(IDS, [1] * 5)]
    assert made([row], max_length=4) == [(IDS[:4], MASK[:4])]
    several = {"input_ids": [IDS, IDS[::-1]], "loss_mask": [MASK, MASK]}
    assert made([several, row]) == [(IDS, MASK), (IDS[::-1], MASK), (IDS, MASK)]


def test_the_files_that_others_write(tmp_path: Path) -> None:
    row = {"input_ids": IDS, "loss_mask": MASK}
    write_rows(tmp_path / "rows.jsonl", [row, row])
    table = pyarrow.table({"input_ids": [IDS, IDS], "loss_mask": pyarrow.array([MASK, MASK], pyarrow.list_(pyarrow.int8()))})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        splits = load_data(Data(train=str(tmp_path / name), eval_rows=1), make_tokenizer(CHATML), 4096, progress=False)
        assert [one.tokens.tolist() for one in (*splits.train, *splits.eval)] == [IDS, IDS] and splits.stats.label_tokens == 2
        assert splits.check is None, "there is no text to compare with"


def trained_on(folder: Path, model: Path, *overrides: str) -> Samples:
    """What training on the regenerated answers reads."""
    recipe = load_recipe(folder / "recipe.yaml", [f"data.train={folder / 'answers.jsonl'}", "data.max_length=4096", *overrides])
    splits = load_data(recipe.data, load_tokenizer(str(model)), 4096, progress=False)
    assert splits.check is not None and splits.check.same == splits.check.answers > 0
    return [(sample.tokens.tolist(), sample.loss_mask.int().tolist()) for sample in splits.train]


@pytest.mark.parametrize("template", [CHATML, QWEN3], ids=["chatml", "drops thoughts"])
def test_regenerated_answers_are_trained_on_token_by_token(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_chat_model(tmp_path / "model", template)
    make_chat_recipe(tmp_path, model)
    responses = watched(monkeypatch, Item, "add_response", lambda self, response, *_: response)
    assert main(["regenerate", str(tmp_path / "recipe.yaml")]) == 0
    written = [(list(response.prompt), list(response.answer)) for response in responses if not response.error]
    samples = trained_on(tmp_path, model)
    assert len(written) > 6 and all(answer[-1] in (3, *MANY_ENDS) for _, answer in written)
    for prompt, answer in written:
        length = len(prompt) + len(answer)
        tokens, mask = next(one for one in samples if one[0][:length] == [*prompt, *answer])
        assert mask[len(prompt) - 1 : length] == [0, *[1] * len(answer)]
    assert sum(sum(mask) for _, mask in samples) == sum(len(answer) for _, answer in written), "and nothing else"


def vllm(tokenizer: Any, **changes: Any) -> Any:
    """A server that returns token ids if it is asked to, as vLLM does."""

    def reply(path: str, body: dict[str, Any]) -> Reply:
        message = {"role": "assistant", "content": f" to {body['messages'][-1]['content']}\n"}
        prompt = tokenizer.apply_chat_template(body["messages"], tools=body.get("tools"), add_generation_prompt=True, return_dict=False)
        answer = tokenizer(message["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        choice = {"message": message, "finish_reason": "stop", "token_ids": answer} | changes
        return 200, {"choices": [choice], "prompt_token_ids": prompt, "usage": {"completion_tokens": len(answer)}}

    return reply


def asked(folder: Path, model: Path, reply: Any, rows: list[dict[str, Any]] | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the command against a server; returns its report and the requests."""
    recipe = make_chat_recipe(folder, model, rows)
    with serving(reply) as server:
        override = f"regenerate.endpoint={server.url}"
        assert main(["regenerate", str(recipe), override, "regenerate.concurrency=1", "--json", str(folder / "report.json")]) == 0
    return json.loads((folder / "report.json").read_text()), server.asked


def test_a_server_is_asked_for_token_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_chat_model(tmp_path / "model", ends=[3])
    tokenizer = load_tokenizer(str(model))
    calls = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    agent = [
        {"role": "user", "content": "Add"}, {"role": "assistant", "content": "old", "tool_calls": calls},
        {"role": "tool", "content": "4"}, {"role": "assistant", "content": "old"},
    ]  # fmt: skip
    report, requests = asked(tmp_path, model, vllm(tokenizer), [{"messages": agent}, {"messages": agent[:2]}])
    assert all(body["return_token_ids"] is True for body in requests) and len(requests) == 3
    assert (report["answers_with_token_ids"], report["answers_compared"], report["answers_tokenised_otherwise"]) == (3, 3, 0)
    assert "3 answers came with token ids; 0 of 3 compared are tokenised otherwise" in capsys.readouterr().err
    first, second = read_rows(tmp_path / "answers.jsonl")
    assert tokenizer.decode([token for token, label in zip(first["input_ids"], first["loss_mask"], strict=True) if label]) == (
        " to Add\n<|im_end|> to 4\n<|im_end|>"
    )
    assert trained_on(tmp_path, model) == [(row["input_ids"], row["loss_mask"]) for row in (first, second)]


def test_written_tokens_that_are_not_the_tokenizers_are_counted_and_trained_on(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", ends=[3])
    tokenizer = load_tokenizer(str(model))
    bytewise = [token for character in " to Hi" for token in tokenizer(character, add_special_tokens=False)["input_ids"]] + [3]
    assert bytewise != tokenizer(" to Hi<|im_end|>", add_special_tokens=False)["input_ids"]
    reply = vllm(tokenizer, token_ids=bytewise, message={"role": "assistant", "content": " to Hi"})
    report, _ = asked(tmp_path, model, reply, [{"messages": [{"role": "user", "content": "Hi"}]}])
    assert (report["answers_with_token_ids"], report["answers_tokenised_otherwise"]) == (1, 1)
    ((tokens, mask),) = trained_on(tmp_path, model)
    assert [token for token, label in zip(tokens, mask, strict=True) if label] == bytewise


@pytest.mark.parametrize("server", ["ignores", "refuses", "null", "other text"])
def test_servers_that_return_no_token_ids(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_chat_model(tmp_path / "model", ends=[3])

    def reply(path: str, body: dict[str, Any]) -> Reply:
        if server == "refuses" and "return_token_ids" in body:
            return 400, {"error": "Unrecognized request argument supplied: return_token_ids"}
        status, content = said("It is four.", tokens=9 if server == "other text" else 7)
        extra = {"prompt_token_ids": None, "token_ids": None} if server == "null" else {}
        content["choices"][0] |= extra
        return status, content

    tokens = len(load_tokenizer(str(model))("It is four.<|im_end|>", add_special_tokens=False)["input_ids"])
    report, requests = asked(tmp_path, model, reply)
    assert (report["answers_with_token_ids"], report["answers_compared"]) == (0, 12)
    assert report["answers_tokenised_otherwise"] == (0 if (9 if server == "other text" else 7) == tokens else 12)
    assert "0 answers came with token ids, so training tokenises the text" in capsys.readouterr().err
    assert sum("return_token_ids" in body for body in requests) == (1 if server == "refuses" else len(requests))
    assert all("input_ids" not in row for row in read_rows(tmp_path / "answers.jsonl")) and len(trained_on(tmp_path, model)) == 8
