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


def image_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of turns that are images, in order; a tool's result has none."""
    held = [message["content"] for message in messages if message["role"] != "tool" and isinstance(message["content"], list)]
    return [part for content in held for part in content if part["type"] == "image"]


def name_images(messages: Sequence[dict[str, Any]], beside: Any, where: str) -> None:
    """Give images without a name the next of ``beside``. Raises UserError for more or fewer."""
    nameless = [part for part in image_parts(messages) if not part["image"]]
    if not isinstance(beside, list) or not all(isinstance(name, str) for name in beside):
        raise UserError(f"{where}: images are a list of files or data: URLs; got {type(beside).__name__}")
    if len(beside) != len(nameless):
        raise UserError(f'{where} has {len(beside)} images for {len(nameless)} parts {{"type": "image"}} that name none; give as many')
    for part, name in zip(nameless, beside, strict=True):
        part["image"] = name
