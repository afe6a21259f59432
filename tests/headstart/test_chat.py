"""`headstart chat`: the prompt is the whole conversation, answers stream and can be stopped, errors are one line."""

import contextlib
import io
import json
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from chat_templates import VICUNA, talker
from errors import error_of, refuses

from headstart.cli import conversation as module
from headstart.cli.conversation import BURST, Chat, Painter
from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_tokenizer
from headstart.inference.measure import Settings, continue_text
from headstart.support.text import visible


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    heads, prompter = talker()
    root = tmp_path_factory.mktemp("chat")
    heads.backbone.model.save_pretrained(root / "backbone")
    prompter.tokenizer.save_pretrained(root / "backbone")
    heads.drafter.save_pretrained(root / "heads")
    return root


@pytest.fixture
def say(house, stdin, capsys):
    """Run the command on piped lines; returns status, stdout and stderr."""

    def run(text: str | io.StringIO, *arguments: str) -> tuple[int, str, str]:
        stdin(text)
        status = main(["chat", "--heads", str(house / "heads"), "--backbone", str(house / "backbone"), "--max-new-tokens", "9", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def answers(*questions: str, system: str | None = None, settings: Settings | None = None, seed: int = 0) -> list[str]:
    """The backbone's answers in one conversation."""
    heads, prompter = talker()
    messages = [{"role": "system", "content": system}] if system else []
    texts = []
    for i, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        prompt_T = prompter.converse(messages)
        written = continue_text(heads, prompt_T, settings or Settings(9), seed + i).sequences[0, len(prompt_T) :]
        texts.append(prompter.tokenizer.decode(written, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": texts[-1]})
    return texts


def test_a_conversation_from_a_pipe(say, tmp_path):
    file = tmp_path / "said.json"
    script = "What is two?\n\nAnd three?\n/reset\n/help\n/brew\nsix\n/exit\nnot asked\n"
    status, out, err = say(script, "--json", str(file))
    expected = [*answers("What is two?", "And three?"), *answers("six")]
    assert status == 0 and out == "".join(f"{text}\n" for text in expected)
    assert err.count("tokens/s") == 3 and err.count("tau ") == 3 and "a new conversation" in err and "unknown command /brew; /reset" in err
    report = json.loads(file.read_text())
    asked = [("What is two?", expected[0], 0), ("And three?", expected[1], 0), ("six", expected[2], 1)]
    assert [(one["question"], one["answer"], one["conversation"]) for one in report["answers"]] == asked
    assert report["seed"] is None and all(one["tau"] >= 1 and one["tokens"] == 9 for one in report["answers"])


def test_the_systems_text_and_sampling(say):
    how = ["--temperature", "0.8", "--top-k", "20", "--seed", "5", "--system", "Be short."]
    expected = answers("two", "six", system="Be short.", settings=Settings(9, 0.8, 20), seed=5)
    assert say("two\nsix", *how)[1] == "".join(f"{text}\n" for text in expected)
    assert say("two\nsix", *how, "--no-draft")[1] == "".join(f"{text}\n" for text in expected)
    assert expected[0] != answers("two", settings=Settings(9, 0.8, 20), seed=5)[0]


class Stopping(io.StringIO):
    """Ctrl-C comes while the fourth piece of a line is written."""

    pieces = 0

    def write(self, text: str) -> int:
        self.pieces = 0 if text.endswith("\n") else self.pieces + 1
        if self.pieces == 4:
            raise KeyboardInterrupt
        return super().write(text)


def test_an_answer_can_be_stopped(say, tmp_path):
    file = tmp_path / "said.json"
    with contextlib.redirect_stdout(Stopping()) as out:
        status, _, err = say("two\nsix\n", "--json", str(file))
    report = json.loads(file.read_text())["answers"]
    assert status == 0 and err.count("stopped, 4 tokens") == 2 and out.getvalue().count("\n") == 2
    assert [(one["tokens"], one["tau"]) for one in report] == [(4, None)] * 2
    assert answers("two")[0].startswith(report[0]["answer"])  # the conversation continues from it


def test_a_full_context_is_reported_and_does_not_end_the_chat(say):
    status, out, err = say("two\n" + "two " * 90 + "\nsix\n", "--max-new-tokens", "4")
    assert status == 0 and out.count("\n") == 2 and "the backbone's context 96; /reset begins a new one" in err
    heads, prompter = talker()
    talk = Chat(heads, prompter, Settings(90), 0)
    painter = Painter(prompter.tokenizer, io.StringIO(), False)
    prompt_length = len(prompter.converse([{"role": "user", "content": "two"}]))
    assert talk.ask("two", painter).tokens == 96 - prompt_length  # the remaining context
    refuses("/reset", talk.ask, "more", painter)
    assert len(talk.messages) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("setting", "value", "coloured"), [("NO_COLOR", "", True), ("NO_COLOR", "1", False), ("TERM", "dumb", False)])
def test_colour_is_for_terminals_that_want_it(say, monkeypatch, setting, value, coloured):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(setting, value)
    with contextlib.redirect_stdout(Terminal()) as screen:
        assert say("two\n")[0] == 0
    out = screen.getvalue()
    assert ("\x1b[" in out) == coloured and (coloured or out == visible(answers("two")[0]) + "\n")


def test_each_step_takes_the_next_colour(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    heads, prompter = talker()
    out = Terminal()
    painter = Painter(prompter.tokenizer, out, True)
    tokens = prompter.tokenizer("What is two? It is four.", return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    painter.put(tokens[None])  # a prompt
    for step in tokens[:6].split(2):
        time.sleep(10 * BURST)
        for token in step:
            painter.put(token[None])
    painter.end()
    colours = [part.partition("m")[0] for part in out.getvalue().split("\x1b[")[1:] if not part.startswith("0m")]
    assert len(set(colours)) == 3 and colours == sorted(colours, key=colours.index) and painter.tokens == 6
    assert painter.text == prompter.tokenizer.decode(tokens[:6])


def test_questions_at_a_terminal(say):
    terminal = Terminal()
    terminal.readline = Mock(side_effect=["two\n", KeyboardInterrupt(), "six\n", ""])
    status, out, err = say(terminal)
    assert status == 0 and out.count("\n") == 2 and err.count(module.HELP) == 2  # at the start, and on Ctrl-C at the prompt


MISTAKES = {
    "no model": (["chat"], "give --heads DIR, or --backbone"),
    "no template": (["chat", "--backbone", "embedded"], "has no chat template, so it cannot chat"),
    "a report in a folder": (["chat", "--backbone", "embedded", "--json", "."], "--json . is a folder"),
    "a prompt": (["chat", "--backbone", "embedded", "hi"], "unrecognized arguments: hi"),
    "a template that knows no system": (["chat", "--backbone", "VICUNA", "--system", "a"], "only user and assistant"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name, house, tmp_path, stdin, capsys):
    argv, message = MISTAKES[name]
    if "VICUNA" in argv:
        tokenizer = load_tokenizer(str(house / "backbone"))
        tokenizer.chat_template = VICUNA
        talker()[0].backbone.model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        argv = [str(tmp_path) if word == "VICUNA" else word for word in argv]
    stdin("two\n")
    assert message in error_of(capsys, *argv)
