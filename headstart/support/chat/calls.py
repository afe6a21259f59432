"""Calls of tools that a file keeps as the value of a turn, as LLaMA-Factory's ShareGPT form does (the speaker ``function_call``)."""

from __future__ import annotations

import re
from typing import Any

from headstart.support.chat.encoded import decode_list, shortened
from headstart.support.errors import UserError
from headstart.support.json_text import parse_json

THOUGHT = re.compile(r"\s*<think>\n?(.*?)\n?</think>\s*", re.DOTALL)


def read_calls(value: Any, where: str) -> dict[str, Any]:
    """Return the fields of an assistant's message whose calls are ``value``: one call, or a list, as mappings or JSON text.

    A thought before them becomes ``reasoning_content``. Raises UserError, which begins with ``where``, for a call without a name.
    """
    thought = THOUGHT.match(value) if isinstance(value, str) else None
    calls = value[thought.end() :] if thought else value
    if isinstance(calls, str):
        calls = parse_json(calls, f"{where}, its call")
    calls = decode_list(calls if isinstance(calls, list) else [calls], where)
    named: list[Any] = [call.get("function", call) if isinstance(call, dict) else None for call in calls]
    if not named or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in named):
        raise UserError(f"{where}: a call is a mapping with name and arguments, a list of such, or JSON text; got {shortened(value)}")
    fields = {"reasoning_content": thought.group(1)} if thought else {}
    functions = [call | {"arguments": call.get("arguments") or {}} for call in named]
    return {"content": "", **fields, "tool_calls": [{"type": "function", "function": function} for function in functions]}
