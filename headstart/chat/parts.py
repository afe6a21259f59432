"""Content of a turn in parts: text and images, in the format of processors and in OpenAI's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstart.support.errors import UserError


def named(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part that is an image with its name alone, empty where it has none, and any other as it is."""
    if part["type"] not in ("image", "image_url"):
        return part
    name = next((part[field] for field in ("image", "image_url", "url", "path") if part.get(field) is not None), "")
    return {"type": "image", "image": name.get("url") if isinstance(name, dict) else name}


def image_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of turns that are images, in order; a tool's result has none."""
    held = [message["content"] for message in messages if message["role"] != "tool" and isinstance(message["content"], list)]
    return [part for content in held for part in content if part["type"] == "image"]


def name_images(messages: Sequence[dict[str, Any]], beside: Any, where: str) -> None:
    """Give images without a name the next of ``beside``. Raises UserError for more or fewer."""
    nameless = [part for part in image_parts(messages) if not part["image"]]
    if not isinstance(beside, list) or len(beside) != len(nameless) or not all(isinstance(name, str) for name in beside):
        many = f"{len(nameless)} files or data: URLs, one for each part {{'type': 'image'}} that names none"
        raise UserError(f"{where}: images are a list of {many}; got {len(beside) if isinstance(beside, list) else type(beside).__name__}")
    for part, name in zip(nameless, beside, strict=True):
        part["image"] = name
