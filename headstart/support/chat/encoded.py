"""Conversations, tools and calls that tables hold as JSON text: a CSV file, an SQL table or a Parquet file with one type a column."""

from __future__ import annotations

import re
from typing import Any

from headstart.support.errors import UserError
from headstart.support.json_text import parse_json

TURNS = re.compile(
    r"""\s*"?\s*(?:\[|\{\s*\\*["'](?:messages|conversations)\\*["']\s*:\s*\[)"""
    r"""\s*"?\{.{0,2000}?\\*["'](?:role|from)\\*["']\s*:""",
    re.DOTALL,
)
"""The beginning of a text of turns, in JSON once or twice, or as Python prints a list."""


def looks_like_turns(value: Any) -> bool:
    """Whether a value is a list, or text that begins as JSON text of turns does, valid or not."""
    return TURNS.match(value) is not None if isinstance(value, str) else isinstance(value, list)


def decode_list(value: Any, what: str) -> Any:
    """Return the list of mappings that ``value`` or its items hold as JSON text; anything else as it is.

    Raises UserError, which begins with ``what``, for text that begins as a list and is not valid JSON.
    """
    for _ in range(2):   # tables of tables encode twice
        if isinstance(value, str) and value.strip().startswith(("[", '"[', '"\\u005b')):
            value = _parse(value, what)
    if isinstance(value, list):
        return [_parse(item, what) if isinstance(item, str) and item.strip().startswith("{") else item for item in value]
    return value


def read_tools(value: Any, where: str) -> Any:
    """Return a row's tools, or None if it has none. Raises UserError for anything but a list of mappings, or JSON text of one."""
    if value is None or (isinstance(value, str) and value.strip() in ("", "null")):
        return None
    tools = decode_list(value, f"{where}, tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: tools are a list of mappings, or JSON text of one; got {shortened(value)}")
    return tools


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parse(text: str, what: str) -> Any:
    try:
        return parse_json(text, what)
    except UserError as error:
        raise UserError(f"{error}; write it with json.dumps, not as Python prints it: got {shortened(text)}") from None
