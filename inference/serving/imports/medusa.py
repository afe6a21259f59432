"""Medusa as FasterDecoding, TGI and vLLM write it: heads of residual blocks, with output layers of their own (v1) or the backbone's (v2).

``[ResBlock] * n`` in FasterDecoding's code repeats one block: its files hold the block n times, or once if the copies were dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.serving.imports.foreign import Foreign
from headstart.inference.serving.imports.reading import Counting, Reading, Sizes
from headstart.inference.serving.imports.vocabulary import with_vocabulary
from headstart.support.errors import UserError

NAME = "Medusa"
PREFIXES = ("medusa_heads.", "medusa_head.", "heads.")
COUNTS = {"layers": ("medusa_num_layers", "num_hidden_layers"), "heads": ("medusa_num_heads", "num_heads")}
BLOCK = re.compile(r"(?:blocks\.(\d+)\.layers\.(\d+)|(\d+)\.(\d+)\.linear)\.(weight|bias)")
OUTPUT = re.compile(r"(?:lm_heads\.(\d+)|(\d+)\.(\d+))\.weight")


def recognises(foreign: Foreign) -> bool:
    return any(key in foreign.config for key in ("medusa_num_heads", "medusa_num_layers")) or foreign.config.get("model_type") == "medusa"


def sizes(foreign: Foreign) -> Sizes:
    block = next((shape for name, shape in foreign.shapes.items() if BLOCK.fullmatch(_bare(name)) and len(shape) == 2), None)
    return Sizes(block[0] if block else None, foreign.config.get("vocab_size"))


def readings(foreign: Foreign, backbone: Backbone, counting: Counting | None) -> list[Reading]:
    path, config = foreign.path, foreign.config
    if "token_map" in foreign.shapes:
        raise UserError(f"{path} has a truncated vocabulary ({foreign.where('token_map')}), which vLLM fails on and which is not read")
    tensors, notes = _renamed(foreign), []
    blocks = [match for name in tensors if (match := BLOCK.fullmatch(name))]
    heads = {int(match[3]) for match in blocks}
    if not blocks or heads != set(range(len(heads))):
        raise UserError(f"{path} has no Medusa heads 0 to n - 1: blocks of the heads {sorted(heads)}")
    depth, stored = len(heads), 1 + max(int(match[4]) for match in blocks)
    if (stated := _stated(config, "heads")) not in (None, depth):
        notes.append(f"config.json states {stated} heads, the file holds {depth}: all {depth} are used")
    layers = stored
    if stored == 1 and (count := _stated(config, "layers") or 1) > 1 and "0.1.weight" not in tensors:
        layers = count
        tensors |= {name.replace(".0.", f".{i}.", 1): tensor for name, tensor in tensors.items() if BLOCK.fullmatch(name)
                    for i in range(1, layers)}  # fmt: skip
        notes.append(f"config.json states {layers} blocks a head and the file holds one, which FasterDecoding's code repeats")
    _complete(tensors, depth, layers, backbone, config, notes)
    outputs = [f"{k}.{layers}.weight" for k in range(depth)]
    tensors, size, of_vocabulary = with_vocabulary(tensors, outputs, backbone.vocab, path)
    arguments = {"depth": depth, "layers": layers, "draft_vocab_size": size}
    return [Reading("medusa", arguments, tensors, notes=(*notes, *of_vocabulary))]


def _stated(config: Mapping[str, Any], what: str) -> int | None:
    return next((config[key] for key in COUNTS[what] if isinstance(config.get(key), int)), None)


def _bare(name: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def _renamed(foreign: Foreign) -> dict[str, Tensor]:
    """Return the tensors under FasterDecoding's names, which are Headstart's; output layers of vLLM's layout as ``k.lm``."""
    tensors = {}
    for name, tensor in foreign.read(foreign.shapes).items():
        bare = _bare(name)
        if match := BLOCK.fullmatch(bare):
            bare = f"{match[1] or match[3]}.{match[2] or match[4]}.linear.{match[5]}"
        elif (match := OUTPUT.fullmatch(bare)) and match[1]:
            bare = f"{match[1]}.lm"
        tensors[bare] = tensor
    return tensors


def _complete(
    tensors: dict[str, Tensor], depth: int, layers: int, backbone: Backbone, config: Mapping[str, Any], notes: list[str]
) -> None:
    """Add output layers and biases that a layout leaves out."""
    for k in range(depth):
        if (own := tensors.pop(f"{k}.lm", None)) is not None:
            tensors[f"{k}.{layers}.weight"] = own
    outputs = [f"{k}.{layers}.weight" for k in range(depth)]
    if config.get("original_lm_head") and outputs[0] in tensors:
        tensors |= {name: tensors[outputs[0]] for name in outputs}
        notes.append("original_lm_head: the first output layer is that of all heads")
    elif not any(name in tensors for name in outputs):
        tensors |= dict.fromkeys(outputs, backbone.unembed.weight.detach().cpu())
        notes.append("without output layers of their own (version 2): the heads start with copies of the backbone's")
    biases = [f"{k}.{i}.linear.bias" for k in range(depth) for i in range(layers)]
    if not any(name in tensors for name in biases):
        tensors |= {name: torch.zeros(backbone.dim) for name in biases}
        notes.append("blocks without biases, which are zero here")
