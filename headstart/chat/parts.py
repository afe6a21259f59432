"""Content of a turn in parts: text and images, in the format of processors and in OpenAI's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstart.support.errors import UserError

NAMES = {"image": ("image", "url", "path"), "image_url": ("image_url",)}
"""Type of a part that is an image -> the fields that may name it."""


def named(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part that is an image with its name alone, empty where it has none, and any other as it is."""
    if part["type"] not in NAMES:
        return part
    name = next((part[field] for field in NAMES[part["type"]] if part.get(field) is not None), "")
    return {"type": "image", "image": name.get("url") if isinstance(name, dict) else name}


def image_names(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the images that turns have, in order; a tool's result has none."""
    held = [message["content"] for message in messages if message["role"] != "tool" and isinstance(message["content"], list)]
    return [part["image"] for content in held for part in content if part["type"] == "image"]


def placed(messages: list[dict[str, Any]], beside: Any, where: str) -> list[dict[str, Any]]:
    """Return turns all of whose images have a name, of those without one the next of ``beside``. Raises UserError for more or fewer."""
    places = image_names(messages).count("")
    if not isinstance(beside, list) or not all(isinstance(name, str) for name in beside):
        raise UserError(f"{where}: images are a list of files or data: URLs; got {type(beside).__name__}")
    if len(beside) != places:
        raise UserError(f'{where} has {len(beside)} images for {places} parts {{"type": "image"}} that name none; give as many')
    names, whole = iter(beside), []
    for message in messages:
        if image_names([message]):
            content = [part | {"image": part["image"] or next(names)} if part["type"] == "image" else part for part in message["content"]]
            message = message | {"content": content}
        whole.append(message)
    return whole
