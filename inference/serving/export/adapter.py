"""The backbone's adapter beside exported heads: merged into a copy of the backbone, or kept as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from headstart.heads.backbone.adapter import CONFIG, FOLDER
from headstart.heads.backbone.backbone import load_tokenizer
from headstart.inference.serving.engines import ENGINES
from headstart.inference.serving.trained import Trained
from headstart.support.errors import UserError
from headstart.support.json_text import read_json

BACKBONE = "backbone"
"""Folder of the merged backbone inside the exported folder."""


def require_keepable(trained: Trained, engine: str | None) -> int:
    """Return the rank of the adapter. Raises UserError unless an engine can serve it unmerged beside heads."""
    assert trained.adapter is not None
    config = read_json(trained.adapter / CONFIG, "train again, or restore the file")
    if engine not in (None, "vllm"):
        raise UserError(f"--adapter keep is for vLLM; whether {ENGINES[engine]} drafts for an adapter is not known: use --adapter merge")
    if config.get("use_dora"):
        raise UserError("--adapter keep does not go with DoRA, which vLLM does not read: use --adapter merge")
    return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])


def keep(trained: Trained, folder: Path) -> None:
    """Copy the adapter into the folder."""
    assert trained.adapter is not None
    shutil.copytree(trained.adapter, folder / FOLDER)


def merge(trained: Trained, folder: Path) -> None:
    """Write the backbone with the adapter merged into its weights, in the dtype of its checkpoint. Raises UserError."""
    assert trained.adapter is not None
    backbone = trained.load_backbone()
    backbone.require_adapter(trained.path, trained.adapter, trained.card["contract"]["adapter"])
    assert backbone.adapter is not None
    model = backbone.adapter.peft.merge_and_unload()
    stated = trained.backbone_config.get("dtype", trained.backbone_config.get("torch_dtype"))
    dtype = getattr(torch, str(stated), None)
    (model if dtype is None else model.to(dtype)).save_pretrained(folder / BACKBONE)
    try:
        load_tokenizer(trained.backbone).save_pretrained(folder / BACKBONE)
    except UserError:
        pass   # a backbone without a tokenizer stays one
