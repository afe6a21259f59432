"""Publish heads: a folder with a model card, without paths of this machine, written to disk or uploaded to the hub."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headstart.heads.backbone.embedded import resolve
from headstart.inference.serving.layouts.files import new_folder
from headstart.inference.serving.publish.card import model_card
from headstart.inference.serving.publish.figures import bench_figures, training_figures
from headstart.inference.serving.publish.heads import Heads, read_heads, require_repo_id, scrubbed
from headstart.support.hub import upload
from headstart.support.inside import inside
from headstart.support.json_text import read_json

METADATA = ("config.json", "headstart.json", "headstart_export.json", "adapter_config.json")
"""Files in which paths of this machine may stand."""


@dataclass(frozen=True)
class Request:
    """What ``headstart push`` was asked for."""

    heads: Path
    repo: str
    private: bool = False
    dry_run: Path | None = None
    """Write the folder there instead of uploading it."""
    bench: tuple[Path, ...] = ()
    """Reports of ``headstart bench --json``."""
    base_model: str | None = None


def publish(request: Request) -> str:
    """Upload the heads, or write the folder; returns where they are. Raises UserError before anything is written, or if the hub refuses."""
    require_repo_id("repository", request.repo)
    heads = read_heads(request.heads, request.base_model)
    measured = [bench_figures(file, heads) for file in request.bench]
    trained = training_figures(heads)
    card = model_card(heads, request.repo, [*measured, *([trained] if trained else [])])
    if request.dry_run is not None:
        with new_folder(request.dry_run) as folder:
            _place(heads, card, folder, copy=True)
        return str(request.dry_run)
    with tempfile.TemporaryDirectory() as name:
        _place(heads, card, Path(name), copy=False)
        return upload(Path(name), request.repo, request.private)


def _place(heads: Heads, card: str, folder: Path, copy: bool) -> None:
    """Fill a folder with the files and the card; ``copy`` False: by links, except what is changed."""
    known = {name: heads.shown_backbone for name in (heads.backbone, resolve(heads.backbone)) if name}
    for name in heads.files:
        source, target = inside(heads.folder, name), folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.name in METADATA:
            shown = scrubbed(read_json(source, "train, export or fetch the heads again"), known)
            target.write_text(json.dumps(shown, indent=2) + "\n", encoding="utf-8")
        elif copy:
            shutil.copyfile(source, target)
        else:
            target.symlink_to(source.resolve())
    (folder / "README.md").write_text(card, encoding="utf-8")
