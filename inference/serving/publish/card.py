"""The model card of published heads. It states what the files say and what was measured, and names no folder of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from headstart.heads.backbone.adapter import FOLDER as ADAPTER
from headstart.heads.backbone.embedded import resolve
from headstart.heads.backbone.gguf_file import SUFFIX, find_gguf
from headstart.heads.checkpoint import recipe_section
from headstart.inference.serving.engines import ENGINES, METHODS, readers
from headstart.inference.serving.export import BACKBONE
from headstart.inference.serving.launch import Served, launch_line
from headstart.inference.serving.layouts.layout import layouts_of
from headstart.inference.serving.publish.figures import Measured
from headstart.inference.serving.publish.heads import Heads, last_part
from headstart.support.hub import is_hub_id
from headstart.support.json_text import parse_json

UNCHANGED = ("eagle3", "draft_model", "pard")
"""Methods whose checkpoints engines load as they are, unless an adapter belongs to them; others are exported first."""
LICENSES = {
    "apache-2.0": ("Apache License", "Version 2.0"),
    "mit": ("MIT License", "Permission is hereby granted, free of charge"),
    "bsd-3-clause": ("Redistribution and use in source and binary forms", "Neither the name"),
}
"""Identifiers on the hub -> phrases of the licence's text."""
LICENSE_FILES = ("README.md", "config.json", "LICENSE", "LICENSE.txt", "LICENSE.md")


def model_card(heads: Heads, repo: str, measured: list[Measured]) -> str:
    """Return README.md for the repository ``repo``, with the backbone's licence, if it states one."""
    base, data = heads.base_model or heads.shown_backbone, _data(heads)
    license = license_of(heads.base_model or heads.backbone)
    metadata = ModelCardData(
        base_model=heads.base_model,
        license=license,
        library_name="headstart",
        tags=["speculative-decoding", heads.method.replace("_", "-"), "headstart"],
        datasets=[one for one in data if is_hub_id(one)] or None,
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        title=_title(heads),
        backbone=heads.shown_backbone,
        depth=heads.depth,
        adapted=heads.contract.get("adapter") is not None,
        measured=measured,
        counted=any(figure.engines_count is not None for one in measured for figure in one.figures),
        serving=_serving(heads, repo),
        layout=heads.layout,
        repo=repo,
        base=base,
        gguf=base.endswith(SUFFIX),
        carried=any(file.parts[0] == "custom_generate" for file in heads.files),
        training=_training(heads, data),
    )
    return str(card) + "\n"


def _data(heads: Heads) -> list[str]:
    """Return the training data's names as the recipe gives them."""
    train = recipe_section(heads.provenance, "data").get("train")
    return [str(one) for one in train] if isinstance(train, list | tuple) else [train] if isinstance(train, str) else []


def _title(heads: Heads) -> str:
    name = METHODS.get(heads.method, heads.method).partition(",")[0].partition(" (")[0]
    return name[0].upper() + name[1:] + ("" if name.endswith("model") else " heads")


def _serving(heads: Heads, repo: str) -> list[tuple[str, list[str]]]:
    """Return the engines that read the heads, each with the lines that start it."""
    found = []
    for engine, entry in readers(heads.method).items():
        if engine in heads.engines:   # of one whose newest version no longer reads a layout, the layout is asked for by name
            to = engine if entry.until is None else next(one.name for one in layouts_of(heads.method) if engine in one.engines)
            first, served = _served(heads, repo, to)
            found.append((f"{ENGINES[engine]}, {entry}", [*first, launch_line(engine, served)]))
    return found


def _served(heads: Heads, repo: str, to: str) -> tuple[list[str], Served]:
    """Return the lines that bring the heads into the layout ``to``, if they are not in it, and what the engine then starts with."""
    adapted, own = heads.contract.get("adapter") is not None, {file.parts[0] for file in heads.files}
    first, folder, backbone = [], repo, heads.base_model or heads.shown_backbone
    if heads.layout is None and (adapted or heads.method not in UNCHANGED):
        own, folder = {BACKBONE}, "heads"   # as export writes them
        first = [f"headstart export --heads {repo} --to {to} --backbone {backbone} --out {folder}"]
    elif adapted:
        folder = "heads"
        first = [f"hf download {repo} --local-dir {folder}"]
    if adapted and BACKBONE in own:
        backbone = f"{folder}/{BACKBONE}"
    kept = f"{folder}/{ADAPTER}" if adapted and ADAPTER in own else None
    return first, Served(heads.method, folder, backbone, heads.depth, heads.config, kept, heads.rank if kept else 0)


def _training(heads: Heads, data: list[str]) -> dict[str, Any]:
    """Return the rows of the table; those without a value are left out."""
    given = heads.provenance
    arguments = ", ".join(f"{name} {value}" for name, value in heads.arguments.items() if value and not isinstance(value, dict | list))
    counts = {name: f"{given[name]:,}" for name in ("steps", "tokens") if given.get(name) is not None}
    return {
        "method": f"{METHODS.get(heads.method, heads.method)}: {arguments}" if arguments else "",
        "backbone": heads.shown_backbone,
        "data": ", ".join(map(last_part, data)),
        **counts,
        "chat template": f"hash {given['chat_template']}" if given.get("chat_template") else "",
        "layout": heads.layout,
        "weights of the decoder layers": heads.quantize,
        "made with": ", ".join(f"{name} {number}" for name, number in given.get("versions", {}).items()),
        "commit of Headstart": given.get("commit"),
    }


def license_of(backbone: str) -> str | None:
    """Return the identifier of the licence of a folder or hub id, as its model card, configuration or LICENSE file states it.

    None if it states none, or cannot be reached.
    """
    if (gguf := find_gguf(backbone)) is not None:
        return str(gguf.header.metadata.get("general.license") or "") or None
    folder = Path(resolve(backbone))
    for name in LICENSE_FILES:
        file = folder / name if folder.is_dir() else _fetched(backbone, name)
        if file is not None and file.is_file() and (found := _stated_license(file)) is not None:
            return found
    return None


def _fetched(repo: str, name: str) -> Path | None:
    try:
        return Path(hf_hub_download(repo, name))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):   # no such file or repository, no network, no hub id
        return None


def _stated_license(file: Path) -> str | None:
    text = file.read_text("utf-8", errors="replace")
    found: object = None
    try:
        if file.name == "README.md":
            found = ModelCard(text, ignore_metadata_errors=True).data.to_dict().get("license")
        elif file.suffix == ".json":
            found = dict(parse_json(text, str(file))).get("license")
        else:
            found = next((name for name, phrases in LICENSES.items() if all(phrase in text for phrase in phrases)), "other")
    except (ValueError, TypeError):   # metadata that is no YAML, or no mapping in JSON
        return None
    return found if isinstance(found, str) and found else None
