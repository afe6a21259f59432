"""The check before training: how many answers are tokenised as they are written, and an error that says which is not, and why."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_run import conversations, make_chat_model, make_chat_recipe
from chat_templates import CHATML, OPENING, PLAIN, QWEN3, make_tokenizer
from tokenizers import normalizers
from webpage import Reader

from headstart.chat import conversation
from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_tokenizer
from headstart.support.errors import UserError
from headstart.training.data.check import ROWS
from headstart.training.data.data import load_data
from headstart.training.data.kept import Splits
from headstart.training.recipe.recipe import Data


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
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, conversations())
    error = str(caught.value)
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
    with pytest.raises(UserError, match="only 12 of 13 answers"):
        loaded(tmp_path, conversations(8) + odd)


def test_text_that_does_not_say_what_was_written_is_an_error(tmp_path: Path) -> None:
    rows = with_ids(conversations(), change=1)
    exact = loaded(tmp_path, with_ids(conversations()), format="messages").check
    assert exact is not None and exact.stored and exact.same == exact.answers == 12
    with pytest.raises(UserError, match=r"the text does not say all that was written; train on the tokens \(data.format=tokens\)"):
        loaded(tmp_path, rows, format="messages")


def test_tokens_of_another_tokenizer_are_an_error(tmp_path: Path) -> None:
    other = make_tokenizer(CHATML, special="<|im_start|> <|im_end|> <|a|> <|b|> <|c|>")
    with pytest.raises(UserError, match="only 0 of 12 .* or the token ids are another tokenizer's"):
        loaded(tmp_path, with_ids(conversations()), other)


@pytest.mark.usefixtures("on_the_cpu")
def test_train_and_inspect_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(make_chat_recipe(tmp_path, make_chat_model(tmp_path / "model", PLAIN)))
    page, report = tmp_path / "page.html", tmp_path / "sample.json"
    assert main(["inspect", recipe, "--row", "1", "--html", str(page), "--json", str(report)]) == 0
    out = capsys.readouterr().out
    assert "answers   12 of 12 answers are tokenised as they are written" in out
    assert "warning the chat template writes no end-of-sequence token of the model" in " ".join(out.split())
    written = json.loads(report.read_text())
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
