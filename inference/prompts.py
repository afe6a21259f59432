"""Prompts: from a file, a question or a conversation, as the token ids the backbone is asked to continue."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.heads.errors import UserError

ENDINGS = (".jsonl", ".jsonl.gz", ".txt")
COLUMNS = ("messages", "conversations", "turns", "prompt", "question", "text")
"""What a row may ask with, in the order in which they are looked for."""
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant", "model": "assistant"}
"""Speakers of ShareGPT-like files -> roles; others keep their name."""


@dataclass(frozen=True)
class Prompter:
    """How text becomes a prompt. ``chat``: through the chat template; None: if the tokenizer has one."""

    tokenizer: PreTrainedTokenizerBase
    chat: bool | None = None
    prompt_tokens: int = 64
    """How much of a row's plain ``text`` is the prompt."""

    def __post_init__(self) -> None:
        if self.chat and not self.tokenizer.chat_template:
            raise UserError(f"the tokenizer of {self.tokenizer.name_or_path} has no chat template; leave --chat out or give --raw")

    def ask(self, text: str) -> Tensor:
        """A question or an instruction (with a chat template), or the beginning of a text (without)."""
        if self.tokenizer.chat_template and self.chat is not False:
            return self.converse([{"role": "user", "content": text}])
        return self.begin(text)

    def begin(self, text: str) -> Tensor:
        """The text itself, to be continued."""
        return torch.tensor(self.tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)

    def converse(self, messages: list[dict[str, Any]]) -> Tensor:
        """A conversation, opened for the assistant's answer. The template has written the special tokens already."""
        if not self.tokenizer.chat_template:
            raise UserError(f"the tokenizer of {self.tokenizer.name_or_path} has no chat template, so it cannot write conversations")
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError) as error:
            raise UserError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from None
        return torch.tensor(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)

    def excerpt(self, text: str) -> Tensor:
        """The first ``prompt_tokens`` of a document, half of a shorter one."""
        ids_T = self.begin(text)
        return ids_T[: self.prompt_tokens if len(ids_T) > self.prompt_tokens else (len(ids_T) + 1) // 2]

    def of_row(self, row: dict[str, Any]) -> Tensor:
        """Raises UserError (without the place) for a row that asks nothing."""
        column = next((name for name in COLUMNS if row.get(name)), None)
        if column is None:
            raise UserError(f"no column to ask with (found {', '.join(row) or 'none'}; known: {', '.join(COLUMNS)})")
        value = row[column]
        if column in ("messages", "conversations") or (column == "prompt" and isinstance(value, list)):
            if not isinstance(value, list):
                raise UserError(f"{column} is a list of turns; got {type(value).__name__}")
            return self.converse(_up_to_the_answer(value, column))
        if column == "turns" and isinstance(value, list):
            value = value[0]
        if not isinstance(value, str):
            raise UserError(f"{column}: text expected; got {type(value).__name__}")
        return self.excerpt(value) if column == "text" else self.ask(value)


def read_prompts(path: str | Path, prompter: Prompter, limit: int | None = None) -> list[Tensor]:
    """The first ``limit`` prompts (int64 [T]) of a .jsonl, .jsonl.gz or .txt file (one prompt a line).

    Raises UserError naming the file, and the line where one is at fault.
    """
    file = Path(path)
    if not file.name.endswith(ENDINGS):
        raise UserError(f"{file} is no file of prompts: its name should end in {', '.join(ENDINGS)}")
    if not file.is_file():
        raise UserError(f"no file of prompts at {file}; give a {', '.join(ENDINGS)} file")
    found: list[Tensor] = []
    for number, line in _lines(file):
        if limit is not None and len(found) >= limit:
            break
        try:
            prompt_T = prompter.ask(line) if file.suffix == ".txt" else prompter.of_row(_row(line))
        except UserError as error:
            raise UserError(f"{file}, line {number}: {error}") from None
        if not len(prompt_T):
            raise UserError(f"{file}, line {number}: the prompt is empty")
        found.append(prompt_T)
    if not found:
        raise UserError(f"{file} holds no prompts; give one row a line with one of {', '.join(COLUMNS)}")
    return found


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        opened = gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8")
        with opened as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:   # broken compression, not UTF-8, no permission
        raise UserError(f"{file} cannot be read: {error}") from None


def _row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(row, dict):
        raise UserError(f"a row is a mapping from column to value; got {type(row).__name__}")
    return row


def _up_to_the_answer(turns: list[Any], column: str) -> list[dict[str, Any]]:
    """The turns before the assistant's last one; all of them if it has none."""
    messages = [_message(turn, column) for turn in turns]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    asked = messages[: answers[-1]] if answers else messages
    if not asked:
        raise UserError(f"{column} begins with its last answer: nothing is asked")
    return asked


def _message(turn: Any, column: str) -> dict[str, Any]:
    if isinstance(turn, dict) and "role" in turn and "content" in turn:
        return {key: value for key, value in turn.items() if value is not None or key == "content"}
    if isinstance(turn, dict) and "from" in turn and "value" in turn:
        return {"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
    found = ", ".join(map(str, turn)) if isinstance(turn, dict) else type(turn).__name__
    raise UserError(f"a turn of {column} has role and content, or from and value; this one has {found}")
