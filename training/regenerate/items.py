"""The items of a dataset to regenerate: conversations, answered turn by turn, and plain texts, continued from their beginnings.

Items do not depend on the responder. A response's seed is derived from the recipe's seed, the row's content, the number of equal rows
before it, and the turn, so it does not depend on the order of rows, batching or restarts.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.chat.conversation import Trace
from headstart.chat.messages import Message, asks, is_learned, prompt_length
from headstart.support.files import value_hash
from headstart.training.data.rows import Row
from headstart.training.data.samples import find_column
from headstart.training.recipe.recipe import Data, Regenerate

ERRORS = {
    "truncated": "an answer that did not end within regenerate.max_new_tokens",
    "too_long": "a prompt that leaves no room for regenerate.max_new_tokens in the model's context",
    "refused": "a prompt that the chat template, the backbone or the endpoint refused",
    "empty": "nothing that could be asked",
}
"""Errors of responses: code -> description."""


@dataclass(frozen=True)
class Response:
    """Response to a prompt, or an error."""

    message: Message
    """Assistant message; for a completion, ``content`` is the whole text, prompt included."""
    tokens: int = 0
    """Number of generated tokens."""
    error: str = ""
    """One of `ERRORS`; empty if the response is complete."""
    detail: str = ""
    """Message of the template or server that refused the prompt."""
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    """Token ids of both; none where a server does not return them."""


def failure(error: str, detail: str = "") -> Response:
    return Response({}, 0, error, detail)


def _hashed(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big")


class Item(ABC):
    """A row of the dataset; while ``pending`` it needs another response (`add_response`)."""

    def __init__(self, row: int, key: str, pending: bool) -> None:
        self.row, self.key, self.pending = row, key, pending
        self.turns, self.tokens = 0, 0
        self.error, self.detail = ("", "") if pending else ("empty", "")
        self.trace: Trace | None = Trace()

    def seed(self, seed: int) -> int:
        """Return the 63-bit seed of the next response; it differs by turn, since positions repeat if templates shorten earlier turns."""
        return _hashed(seed, self.key, self.turns) >> 1

    def temperature(self, settings: Regenerate, seed: int) -> float:
        """Return one of ``regenerate.temperature``, the same for all turns; it depends on the recipe's seed and the row's content."""
        return settings.temperatures[_hashed(seed, self.key, "temperature") % len(settings.temperatures)]

    def add_response(self, response: Response, unfinished: str = "drop") -> None:
        """Add the next response; an error ends the item. ``unfinished``: drop or keep an answer that is cut off, as the item's last."""
        self.tokens += response.tokens
        self.error, self.detail = response.error, response.detail
        cut = response.error == "truncated" and unfinished == "keep" and bool(response.message.get("content"))
        if response.error and not cut:
            self.pending = False
            return
        self.turns += 1
        self._add(response.message)
        self.pending = self.pending and not cut
        if response.answer and self.trace is not None:
            self.trace.add(response.prompt, response.answer)
        else:
            self.trace = None  # of a row with a text alone, the tokens are made from it

    def columns(self) -> dict[str, Any]:
        """Return the row's exact tokens, if all of them are known: one sample or, where the template rewrites earlier turns, several."""
        if self.trace is None:
            return {}
        ids = [tokens for tokens, _ in self.trace.samples]
        masks = [[int(label) for label in labels] for _, labels in self.trace.samples]
        return {"input_ids": ids, "loss_mask": masks} if len(ids) > 1 else {"input_ids": ids[0], "loss_mask": masks[0]}

    @abstractmethod
    def _add(self, message: Message) -> None:
        """Store the message and update ``pending``."""

    @abstractmethod
    def result(self) -> dict[str, Any] | None:
        """Return the columns of the new row; None without responses."""


class Conversation(Item):
    """Messages whose assistant turns are regenerated one after another; the others are kept.

    A conversation that ends with a user turn gets an additional answer. An assistant message that opens the conversation, or is not to be
    learned, is kept. After an error, the answers before it are kept.
    """

    def __init__(self, row: int, key: str, original: list[Message], tools: Any) -> None:
        self.original, self.tools = original, tools
        self.messages: list[Message] = []
        """The new conversation so far, which is the prompt of the next response."""
        self.answered = 0
        """Number of messages up to and including the last answer."""
        super().__init__(row, key, self._copy_messages())

    def _copy_messages(self) -> bool:
        """Copy the messages up to the next assistant turn; returns True if a response is due."""
        for message in self.original[len(self.messages) :]:
            if is_learned(message) and self.messages:
                return True
            self.messages.append(message)
        return asks(self.messages)

    def _add(self, message: Message) -> None:
        replaced = self.original[len(self.messages)] if len(self.messages) < len(self.original) else {}
        self.messages.append(_with_ids(message, replaced))
        self.answered = len(self.messages)
        self.pending = self._copy_messages()

    def result(self) -> dict[str, Any] | None:
        if not self.turns:
            return None
        messages = self.messages[: self.answered] if self.error else self.messages
        return {"messages": messages} | ({} if self.tools is None else {"tools": self.tools}) | self.columns()


class Completion(Item):
    """A plain text whose beginning is continued, or all of it where it is a ``prompt``."""

    def __init__(self, row: int, key: str, text: str, prompt: bool) -> None:
        super().__init__(row, key, bool(text))
        self.text, self.prompt = text, prompt

    def prompt_length(self, total: int, prompt_tokens: int) -> int:
        """Return how many of the text's ``total`` tokens are the prompt."""
        return total if self.prompt else prompt_length(total, prompt_tokens)

    def _add(self, message: Message) -> None:
        self.text, self.pending = message["content"], False

    def result(self) -> dict[str, Any] | None:
        return {"text": self.text} | self.columns() if self.turns else None


def _with_ids(message: Message, replaced: Message) -> Message:
    """Give the message's tool calls the ids of those they replace, since the tool messages that follow refer to them."""
    old, new = replaced.get("tool_calls"), message.get("tool_calls")
    if not isinstance(old, list) or not isinstance(new, list):
        return message
    ids = [call.get("id") if isinstance(call, dict) else None for call in old] + [None] * len(new)
    return message | {"tool_calls": [call | {"id": known} if known else call for call, known in zip(new, ids, strict=False)]}


def read_items(rows: Sequence[Row], data: Data, source: str, templated: bool = True) -> list[Item]:
    """Make the items of a dataset; without a chat template prompts are continued. Raises UserError, naming the row, for any other row."""
    column = find_column(rows, data, source, asked=True)
    continued = column.kind == "text" or (column.kind == "pair" and not templated)
    items: list[Item] = []
    duplicates: Counter[str] = Counter()
    for number, row in enumerate(rows):
        where = f"{source}, row {number + 1}"
        value: Any
        if continued:
            value, tools = column.text(row, where) if column.kind == "text" else column.plain_pair(row, where)[0], row.get("tools")
        else:
            value, tools = column.messages(row, where)
        hashed = value_hash([value, tools])
        key = f"{hashed}/{duplicates[hashed]}"
        duplicates[hashed] += 1
        items.append(Completion(number, key, value, column.kind == "pair") if continued else Conversation(number, key, value, tools))
    return items
