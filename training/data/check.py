"""A check before training: are the tokens trained on those of decoding?

For some conversations of the data, each prompt is compared with the one that transformers' own ``apply_chat_template`` gives, each answer
with the token ids that are kept beside the text (`headstart regenerate` writes them), else with what its text gives on a round trip
through the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from headstart.chat.conversation import Chat
from headstart.chat.messages import Message, is_learned
from headstart.chat.template import TemplateRefusal
from headstart.inference.engine.processing import common_prefix
from headstart.support.errors import UserError
from headstart.support.json_text import Row
from headstart.training.data.samples import IDS, Column, Sample, has_mask, read_tokens

ROWS = 100
"""Number of rows that are compared, evenly spaced."""
STORED, TEXT = 0.99, 0.95
"""Least share of answers that must be alike, where their token ids are kept and where not."""
OPENED = 16
"""Tokens at the end of a prompt that an answer's text may repeat, as an opened thought."""
THINK = re.compile(r"</?think>")
"""Templates write blanks of their own around the tags of a thought."""
AROUND = 4
"""Tokens shown before and after a difference."""
Samples = Sequence[tuple[list[int], list[bool]]]
"""Tokens, and which of them are learned."""


@dataclass(frozen=True)
class Check:
    answers: int
    same: int
    stored: bool = False
    """Whether token ids are kept beside all of the text."""
    first: str | None = None
    """The first difference."""
    warning: str = ""
    """What is amiss with the ends of answers (`Ending.warning`)."""

    def __add__(self, other: Check) -> Check:
        stored = (self.stored or not self.answers) and (other.stored or not other.answers)
        first, warning = self.first or other.first, self.warning or other.warning
        return Check(self.answers + other.answers, self.same + other.same, stored, first, warning)

    def __str__(self) -> str:
        return f"{self.same:,} of {self.answers:,} answers are tokenised as they are written"

    def report(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {
            "said": str(self), "answers": self.answers, "as_written": self.same, "token_ids_kept": self.stored,
            "warning": self.warning or None,
        }  # fmt: skip

    def require(self) -> None:
        """Raise UserError, naming the first difference, if too few answers are alike."""
        if self.first is not None and self.same < (STORED if self.stored else TEXT) * self.answers:
            raise UserError(f"only {self} (of some of the rows). {self.first}")


def compare(rows: Sequence[Row], name: str, column: Column, chat: Chat, exact: bool) -> Check:
    """Compare some rows of the dataset ``name``. ``exact``: their exact tokens are what is trained on, and ``column`` is their text."""
    check, count = Check(0, 0, stored=True), min(ROWS, len(rows))
    for number in (i * len(rows) // count for i in range(count)):
        if rows[number].get(column.name) is not None:
            with suppress(TemplateRefusal):  # counted where samples are made
                check += _compare(rows[number], f"{name}, row {number + 1}", column, chat, exact)
    return replace(check, warning=chat.ending.warning if check.answers else "")


def _compare(row: Row, where: str, column: Column, chat: Chat, exact: bool) -> Check:
    messages, tools = column.messages(row, where)
    chat = chat.of(messages, where)
    stored = read_tokens(row, IDS, where, False) if row.get(IDS) is not None and has_mask(row) else []
    written = [run for sample in stored for run in _runs(sample)]
    samples = [] if exact else chat.samples(messages, tools)
    turns, differences = [i for i, message in enumerate(messages) if i > 0 and is_learned(message)], []
    for number, i in enumerate(turns):
        asked, answer = written[number] if number < len(written) else ([], None)
        if exact:
            differences.append(_said(f"{where}, turn {i}", asked, answer or [], messages[i], chat))
        else:
            differences.append(_turn(f"{where}, turn {i}", samples, messages[: i + 1], tools, chat, answer))
    return Check(len(turns), differences.count(None), bool(stored), next((fault for fault in differences if fault is not None), None))


def _turn(where: str, samples: Samples, messages: list[Message], tools: Any, chat: Chat, written: list[int] | None) -> str | None:
    """Compare the last message as it is in the samples of its row; ``written``: its stored answer, if any."""
    asked = chat.applied(messages[:-1], tools)
    length = len(asked)
    tokens, labels = max(samples, key=lambda sample: common_prefix(sample[0], asked))
    if tokens[:length] != asked:
        return _difference(f"{where}, its prompt", tokens[:length], asked, "the prompt is not what apply_chat_template gives: report this")
    rest, labels = tokens[length:], labels[length:]
    answer = rest[: chat.ending.length(rest) or (labels.index(False) if False in labels else None)]
    if written is not None:
        cause = "the text does not say all that was written; train on the tokens (data.format=tokens)"
        return None if answer == written else _difference(where, answer, written, cause)
    again = chat.continued([chat.text(answer)])[0]
    difference = None if again == answer else _difference(where, answer, again, "the tokenizer does not give a text back as it was")
    return _said(where, asked, answer, messages[-1], chat) or difference


def _said(where: str, asked: list[int], answer: list[int], message: Message, chat: Chat) -> str | None:
    """Compare what an answer's tokens say with its text, which may begin with what the prompt's end has opened."""
    content, text = message.get("content"), chat.text([*asked[-OPENED:], *answer])
    wanted = content.strip() if isinstance(content, str) else ""
    if wanted in text or all(part.strip() in text for part in THINK.split(wanted)):
        return None
    cause = "the tokenizer or the chat template changes the text, or the token ids are another tokenizer's"
    return _difference(where, answer, chat.continued([wanted])[0], cause)


def _difference(where: str, trained: list[int], written: list[int], cause: str) -> str:
    """Say where two answers differ first, and why."""
    place = common_prefix(trained, written)
    first, end = max(place - AROUND, 0), place + AROUND
    found = f"{where}: from token {first} of the answer on, trained on {trained[first:end]}, written {written[first:end]}"
    return f"{found}; likely cause: {cause}"


def _runs(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """Return the runs of label tokens, each with the tokens before it."""
    tokens, mask = sample.tokens.tolist(), sample.loss_mask.tolist()
    runs = [[i for i, _ in run] for label, run in groupby(enumerate(mask), key=itemgetter(1)) if label]
    return [(tokens[: run[0]], tokens[run[0] : run[-1] + 1]) for run in runs]
