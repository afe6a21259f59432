"""Paths of this machine, and hosts, taken out of what is published: of a path its last part is left."""

from __future__ import annotations

import re
from typing import Any

PATH = re.compile(r"""(?<![\w.:/~-])(?:~[\w.-]*|[A-Za-z]:)?[/\\](?:[^\s/\\'",:=]+[/\\])*([^\s/\\'",:=]+)[/\\]?""")
"""An absolute path in a command; the group is its last part."""
START = re.compile(r"[/~]|[A-Za-z]:[/\\]")
HOSTS = ("endpoint", "_name_or_path")
"""Keys whose values may name a host or folder and say nothing about the heads."""


TEXTS = ("template", "chat_template", "template_kwargs")
"""Keys of chat templates, in which ``</think>`` and ``/no_think`` are no paths."""


def last_part(name: str) -> str:
    """Return a path's last part; anything that is no absolute path is left as it is."""
    if START.match(name):   # the whole is a path, with spaces perhaps
        return re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    return PATH.sub(lambda match: match[1], name)


def scrubbed(value: Any, known: dict[str, str]) -> Any:
    """Return JSON with absolute paths replaced by their last parts, or as ``known`` says, and hosts by null; chat templates stay."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key in TEXTS}
        return {key: None if key in HOSTS else scrubbed(item, known) for key, item in value.items()} | kept
    if isinstance(value, list):
        return [scrubbed(item, known) for item in value]
    if isinstance(value, str):
        return known.get(value, last_part(value))
    return value
