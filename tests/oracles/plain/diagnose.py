"""The mistake in a wrong export: the reading of its files, other than an engine's, that drafts what the trained heads draft.

PYTHONPATH=.:tests/helpers:tests/oracles python -m plain.diagnose FOLDER HEADS BACKBONE
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from engines_alone import headstart_drafts

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.checkpoint import read_metadata
from headstart.inference.generate import load
from headstart.serving.layouts.files import read_files
from headstart.serving.verify.drafts import EngineSettings
from plain.base import Target
from plain.drafts import expected_drafts, fit_of
from plain.folders import read_heads
from plain.mistakes import faults_of, other_readings

PROMPTS = ([5, 9, 33, 12, 7], [1, 2, 3, 4, 50, 60, 7])


@torch.no_grad()
def diagnose(folder: Path, heads: str, backbone: Backbone, prompts: Sequence[Sequence[int]] = PROMPTS) -> str | None:
    """Return the likely cause, None if the folder drafts what the heads do, or a line that says that none was found."""
    trained, target, reading = load(heads, backbone, capture="off"), Target(backbone.model), read_heads(read_files(folder), backbone)
    assert trained.drafter is not None
    original = read_heads(read_files(read_metadata(heads)[0]), backbone)
    texts = expected_drafts(target, headstart_drafts(trained, prompts, EngineSettings(trained.drafter.depth, 6)), trained.drafter)
    fit = None if reading.faults else fit_of(reading, target, texts)
    if fit is not None and fit.whole:
        return None
    for cause, other in other_readings(reading, target, original):
        fit = fit_of(other, target, texts)
        if fit is not None and fit.whole:
            return cause
    return next(iter(faults_of(reading, target)), "no cause was found")


if __name__ == "__main__":
    print(diagnose(Path(sys.argv[1]), sys.argv[2], load_backbone(sys.argv[3], dtype="fp32", device="cpu")))
