"""Heads that are exported and imported again are the same tensors, and draft the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exported import make_home

from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.checkpoint import load_drafter
from headstart.inference.serving.export.export import Request, export
from headstart.inference.serving.imports.importer import Wishes, import_heads

TRIPS = [
    ("eagle3", "vllm"),
    ("eagle3-small", "vllm"),
    ("eagle3", "speculators"),
    ("eagle3-small", "speculators"),
    ("eagle", "eagle"),
    ("medusa", "medusa"),
    ("mlp", "mlp-speculator"),
    ("dflash", "dflash"),
    ("dflash", "speculators"),
    ("dspark", "dflash"),
    ("dspark", "speculators"),
    ("domino", "dflash"),
    ("mtp", "mtp-stitch"),
    ("draft_model", "draft-model"),
    ("pard", "draft-model"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("export"))


@pytest.mark.parametrize(("name", "layout"), TRIPS)
def test_export_and_import(home: Path, tmp_path: Path, name: str, layout: str) -> None:
    export(Request(str(home / name), layout, tmp_path / "exported"))
    where = str(home / "backbone")
    import_heads(str(tmp_path / "exported"), where, tmp_path / "imported", lambda: load_backbone(where), Wishes(new_tokens=4))
    first, again = (load_drafter(folder, load_backbone(where)) for folder in (home / name, tmp_path / "imported"))
    ours, theirs = first.tensors(), again.tensors()
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours)
    assert type(again) is type(first) and again.taps == first.taps
