"""Conversations as data files write them: messages with roles; and which part of a plain text is the prompt."""

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
"""Speakers in ShareGPT-like files (``from``) -> roles."""
FIELDS = {"messages": "role and content", "conversations": "from and value"}
"""Format -> the fields of a turn."""

Message = dict[str, Any]


def read_messages(turns: Any, where: str, form: str = "auto") -> list[Message]:
    """Turns in either format, as messages with ``role`` and ``content``; other fields (tool calls, reasoning) are kept.

    ``form`` is one of `FIELDS`, or auto. Raises UserError that begins with ``where``.
    """
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f"{where}: a conversation is a list of turns, each a mapping; got {_short(turns)}")
    return [_message(turn, f"{where}, turn {i}", form) for i, turn in enumerate(turns)]


def _message(turn: dict[str, Any], where: str, form: str) -> Message:
    # Tables fill the fields a message lacks with null, which templates take for a field that is there.
    fields = {key: value for key, value in turn.items() if value is not None or key == "content"}
    if "role" in fields and form != "conversations":
        return {"content": None, **fields}
    if "from" in fields and "value" in fields and form != "messages":
        rest = {key: value for key, value in fields.items() if key not in ("from", "value")}
        if fields["from"] not in ROLES:
            raise UserError(f"{where}: unknown speaker {_short(fields['from'])}; known: {', '.join(ROLES)}")
        return {"role": ROLES[fields["from"]], "content": fields["value"], **rest}
    expected = FIELDS.get(form, ", or ".join(FIELDS.values()))
    raise UserError(f"{where}: a turn has {expected}; this one has {', '.join(map(str, turn)) or 'nothing'}")


def prompt_length(total: int, prompt_tokens: int) -> int:
    """Tokens of a plain text of ``total`` tokens that are the prompt: ``prompt_tokens``, or half (rounded up) of a text not longer."""
    return prompt_tokens if total > prompt_tokens else (total + 1) // 2


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
