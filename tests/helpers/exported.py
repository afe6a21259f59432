"""Heads of every kind saved on disk, and exports of them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from errors import refusal
from families import VOCAB, random_drafter, tiny
from safetensors.torch import load_file
from torch import Tensor

from headstart.heads.backbone.backbone import load_backbone
from headstart.serving.export import Request, export

DV, D = 23, 32
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"depth": 3}),
    "eagle3-small": ("eagle3", {"depth": 3, "draft_vocab_size": DV, "layers": 2, "fc_norm": True, "norm_output": True}),
    "peagle": ("peagle", {"depth": 3, "layers": 2}),
    "peagle-own": ("peagle", {"depth": 4, "layers": 3, "draft_vocab_size": DV, "own_embedding": True, "norm_before_fc": True}),
    "eagle": ("eagle", {}),
    "medusa": ("medusa", {"depth": 3}),
    "medusa-small": ("medusa", {"depth": 2, "layers": 2, "draft_vocab_size": DV}),
    "mlp": ("mlp", {"depth": 3, "tie_weights": True}),
    "mlp-small": ("mlp", {"depth": 3, "draft_vocab_size": DV}),
    "hydra": ("hydra", {"depth": 2}),
    "dflash": ("block", {"depth": 4, "draft_depth": 2, "correction": "none", "taps": [1, 3, 5]}),
    "dflash2": ("block", {"depth": 4, "correction": "selector", "correction_rank": 6, "selector_candidates": 5, "convolution": True}),
    "dspark": ("block", {"depth": 4}),
    "domino": ("block", {"depth": 4, "correction": "recurrent"}),
    "mtp": ("mtp", {"depth": 2}),
    "draft_model": ("draft_model", {"layers": 2}),
    "pard": ("draft_model", {"layers": 2, "parallel": True, "depth": 3}),
    "eagle3-norms": ("eagle3", {"layers": 2, "depth": 2, "norm_before_residual": True, "norm_before_fc": True, "qk_norm": True}),
    "dflash2-causal": ("block", {"depth": 3, "correction": "selector", "convolution": True, "causal": True}),
    "dspark-causal": ("block", {"depth": 3, "causal": True}),
    "mtp-own": ("mtp", {"shared": False}),
}


def make_home(folder: Path, kinds: Iterable[str] = KINDS) -> Path:
    """Save a backbone and heads of every kind, or of these, in a folder."""
    tiny("llama").save_pretrained(folder / "backbone")
    on = load_backbone(str(folder / "backbone"))
    for name in kinds:
        kind, arguments = KINDS[name]
        drafter = random_drafter(kind, on, **arguments)
        for weight in drafter.parameters():  # norms that start as the backbone's, on a probe of it, differ in last bits by the processor
            weight.copy_(weight if weight.dim() > 1 else 1 + 0.1 * torch.randn_like(weight))
        if arguments.get("draft_vocab_size"):
            drafter.use_vocabulary(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:DV])
        drafter.save_pretrained(folder / name)
    return folder


def exported(home: Path, name: str, to: str, out: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """The report, the configuration and the tensors of an export."""
    report = export(Request(str(home / name), to, out, **options))
    weights = next(iter(out.glob("*.safetensors")))
    return report, json.loads((out / "config.json").read_text()), load_file(weights)


def refused(home: Path, name: str, to: str, out: Path, **options: Any) -> str:
    """The message of an export that writes nothing."""
    before = sorted(out.parent.iterdir())
    message = refusal(export, Request(str(home / name), to, out, **options))
    assert sorted(out.parent.iterdir()) == before
    return message
