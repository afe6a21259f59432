"""Prompts as token ids, from a file, a question or a conversation.

The format of a row is recognised by its keys: Spec-Bench and MT-bench (`question_id`, `category`, `turns`), HumanEval (`task_id`,
`prompt`), GSM8K (`question`, `answer`), conversations (`messages`, `conversations`), Alpaca (`instruction`,
`input`), or another of `PROMPTS`, or `text`.
Shape suffix: T positions.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.chat.conversation import Chat, begin
from headstart.chat.messages import (
    ASSISTANT,
    Message,
    asks,
    completed,
    is_blank,
    is_learned,
    looks_like_turns,
    prompt_length,
    read_conversation,
    read_messages,
)
from headstart.chat.template import ChatSettings, TemplateRefusal
from headstart.support.errors import UserError, naming
from headstart.support.files import as_path, require_file
from headstart.support.hub import local_or_shipped
from headstart.support.json_text import COMPRESSED, LINES, Row, read_jsonl, read_lines
from headstart.support.text import shortened

ENDINGS = (*(lines + packed for lines in LINES for packed in ("", *COMPRESSED)), ".txt")
PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input")
ANSWERS = ("completion", "response", "output", "solution", "answer")
"""Columns of a prompt, and of what answers it, as data sets name them; in order of precedence."""
DETAILS = ("input", "context")
"""Columns that go on from an ``instruction``, of Alpaca and of Dolly."""
COLUMNS = ("messages", "conversations", "turns", *PROMPTS, "text")
"""Keys that may hold a row's prompt, in order of precedence."""
MT_BENCH = frozenset("writing roleplay reasoning math coding extraction stem humanities".split())
SPEC_BENCH = frozenset("translation summarization qa math_reasoning rag".split())
"""In a file with these tasks, the eight categories of MT-bench count as the one task ``mt_bench``, as in Spec-Bench's reports."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and, for a conversation, the questions that follow it."""

    ids_T: Tensor
    """int64, on the host."""
    task: str = ""
    messages: tuple[Message, ...] = ()
    """The conversation so far; empty where the prompt is the beginning of a text."""
    later: tuple[str, ...] = ()
    """Remaining questions (`Prompter.follow`)."""
    tools: Any = None
    """Of the conversation."""


@dataclass(frozen=True)
class Prompter:
    """Turns text into prompts. ``chat``: use the chat template; None: if there is one."""

    tokenizer: PreTrainedTokenizerBase
    chat: bool | None = None
    prompt_tokens: int = 64
    """The number of tokens of a row's plain ``text`` that form the prompt."""
    settings: ChatSettings = field(default_factory=ChatSettings)
    with_images: bool = False
    """Rows may have images, which `ImagePrompter` reads."""

    def __post_init__(self) -> None:
        if self.chat and not self.settings.template_of(self.tokenizer):
            raise UserError(f"the tokenizer of {self.tokenizer.name_or_path} has no chat template; leave --chat out or give --raw")

    @cached_property
    def conversations(self) -> Chat:
        """Prompts and answers of conversations. Raises UserError if there is no chat template."""
        return Chat(self.tokenizer, self.settings)

    def ask(self, text: str) -> Tensor:
        """Encode a question or instruction (with a chat template) or the beginning of a text (without)."""
        return self._render([_question(text)])

    def begin(self, text: str) -> Tensor:
        """Encode the text itself, to be continued."""
        return torch.tensor(begin(self.tokenizer, text), dtype=torch.int64)

    def converse(self, messages: Sequence[Message], tools: Any = None) -> Tensor:
        """Encode a conversation up to the start of the assistant's answer. The template writes the special tokens."""
        try:
            return torch.tensor(self.conversations.prompt(messages, tools), dtype=torch.int64)
        except TemplateRefusal as refusal:
            raise UserError(f"the chat template refuses the conversation: {refusal}; change it, or give --raw") from None

    def beside(self, ids_T: Tensor, device: torch.device) -> dict[str, Tensor]:
        """What the model reads beside a prompt's tokens: images (`ImagePrompter`)."""
        return {}

    def answered(self, messages: Sequence[Message], answer_T: Tensor) -> Message:
        """The message that was written after these. Without a chat template, its text without special tokens."""
        if self.templated:
            return self.conversations.message(messages, answer_T.tolist())
        return {"role": ASSISTANT, "content": self.tokenizer.decode(answer_T, skip_special_tokens=True)}

    def follow(self, prompt: Prompt, answer_T: Tensor) -> Prompt:
        """The prompt of the next question, after this answer. Without a chat template, turns are separated by an empty line."""
        messages = (*prompt.messages, self.answered(prompt.messages, answer_T), _question(prompt.later[0]))
        return replace(prompt, ids_T=self._render(messages, prompt.tools), messages=messages, later=prompt.later[1:])

    def of_row(self, row: Row) -> Prompt:
        """The prompt of a file's row. Raises UserError (without the line number) if the row has none."""
        column = next((name for name in COLUMNS if row.get(name)), None)
        if column is None:
            raise UserError(f"no column to ask with (found {', '.join(row) or 'none'}; known: {', '.join(COLUMNS)})")
        value, images = row[column], row.get("images") or row.get("image")
        if isinstance(images, str | list | dict) and images and not (self.with_images and column != "text"):
            raise UserError("the row has images: give --images to ask a question with them, or leave the column out")
        if column in ("messages", "conversations") or (column == "text" and looks_like_turns(value)):
            messages, tools = read_conversation(row, column, column, images=self.with_images)
            answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
            learned = [i for i in answers if i and is_learned(messages[i])]
            asking = messages if asks(messages) or not answers else messages[: (learned or answers)[-1]]
            if not asking:
                raise UserError(f"{column} begins with its last answer: nothing is asked")
            return Prompt(self.converse(asking, tools))
        questions = value if column == "turns" and isinstance(value, list) else [value]
        odd = next((question for question in questions if not isinstance(question, (list, str) if column in PROMPTS else str)), None)
        if odd is not None:
            raise UserError(f"{column}: text expected; got {type(odd).__name__}")
        if column == "text":
            ids_T = self.begin(value)
            return Prompt(ids_T[: prompt_length(len(ids_T), self.prompt_tokens)])
        answered = any(row.get(name) for name in ANSWERS)
        if row.get("text") and column in PROMPTS and not answered:
            raise UserError(f"the row has {column} and text, of which either may be what to ask; leave one out")
        asked, tools = read_pair(row | {column: questions[0]}, column, "", "the row", self.with_images)
        if asked[-1]["role"] == ASSISTANT and not answered:
            raise UserError(f"{column} ends with the assistant's turn: nothing is asked; end it with a question, or leave the row out")
        ids_T = (self.converse if looks_like_turns(questions[0]) else self._render)(asked, tools)
        return Prompt(ids_T, messages=tuple(asked), later=tuple(questions[1:]), tools=tools)

    @property
    def templated(self) -> bool:
        """Whether questions are asked with a chat template."""
        return self.chat is not False and bool(self.settings.template_of(self.tokenizer))

    def _render(self, messages: Sequence[Message], tools: Any = None) -> Tensor:
        if self.templated:
            return self.converse(messages, tools)
        return self.begin("\n\n".join(message["content"] for message in messages))


def read_pair(row: Row, prompt: str, answer: str, where: str, images: bool = False) -> tuple[list[Message], Any]:
    """Return the messages and tools of a row of two columns, each text of one turn or a list of turns; ``answer`` empty: of the prompt.

    ``images``: turns may have some. Raises UserError, which begins with ``where``.
    """
    asked = _turns(prompt_of(row, prompt, where), "user", f"{where}, {prompt}")
    asked = [turn | {"weight": 0} if turn["role"] == ASSISTANT else turn for turn in asked]  # only what follows is learned
    said = _turns(row[answer], ASSISTANT, f"{where}, {answer}") if answer else []
    return completed(row, asked + said, where, images)


def prompt_of(row: Row, column: str, where: str) -> Any:
    """Return the value of a row's prompt; below an instruction what it is about. Raises UserError if there is such and one is no text."""
    about = {name: row[name] for name in DETAILS if column == "instruction" and not is_blank(row.get(name))}
    odd = [name for name, value in ({column: row[column]} | about).items() if not isinstance(value, str) or looks_like_turns(value)]
    if about and odd:
        allowed = f"{', '.join([column, *about])} go together where all are text"
        raise UserError(f"{where}: {allowed}; got {odd[0]} {shortened(row[odd[0]])}: write it as text, or leave it out")
    return "\n".join([row[column], *about.values()]) if about else row[column]


def _turns(value: Any, role: str, where: str) -> list[Message]:
    text = isinstance(value, str) and not looks_like_turns(value)
    return [{"role": role, "content": value}] if text else read_messages(value, where)


def read_prompts(path: str | Path, prompter: Prompter, limit: int | None = None, per_task: int | None = None) -> list[Prompt]:
    """Read the first ``limit`` prompts of a file, at most ``per_task`` of each task; each line of a .txt file is a prompt.

    A prompt's task is its `category` or `task`, else the data set recognised by its keys, else the name of the file.
    Raises UserError naming the file, and the line if one is at fault.
    """
    file = require_prompts(path)
    found: list[Prompt] = []
    for number, row, task in _chosen(_with_tasks(file, limit), per_task):
        with naming(f"{file}, line {number}"):
            prompt = replace(prompter.of_row(row), task=task)
        if not len(prompt.ids_T):
            raise UserError(f"{file}, line {number}: the prompt is empty")
        found.append(prompt)
    return found


def require_prompts(path: str | Path) -> Path:
    """Return a file of prompts. Raises UserError if it is missing or empty, or if its first line is none; needs no tokenizer."""
    file = local_or_shipped(as_path("--prompts", path))
    if not file.name.endswith(ENDINGS):
        raise UserError(f"{file} is no file of prompts: its name should end in {', '.join(ENDINGS)}")
    require_file("--prompts", file)
    if not _with_tasks(file, 1):
        raise UserError(f"{file} holds no prompts; give one row a line with one of {', '.join(COLUMNS)}")
    return file


def _with_tasks(file: Path, limit: int | None) -> list[tuple[int, Row, str]]:
    """Line number, row and task of each row."""
    lines: Iterator[tuple[int, Row]] = read_jsonl(file)
    if file.suffix == ".txt":
        lines = ((number, {"prompt": line}) for number, line in read_lines(file))
    named = file.name.removesuffix(".gz").rpartition(".")[0]
    rows: list[tuple[int, Row, str]] = []
    for number, row in lines:
        if limit is not None and len(rows) >= limit:
            break
        rows.append((number, row, _task(row) or named))
    if {task for _, _, task in rows}.isdisjoint(SPEC_BENCH):
        return rows
    return [(number, row, "mt_bench" if "turns" in row and task in MT_BENCH else task) for number, row, task in rows]


def _task(row: Row) -> str | None:
    for key in ("category", "task"):
        if isinstance(row.get(key), str) and row[key]:
            return str(row[key])
    if isinstance(row.get("task_id"), str) and "/" in row["task_id"]:
        return str(row["task_id"]).partition("/")[0]  # HumanEval/0
    if "question" in row and "####" in str(row.get("answer")):
        return "GSM8K"
    return None


def _chosen(rows: list[tuple[int, Row, str]], per_task: int | None) -> Iterator[tuple[int, Row, str]]:
    taken: Counter[str] = Counter()
    for number, row, task in rows:
        taken[task] += 1
        if per_task is None or taken[task] <= per_task:
            yield number, row, task


def _question(text: str) -> Message:
    return {"role": "user", "content": text}
