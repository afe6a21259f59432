"""Headstart and the reference reading in the form of an engine of `headstart verify`: from a folder and the name of a backbone."""

from __future__ import annotations

from pathlib import Path

from own_drafts import headstart_drafts
from plain.base import Target
from plain.drafts import reference_drafts
from plain.folders import read_heads

from headstart.heads.backbone.backbone import load_backbone
from headstart.inference.generate import load
from headstart.serving.layouts.files import read_files
from headstart.serving.verify.drafts import EngineSettings, Transcript


def headstart(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
    """See `Engine`; ``folder`` is a checkpoint of Headstart."""
    return headstart_drafts(load(folder, load_backbone(backbone, dtype="fp32", device="cpu")), prompts, settings)


def reference(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
    """See `Engine`: heads as the readers of `layouts` read them."""
    on = load_backbone(backbone, dtype="fp32", device="cpu")
    return reference_drafts(read_heads(read_files(folder), on), Target(on.model), prompts, settings)
