"""Read conversations in the formats of data files, and choose which part of a plain text is the prompt."""

from __future__ import annotations

from typing import Any

from headstart.support.chat.calls import read_calls
from headstart.support.chat.encoded import decode_list, shortened
from headstart.support.errors import UserError

ASSISTANT = "assistant"
CALL = "function_call"
"""Speaker of a turn whose value is a call of a tool."""
ROLES = {
    "human": "user", "user": "user",
    "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT, "model": ASSISTANT, "assistant": ASSISTANT,
    CALL: ASSISTANT, "tool_call": ASSISTANT,
    "system": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
"""Speaker in ShareGPT-like files (``from``) -> role."""
FIELDS = {"messages": "role and content", "conversations": "from and value"}
"""Format -> fields of a turn."""

Message = dict[str, Any]


def read_messages(turns: Any, where: str, form: str = "auto") -> list[Message]:
    """Convert turns to messages with ``role`` and ``content``; other fields (tool calls, reasoning) are kept.

    ``turns`` may be JSON text, and so may each turn. ``form`` is one of `FIELDS` or auto. Raises UserError, which begins with ``where``.
    """
    turns = decode_list(turns, where)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f"{where}: a conversation is a list of turns, each a mapping; got {shortened(turns)}")
    return [_checked(_message(turn, f"{where}, turn {i}", form), f"{where}, turn {i}") for i, turn in enumerate(turns)]


def _message(turn: dict[str, Any], where: str, form: str) -> Message:
    # Tables fill missing fields with null, which templates take for present fields.
    fields = {key: value for key, value in turn.items() if value is not None or key in ("content", "value")}
    if "role" in fields and form != "conversations":
        called = {"role": ASSISTANT} | read_calls(fields["content"], where) if fields["role"] == CALL and fields.get("content") else {}
        return {"content": None, **fields, **called}
    if "from" in fields and "value" in fields and form != "messages":
        rest = {key: value for key, value in fields.items() if key not in ("from", "value")}
        if not isinstance(fields["from"], str) or fields["from"] not in ROLES:
            raise UserError(f"{where}: unknown speaker {shortened(fields['from'])}; known: {', '.join(ROLES)}")
        said = read_calls(fields["value"], where) if fields["from"] in (CALL, "tool_call") else {"content": fields["value"]}
        return {"role": ROLES[fields["from"]], **said, **rest}
    expected = FIELDS.get(form, ", or ".join(FIELDS.values()))
    raise UserError(f"{where}: a turn has {expected}; this one has {', '.join(map(str, turn)) or 'nothing'}")


def _checked(message: Message, where: str) -> Message:
    """Return a message whose content is text or null; parts of text are joined. A tool's result may be any value."""
    if isinstance(calls := message.get("tool_calls"), str):
        message = message | {"tool_calls": decode_list(calls, f"{where}, tool_calls") if calls.strip() not in ("", "null") else None}
    role, content = message["role"], message["content"]
    if not isinstance(role, str):
        raise UserError(f"{where}: a role is text; got {shortened(role)}")
    if content is None or isinstance(content, str):
        return message
    parts = isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    if role == "tool" and not (parts and all(isinstance(part.get("text"), str) for part in content)):
        return message
    if not parts:
        raise UserError(f"{where}: content is text, or a list of parts with a type; got {shortened(content)}")
    other = next((part["type"] for part in content if part["type"] != "text" or not isinstance(part.get("text"), str)), None)
    if other is not None:
        raise UserError(f"{where}: content has a part of type {shortened(other)}; heads are for text: leave such rows or parts out")
    return message | {"content": "".join(part["text"] for part in content)}


def prompt_length(total: int, prompt_tokens: int) -> int:
    """Return how many of a plain text's ``total`` tokens are the prompt: ``prompt_tokens``, or half (rounded up) if it is not longer."""
    return prompt_tokens if total > prompt_tokens else (total + 1) // 2

