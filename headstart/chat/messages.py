"""Read conversations in the formats of data files, as JSON text of tables too, and choose which part of a plain text is the prompt."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headstart.support.errors import UserError
from headstart.support.json_text import parse_json, without_fill
from headstart.support.text import shortened

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
    for _ in range(2):  # tables of tables encode twice
        if isinstance(value, str) and value.strip().startswith(("[", '"[', '"\\u005b')):
            value = _parse(value, what)
    if isinstance(value, list):
        return [_parse(item, what) if isinstance(item, str) and item.strip().startswith("{") else item for item in value]
    return value


def _filled(tools: Any) -> bool:
    """Whether tools were written from a table: a property's schema is null, which no schema is."""
    if isinstance(tools, list):
        return any(map(_filled, tools))
    pairs = tools.items() if isinstance(tools, dict) else ()
    return any((key == "properties" and isinstance(part, dict) and None in part.values()) or _filled(part) for key, part in pairs)


def read_tools(value: Any, where: str) -> Any:
    """Return a row's tools, or None if it has none. Raises UserError for anything but a list of mappings, or JSON text of one."""
    if value is None or (isinstance(value, str) and value.strip() in ("", "null")):
        return None
    tools = decode_list(value, f"{where}, tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: tools are a list of mappings, or JSON text of one; got {shortened(value)}")
    return tools


def _parse(text: str, what: str) -> Any:
    try:
        return parse_json(text, what)
    except UserError as error:
        raise UserError(f"{error}; write it with json.dumps, not as Python prints it: got {shortened(text)}") from None


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


ASSISTANT = "assistant"
CALLS = ("function_call", "tool_call")
"""Speakers of a turn whose value is a call of a tool."""
ROLES = {
    "human": "user", "user": "user",
    "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT, "model": ASSISTANT, "assistant": ASSISTANT,
    **dict.fromkeys(CALLS, ASSISTANT),
    "system": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
"""Speaker in files for other trainers -> role; templates may know further roles."""
FIELDS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Format -> fields of a turn, which are names of the same; the first tells the formats apart."""

MARKS = {"weight": 1, "train": 1, "training": 1, "loss": 1, "loss_weight": 1, "masked": 0}
"""Fields by which files for other trainers leave a turn out -> the value in a turn that is learned.

OpenAI's, Mistral's and Together's ``weight``; axolotl's ``train`` and ``training``; ms-swift's ``loss``; LLaMA-Factory's ``loss_weight``;
torchtune's ``masked``.
"""
KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking", *MARKS}
"""Fields of a turn that are read, by most chat templates too."""

Message = dict[str, Any]
PLACE = "<image>"  # of an image in the texts of LLaVA's rows


def is_learned(message: Message) -> bool:
    """Whether a turn is the assistant's and not marked as one that is not to be learned (`MARKS`)."""
    return message["role"] == ASSISTANT and all(message.get(mark, learned) == learned for mark, learned in MARKS.items())


def asks(messages: Sequence[Message]) -> bool:
    """Whether a conversation ends with what the assistant is to answer: a question, or the result of a call."""
    return bool(messages) and messages[-1]["role"] not in (ASSISTANT, "system")


def unread(message: Message) -> set[str]:
    """Return the names of a turn's fields that are not read: those that few templates print, and a mark that another's turn is learned."""
    own = message["role"] == ASSISTANT
    marks = set() if own else {f"{mark} of a turn that is not the assistant's" for mark in MARKS if message.get(mark) == MARKS[mark]}
    return message.keys() - KNOWN | marks


def read_conversation(
    row: Mapping[str, Any], column: str, where: str, form: str = "auto", images: bool = False
) -> tuple[list[Message], Any]:
    """Return the messages and tools of a row (`read_messages`, `read_tools`).

    Text in its column ``system``, as LLaMA-Factory and Anthropic's API have it, is the system message of a conversation without one.
    ``images``: turns may have some. Raises UserError, which begins with ``where``.
    """
    return completed(row, read_messages(row[column], where, form), where, images)


def is_blank(value: Any) -> bool:
    """Whether a row has nothing in a column: null, blanks, an empty list or mapping."""
    return not value.strip() if isinstance(value, str) else value in (None, [], {})


def completed(row: Mapping[str, Any], messages: list[Message], where: str, images: bool) -> tuple[list[Message], Any]:
    """Return messages with the row's system message and images, and its tools. Raises UserError, which begins with ``where``."""
    tools, system = read_tools(row.get("tools"), where), row.get("system")
    if _filled(tools):
        messages, tools = without_fill([messages, tools], level=1)
    if not is_blank(system) and not (messages and messages[0]["role"] == "system"):
        messages = [_checked({"role": "system", "content": system}, f"{where}, column system"), *messages]
    if images:
        parts = image_parts(messages)
        own = None if parts and all(part["image"] for part in parts) else row.get("image")  # with names of their own parts need no column
        name_images(messages, decode_list(row.get("images") or own or [], f"{where}, images"), where)
    elif image_parts(messages):
        raise UserError(f"{where}: a turn has an image; train with data.images=true, ask with bench --images, or leave such rows out")
    return messages, tools


def read_messages(turns: Any, where: str, form: str = "auto") -> list[Message]:
    """Convert turns to messages with ``role`` and ``content``; other fields (tool calls, reasoning) are kept.

    ``turns`` may be JSON text, and so may each turn. ``form`` is one of `FIELDS` or auto. Raises UserError, which begins with ``where``.
    """
    turns = decode_list(turns, where)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f"{where}: a conversation is a list of turns, each a mapping; got {shortened(turns)}")
    if any(turn.get("role") != ASSISTANT and turn.get("tool_calls", 0) is None for turn in turns):  # lines that a table wrote
        turns = without_fill(turns, level=1)
    messages = [_checked(_message(turn, f"{where}, turn {i}", form), f"{where}, turn {i}") for i, turn in enumerate(turns)]
    return _numbered(messages) if any(turn.get(key) in CALLS for turn in turns for key in ("role", "from")) else messages


def _numbered(messages: list[Message]) -> list[Message]:
    """Give calls without an id one, and results without the id of their call that of the first call that has no result yet.

    Files of turns whose value is a call know no ids, and some templates need them (Mistral's: of nine characters).
    """
    numbered: list[Message] = []
    waiting: list[Any] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
            calls = [call if call.get("id") else {"id": f"call{len(numbered):03d}{i:02d}"} | call for i, call in enumerate(calls)]
            waiting, message = [call["id"] for call in calls], message | {"tool_calls": calls}
        elif message["role"] == "tool" and waiting:
            message = {"tool_call_id": waiting[0], **message}
            waiting = [number for number in waiting if number != message["tool_call_id"]]
        numbered.append(message)
    return numbered


def _message(turn: dict[str, Any], where: str, form: str) -> Message:
    # Tables fill missing fields with null, which templates take for present fields.
    fields = {key: value for key, value in turn.items() if value is not None}
    formats = [FIELDS[form]] if form in FIELDS else [*FIELDS.values()]
    if not any(key in fields for key, _ in formats) or ("role" not in fields and not {"content", "value"} & turn.keys()):
        expected = ", or ".join(map(" and ".join, formats))
        raise UserError(f"{where}: a turn has {expected}; this one has {', '.join(map(str, turn)) or 'nothing'}")
    speakers, texts = ([fields.pop(name) for name in names if name in fields] for names in zip(*FIELDS.values(), strict=True))
    roles = [ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker for speaker in speakers]
    if turn.get("role") is None and roles[0] not in ROLES.values():
        raise UserError(f"{where}: unknown speaker {shortened(speakers[0])}; known: {', '.join(ROLES)}")
    for names, (first, *other) in (("role and from", roles), ("content and value", texts or [None])):
        if other and first != other[0] and other[0] in (*ROLES.values(), *texts):  # beside a role, another word may be a name
            raise UserError(f"{where}: {names} are names of the same; got {shortened(first)} and {shortened(other[0])}: keep one")
    content = texts[0] if texts else None
    called = any(speaker in CALLS for speaker in speakers) and (content or "tool_calls" not in fields)
    return {"role": roles[0], **(read_calls(content, where) if called else {"content": content}), **fields}


def _checked(message: Message, where: str) -> Message:
    """Return a message whose content is text or null; parts of text are joined. A tool's result may be any value."""
    if isinstance(calls := message.get("tool_calls"), str):
        message = message | {"tool_calls": decode_list(calls, f"{where}, tool_calls") if calls.strip() not in ("", "null") else None}
    role, content = message["role"], message["content"]
    if not isinstance(role, str):
        raise UserError(f"{where}: a role is text; got {shortened(role)}")
    mark = next((mark for mark in MARKS if role == ASSISTANT and message.get(mark, 0) not in (0, 1)), None)
    if mark is not None:
        raise UserError(f"{where}: {mark} is 0 or 1, whether the turn is learned; got {shortened(message[mark])}: give one, or remove it")
    if content is None or isinstance(content, str):
        return message
    parts = isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    if role == "tool" and not (parts and all(isinstance(part.get("text"), str) for part in content)):
        return message
    if not parts:
        raise UserError(f"{where}: content is text, or a list of parts with a type; got {shortened(content)}")
    if role == ASSISTANT and (marked := next((mark for part in content for mark in MARKS if mark in part), None)):
        raise UserError(f"{where}: a part of content has {marked}, which is read of whole turns: mark the turn, or remove it")
    content = [named(part) for part in content]
    taken = ("text",) if role == ASSISTANT else ("text", "image")
    other = next((part for part in content if part["type"] not in taken or not isinstance(part.get(part["type"]), str)), None)
    if other is not None:
        kind = f"a part of type {shortened(other['type'])}"
        raise UserError(f"{where}: content has {kind}; heads are for text, and images in files: leave such rows or parts out")
    if any(part["type"] == "image" for part in content):
        return message | {"content": content}
    return message | {"content": "".join(part["text"] for part in content)}


def prompt_length(total: int, prompt_tokens: int) -> int:
    """Return how many of a plain text's ``total`` tokens are the prompt: ``prompt_tokens``, or half (rounded up) if it is not longer."""
    return prompt_tokens if total > prompt_tokens else (total + 1) // 2


def named(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part that is an image with its name alone, empty where it has none, and any other as it is."""
    if part["type"] not in ("image", "image_url"):
        return part
    inline = {"url": f"data:image/png;base64,{part['base64']}"} if isinstance(part.get("base64"), str) else ""
    name = next((part[field] for field in ("image", "image_url", "url", "path") if part.get(field) is not None), inline)
    return {"type": "image", "image": name.get("url") or name.get("path") if isinstance(name, dict) else name}


def image_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of turns that are images, in order; a tool's result has none."""
    held = [message["content"] for message in messages if message["role"] != "tool" and isinstance(message["content"], list)]
    return [part for content in held for part in content if part["type"] == "image"]


def name_images(messages: Sequence[dict[str, Any]], beside: Any, where: str) -> None:
    """Give images without a name the next of ``beside``, a list or one: parts, and `PLACE` in users' texts; where there is neither, the
    images stand before the first question. Raises UserError for more or fewer.
    """
    given = beside if isinstance(beside, list) else [beside]
    names = [named({"type": "image", "image": name})["image"] for name in given]
    asked = [message for message in messages if message["role"] == "user"] if names else []
    for message in asked:
        if isinstance(text := message["content"], str) and PLACE in text:
            texts = [[{"type": "text", "text": part}] if part else [] for part in text.split(PLACE)]
            message["content"] = sum(([{"type": "image", "image": ""}, *part] for part in texts[1:]), texts[0])
    if asked and not image_parts(messages):
        text = asked[0]["content"]
        asked[0]["content"] = [*({"type": "image", "image": ""} for _ in names), {"type": "text", "text": text or ""}]
    nameless = [part for part in image_parts(messages) if not part["image"]]
    if len(names) != len(nameless) or not all(isinstance(name, str) for name in names):
        many = f"{len(nameless)} files or data: URLs, one for each part {{'type': 'image'}} or {PLACE} in a user's text"
        found = f"{len(given)} {sorted({type(name).__name__ for name in given})}"
        raise UserError(f"{where}: images are a list of {many}; got {found}; save those that are no names as files")
    for part, name in zip(nameless, names, strict=True):
        part["image"] = name
