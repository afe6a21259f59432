"""The licence of a backbone, as its model card, configuration or LICENSE file states it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from headstart.heads.backbone.embedded import resolve
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.support.json_text import parse_json

TEXTS = {
    "apache-2.0": ("Apache License", "Version 2.0"),
    "mit": ("MIT License", "Permission is hereby granted, free of charge"),
    "bsd-3-clause": ("Redistribution and use in source and binary forms", "Neither the name"),
}
"""Identifiers on the hub -> phrases of the licence's text."""
FILES = ("README.md", "config.json", "LICENSE", "LICENSE.txt", "LICENSE.md")


def license_of(backbone: str) -> str | None:
    """Return the identifier of the licence of a folder or hub id; None if it states none, or cannot be reached."""
    if (gguf := find_gguf(backbone)) is not None:
        return str(gguf.header.metadata.get("general.license") or "") or None
    folder = Path(resolve(backbone))
    for name in FILES:
        file = folder / name if folder.is_dir() else _fetched(backbone, name)
        if file is not None and file.is_file() and (found := _stated(file)) is not None:
            return found
    return None


def _fetched(repo: str, name: str) -> Path | None:
    try:
        return Path(hf_hub_download(repo, name))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):   # no such file or repository, no network, no hub id
        return None


def _stated(file: Path) -> str | None:
    text = file.read_text("utf-8", errors="replace")
    found: object = None
    try:
        if file.name == "README.md":
            found = ModelCard(text, ignore_metadata_errors=True).data.to_dict().get("license")
        elif file.suffix == ".json":
            found = dict(parse_json(text, str(file))).get("license")
        else:
            found = next((name for name, phrases in TEXTS.items() if all(phrase in text for phrase in phrases)), "other")
    except (ValueError, TypeError):   # metadata that is no YAML, or no mapping in JSON
        return None
    return found if isinstance(found, str) and found else None
