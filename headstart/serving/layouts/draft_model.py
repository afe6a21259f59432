"""Draft models: ordinary causal models of transformers with the backbone's vocabulary, and PARD's, which name a mask token.

Checkpoints are ordinary folders of transformers, written as they are.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from headstart.heads.backbone import smaller
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.card import METADATA
from headstart.heads.draft_model import DraftModel as Drafter
from headstart.serving.layouts.checkpoint import Checkpoint
from headstart.serving.layouts.files import Files
from headstart.serving.layouts.layout import Counting, Heads, Layout

TEXT = {".json", ".txt", ".model", ".jinja"}
"""Suffixes of the files of a tokenizer."""
PARALLEL_DEPTH = 8
"""Tokens that a parallel model drafts where its files do not say; PARD's configurations do not."""


class DraftModel(Layout):
    """Weights, configuration and the backbone's tokenizer."""

    name, title, methods = "draft-model", "draft model", ("draft_model", "pard")
    engines = ("vllm", "sglang", "trtllm", "transformers")

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        own = {METADATA, "config.json", heads.weights_file}
        for file in heads.folder.iterdir():
            if file.is_file() and file.suffix in TEXT and file.name not in own:
                shutil.copyfile(file, folder / file.name)
        return super().write(heads, folder)

    def recognises(self, files: Files) -> bool:
        architectures = files.config.get("architectures") or []
        named = any(str(one).endswith(("ForCausalLM", "LMHeadModel")) for one in architectures)
        return named and len(files.shapes) > 0 and "fc.weight" not in files.shapes

    def sizes(self, files: Files) -> dict[str, Any]:
        return {}  # the configuration is that of the draft model

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        small = load_backbone(str(files.folder), dtype="auto", device=backbone.device)
        smaller.require_fitting(backbone, small, smaller.find_tokenizers(backbone.name, str(files.folder)))
        brought = f"its vocabulary of {small.vocab} was brought to the backbone's {backbone.vocab}"
        remarks = (brought,) if small.vocab != backbone.vocab else ()
        smaller.resize(small.model, backbone.vocab)
        arguments: dict[str, Any] = {"architecture": smaller.stated_config(small.model.config)}
        notes: list[str] = []
        if (mask := files.config.get("pard_token")) is not None:
            arguments |= {"parallel": True, "mask_token": None if mask == backbone.vocab - 1 else mask, "depth": PARALLEL_DEPTH}
            notes.append(f"drafts in parallel; its files do not say how many tokens, {PARALLEL_DEPTH} here: --depth N for others")
        tensors = Drafter(backbone, Drafter.Config(**arguments), small.model).tensors()
        return Heads("draft_model", arguments, dict(tensors), notes=tuple(notes), remarks=remarks)
