"""What a dataset asks, row by row, and what has been answered so far: conversations turn by turn, texts by their beginnings.

Nothing here knows who answers. A row's seed is a function of the recipe's seed, of what the row holds, and of how many equal rows
stand before it; so the order of the rows, the batch and a restart do not change its answer.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.support.chat import ASSISTANT, Message, read_messages
from headstart.support.errors import UserError
from headstart.support.files import value_hash
from headstart.training.data.data import data_column
from headstart.training.data.rows import Row
from headstart.training.recipe.recipe import Data

FAULTS = {
    "truncated": "an answer that did not end within regenerate.max_new_tokens",
    "too_long": "a prompt that leaves no room for regenerate.max_new_tokens in the model's context",
    "refused": "a prompt that the chat template or the endpoint refused",
    "nothing": "nothing that could be asked",
}
"""Why a row was not answered to its end."""


@dataclass(frozen=True)
class Answer:
    """What was said to one prompt, or why nothing was."""

    message: Message
    """The assistant's message; of a text, ``content`` is the whole text, its beginning included."""
    tokens: int = 0
    """How many were written."""
    fault: str = ""
    """One of `FAULTS`; empty: the answer is whole."""
    note: str = ""
    """In whose words."""


def failed(fault: str, note: str = "") -> Answer:
    """No answer."""
    return Answer({}, 0, fault, note)


class Asked(ABC):
    """One row on its way. While it `waits`, it wants an answer to what it has come to (see `take`)."""

    def __init__(self, row: int, key: str, waits: bool) -> None:
        self.row, self.key, self.waits = row, key, waits
        self.turns, self.tokens = 0, 0
        self.fault, self.note = ("", "") if waits else ("nothing", "")

    def seed(self, seed: int) -> int:
        """Of the next answer, 63 bits. Turns have seeds of their own: templates may shorten what was said, and positions come again."""
        return int.from_bytes(hashlib.sha256(f"{seed}/{self.key}/{self.turns}".encode()).digest()[:8], "big") >> 1

    def take(self, answer: Answer) -> None:
        """The next answer, or that there is none."""
        self.tokens += answer.tokens
        self.fault, self.note = answer.fault, answer.note
        if answer.fault:
            self.waits = False
            return
        self.turns += 1
        self._go_on(answer.message)

    @abstractmethod
    def _go_on(self, message: Message) -> None:
        """Take over an answer; ``waits`` is whether another is due after it."""

    @abstractmethod
    def answered(self) -> dict[str, Any] | None:
        """The columns of the new row; None if nothing was answered."""


class Conversation(Asked):
    """Messages, of which the assistant's are answered anew, one after the other; others are kept as they are.

    A conversation that ends with a question gets one answer more than it had. A message of the assistant's that opens the
    conversation answers nothing and is kept. Where an answer fails, what was answered before it remains.
    """

    def __init__(self, row: int, key: str, given: list[Message], tools: Any) -> None:
        self.given, self.tools = given, tools
        self.messages: list[Message] = []
        """What is said so far: what the next answer is given to."""
        self.whole = 0
        """How many messages there are up to the last answer."""
        super().__init__(row, key, self._keep())

    def _keep(self) -> bool:
        """Take over what others say next; whether an answer is due then."""
        for message in self.given[len(self.messages) :]:
            if message["role"] == ASSISTANT and self.messages:
                return True
            self.messages.append(message)
        return bool(self.messages) and self.messages[-1]["role"] not in (ASSISTANT, "system")

    def _go_on(self, message: Message) -> None:
        replaced = self.given[len(self.messages)] if len(self.messages) < len(self.given) else {}
        self.messages.append(_with_ids(message, replaced))
        self.whole = len(self.messages)
        self.waits = self._keep()

    def answered(self) -> dict[str, Any] | None:
        if not self.turns:
            return None
        messages = self.messages[: self.whole] if self.fault else self.messages
        return {"messages": messages} | ({} if self.tools is None else {"tools": self.tools})


class Passage(Asked):
    """A text, of which the beginning is kept and continued."""

    def __init__(self, row: int, key: str, text: str) -> None:
        super().__init__(row, key, bool(text))
        self.text = text

    def _go_on(self, message: Message) -> None:
        self.text, self.waits = message["content"], False

    def answered(self) -> dict[str, Any] | None:
        return {"text": self.text} if self.turns else None


def _with_ids(message: Message, replaced: Message) -> Message:
    """The message with the ids of the tool calls it replaces, as far as there were any: the tools' answers that follow name them."""
    old, new = replaced.get("tool_calls"), message.get("tool_calls")
    if not isinstance(old, list) or not isinstance(new, list):
        return message
    ids = [call.get("id") if isinstance(call, dict) else None for call in old] + [None] * len(new)
    return message | {"tool_calls": [call | {"id": known} if known else call for call, known in zip(new, ids, strict=False)]}


def read_asked(rows: Sequence[Row], data: Data, source: str) -> list[Asked]:
    """Every row as it is asked. Raises UserError that names the row for one that is neither a conversation nor a text."""
    column = data_column(rows[0], data, source)
    plain = data.format == "text" or (data.format == "auto" and isinstance(rows[0][column], str))
    asked: list[Asked] = []
    equals: Counter[str] = Counter()
    for number, row in enumerate(rows):
        where = f"{source}, row {number + 1}"
        if row.get(column) is None:
            raise UserError(f"{where} has no {column}; it has {', '.join(row)}")
        value: Any = row[column] if plain else read_messages(row[column], where, data.format)
        if plain and not isinstance(value, str):
            raise UserError(f"{where}: plain text expected; got {type(value).__name__}")
        hashed = value_hash([value, row.get("tools")])
        key = f"{hashed}/{equals[hashed]}"
        equals[hashed] += 1
        asked.append(Passage(number, key, value) if plain else Conversation(number, key, value, row.get("tools")))
    return asked
