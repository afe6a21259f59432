"""Read conversations in the formats of data files, and choose which part of a plain text is the prompt."""

from __future__ import annotations

from typing import Any

from headstart.support.errors import UserError

ASSISTANT = "assistant"
ROLES = {
    "human": "user", "user": "user",
    "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT, "model": ASSISTANT, "assistant": ASSISTANT,
    "system": "system",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
"""Speaker in ShareGPT-like files (``from``) -> role."""
FIELDS = {"messages": "role and content", "conversations": "from and value"}
"""Format -> fields of a turn."""

Message = dict[str, Any]


def read_messages(turns: Any, where: str, form: str = "auto") -> list[Message]:
    """Convert turns to messages with ``role`` and ``content``; other fields (tool calls, reasoning) are kept.

    ``form`` is one of `FIELDS` or auto. Raises UserError, whose message begins with ``where``.
    """
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f"{where}: a conversation is a list of turns, each a mapping; got {_short(turns)}")
    return [_checked(_message(turn, f"{where}, turn {i}", form), f"{where}, turn {i}") for i, turn in enumerate(turns)]


def _message(turn: dict[str, Any], where: str, form: str) -> Message:
    # Tables fill missing fields with null, which templates take for present fields.
    fields = {key: value for key, value in turn.items() if value is not None or key == "content"}
    if "role" in fields and form != "conversations":
        return {"content": None, **fields}
    if "from" in fields and "value" in fields and form != "messages":
        rest = {key: value for key, value in fields.items() if key not in ("from", "value")}
        if not isinstance(fields["from"], str) or fields["from"] not in ROLES:
            raise UserError(f"{where}: unknown speaker {_short(fields['from'])}; known: {', '.join(ROLES)}")
        return {"role": ROLES[fields["from"]], "content": fields["value"], **rest}
    expected = FIELDS.get(form, ", or ".join(FIELDS.values()))
    raise UserError(f"{where}: a turn has {expected}; this one has {', '.join(map(str, turn)) or 'nothing'}")


def _checked(message: Message, where: str) -> Message:
    """Return a message whose content is text or null; parts of text are joined. A tool's result may be any value."""
    role, content = message["role"], message["content"]
    if not isinstance(role, str):
        raise UserError(f"{where}: a role is text; got {_short(role)}")
    if content is None or isinstance(content, str):
        return message
    parts = isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    if role == "tool" and not (parts and all(isinstance(part.get("text"), str) for part in content)):
        return message
    if not parts:
        raise UserError(f"{where}: content is text, or a list of parts with a type; got {_short(content)}")
    other = next((part["type"] for part in content if part["type"] != "text" or not isinstance(part.get("text"), str)), None)
    if other is not None:
        raise UserError(f"{where}: content has a part of type {_short(other)}; heads are for text: leave such rows or parts out")
    return message | {"content": "".join(part["text"] for part in content)}


def prompt_length(total: int, prompt_tokens: int) -> int:
    """Return how many of a plain text's ``total`` tokens are the prompt: ``prompt_tokens``, or half (rounded up) if it is not longer."""
    return prompt_tokens if total > prompt_tokens else (total + 1) // 2


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
