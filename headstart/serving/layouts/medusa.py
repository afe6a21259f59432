"""Medusa as FasterDecoding, TGI and vLLM write it: heads of residual blocks, with output layers of their own (v1) or the backbone's (v2).

``[ResBlock] * n`` in FasterDecoding's code repeats one block: its files hold the block n times, or once if the copies were dropped. An
export is written twice: ``medusa_lm_head.safetensors`` for vLLM up to 0.32 and TGI, ``medusa_lm_head.pt`` for FasterDecoding and the
TensorRT backend of TensorRT-LLM up to 1.2.1.

Hydra in the paper's own code (2402.05109): ``hydra_mlp``, ``hydra_lm_head`` and, for Hydra++, ``prefix_embeding_layer``.

No engine loads Hydra heads, so they are read to be imported, and nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.serving.layouts.checkpoint import Checkpoint, Dtype
from headstart.serving.layouts.files import Contents, Files
from headstart.serving.layouts.layout import Counting, Heads, Layout, ServedLayout
from headstart.serving.layouts.parts import WHOLE, over_whole_vocabulary, with_vocabulary
from headstart.support.errors import UserError

PREFIXES = ("medusa_heads.", "medusa_head.", "heads.")
HEADS, LAYERS = ("medusa_num_heads", "num_heads"), ("medusa_num_layers", "num_hidden_layers")
BLOCK = re.compile(r"(?:blocks\.(\d+)\.layers\.(\d+)|(\d+)\.(\d+)\.linear)\.(weight|bias)")
OUTPUT = re.compile(r"lm_heads\.(\d+)\.weight")


class Medusa(ServedLayout):
    """FasterDecoding's names; no ``architectures``, with which TGI refuses the directory."""

    name, title, methods, engines = "medusa", "Medusa", ("medusa",), ("vllm", "tgi", "trtllm")
    order = 1

    def lay_out(self, heads: Checkpoint, dtype: Dtype) -> Contents:
        config, tensors = heads.cast(dtype)
        stated = {key: value for key, value in config.items() if key != "draft_vocab_size"} | {"base_model_name_or_path": heads.served}
        whole = over_whole_vocabulary(tensors, f".{config['medusa_num_layers']}.weight", config["vocab_size"])
        return Contents(stated, whole, "medusa_lm_head.safetensors", pickled_file="medusa_lm_head.pt")

    def notes(self, heads: Checkpoint) -> list[str]:
        copy = "the weights are also written as medusa_lm_head.pt, for FasterDecoding's code"
        return [WHOLE, copy] if "t2d" in heads.tensors else [copy]

    def recognises(self, files: Files) -> bool:
        return any(key in files.config for key in (HEADS[0], LAYERS[0])) or files.config.get("model_type") == "medusa"

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> list[Heads]:
        path, config = files.path, files.config
        if "token_map" in files.shapes:
            fault = f"token_map {list(files.shapes['token_map'])} in {path}"
            raise UserError(f"{path} has a truncated vocabulary ({fault}), which vLLM fails on and which is not read")
        tensors = {_renamed(_bare(name)): tensor for name, tensor in files.read().items()}
        blocks = [match for name in tensors if (match := BLOCK.fullmatch(name))]
        heads = {int(match[3]) for match in blocks}
        if not blocks or heads != set(range(len(heads))):
            raise UserError(f"{path} has no Medusa heads 0 to n - 1: blocks of the heads {sorted(heads)}")
        depth, layers, notes = len(heads), 1 + max(int(match[4]) for match in blocks), list[str]()
        stated = _stated(config, LAYERS) or layers
        remarks = [f"config.json states {stated} blocks per head, the file holds {layers}"] if stated != layers else []
        if layers == 1 and stated > 1 and "0.1.weight" not in tensors:
            remarks, layers = [], stated
            tensors |= {name.replace(".0.", f".{i}.", 1): tensor for name, tensor in tensors.items() if BLOCK.fullmatch(name)
                        for i in range(1, layers)}  # fmt: skip
            notes.append(f"config.json states {layers} blocks a head and the file holds one, which FasterDecoding's code repeats")
        if (count := _stated(config, HEADS) or depth) != depth:
            remarks.append(f"config.json states {count} heads, the file holds {depth}: all {depth} are used")
        if not config.get("medusa_fc_bias") and any(bool(x.any()) for name, x in tensors.items() if name.endswith("linear.bias")):
            remarks.append("medusa_fc_bias is not true in config.json, so vLLM drops the biases")
        outputs = [f"{k}.{layers}.weight" for k in range(depth)]
        tensors |= {outputs[k]: tensors.pop(f"{k}.lm") for k in heads if f"{k}.lm" in tensors}
        notes += _complete(tensors, config, outputs, [f"{k}.{i}.linear.bias" for k in range(depth) for i in range(layers)], backbone)
        tensors, size, of_vocabulary, wrong = with_vocabulary(tensors, outputs, backbone.vocab, path)
        arguments = {"depth": depth, "layers": layers, "draft_vocab_size": size}
        return [Heads("medusa", arguments, tensors, notes=(*notes, *of_vocabulary), remarks=(*remarks, *wrong))]


def _complete(
    tensors: dict[str, Tensor], config: Mapping[str, Any], outputs: list[str], biases: list[str], backbone: Backbone
) -> list[str]:
    """Add the output layers and biases that files of some kinds share or lack; returns notes."""
    notes = []
    if config.get("original_lm_head") and outputs[0] in tensors:
        tensors |= {name: tensors[outputs[0]] for name in outputs}
        notes.append("original_lm_head: the first output layer is that of all heads")
    elif not any(name in tensors for name in outputs):
        tensors |= dict.fromkeys(outputs, backbone.unembed.weight.detach().cpu())
        notes.append("without output layers of their own (version 2): the heads start with copies of the backbone's")
    if not any(name in tensors for name in biases):
        tensors |= {name: torch.zeros(backbone.dim) for name in biases}
        notes.append("blocks without biases, which are zero here")
    return notes


def _stated(config: Mapping[str, Any], keys: tuple[str, str]) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)


def _bare(name: str) -> str:
    return name.removeprefix(next((prefix for prefix in PREFIXES if name.startswith(prefix)), ""))


def _renamed(name: str) -> str:
    """Return FasterDecoding's name, which is Headstart's, for vLLM's; its output layers are ``k.lm``."""
    if match := BLOCK.fullmatch(name):
        return f"{match[1] or match[3]}.{match[2] or match[4]}.linear.{match[5]}"
    match = OUTPUT.fullmatch(name)
    return f"{match[1]}.lm" if match else name


ARCHITECTURES = {"mlp": False, "prefix-mlp": True}
"""Head architectures, and whether they have a prefix layer."""
UNUSED = "prefix_embeding_layer.embed_tokens.weight"
"""The prefix layer is a whole Llama model, which is given hidden states: its embedding is not used."""
HYDRA_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")


class Hydra(Layout):
    """Blocks are counted with dropout layers where there is a prefix layer."""

    title = "Hydra"
    order = 3

    def recognises(self, files: Files) -> bool:
        return "hydra_head_arch" in files.config or bool(files.names("hydra_mlp."))

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> list[Heads]:
        path, config = files.path, files.config
        kind = config.get("hydra_head_arch", "prefix-mlp" if files.names("prefix_embeding_layer.") else "mlp")
        if kind not in ARCHITECTURES:
            raise UserError(f"{path} has heads of hydra_head_arch {kind!r}; hydra heads here are {' or '.join(ARCHITECTURES)}")
        if not config.get("grounded_heads", True):
            raise UserError(f"{path} has heads that do not read the drafted tokens (grounded_heads false); hydra heads here do")
        if config.get("hidden_state_offset", 0) != 0:
            raise UserError(f"{path} has hidden_state_offset {config['hidden_state_offset']}; hydra heads here read the last hidden state")
        prefix, notes = ARCHITECTURES[kind], []
        blocks = [(int(match[1]), int(match[2])) for name in files.shapes if (match := HYDRA_BLOCK.fullmatch(name))]
        if not blocks:
            raise UserError(f"{path} has no tensors hydra_mlp.0.0.linear.weight and so on, of Hydra heads")
        depth = 1 + max(head for head, _ in blocks)
        stored = 1 + max(block for _, block in blocks) // (2 if prefix else 1)
        if (stated := config.get("hydra_num_heads")) not in (None, depth):
            notes.append(f"config.json states {stated} heads, the file holds {depth}: all {depth} are used")
        tensors = files.read(name for name in files.shapes if name != UNUSED)
        layers = config.get("hydra_num_layers") or stored
        if layers > stored == 2:  # the file holds the repeated block once
            step, first = (2, 3) if prefix else (1, 1)
            for name in [name for name in tensors if re.match(rf"hydra_mlp\.\d+\.{first}\.linear\.", name)]:
                head, part = name.split(".")[1], name.rpartition(".")[2]
                tensors |= {f"hydra_mlp.{head}.{first + step * i}.linear.{part}": tensors[name] for i in range(1, layers - 1)}
            notes.append(f"config.json states {layers} blocks a head and the file holds two, of which the code repeats the second")
        else:
            layers = stored
        outputs = [f"hydra_lm_head.{k}.{'1.' if prefix else ''}{part}" for k in range(depth) for part in ("weight", "bias")]
        tensors, size, of_vocabulary, wrong = with_vocabulary(tensors, outputs, backbone.vocab, path)
        arguments = {"depth": depth, "layers": layers, "prefix_attention": prefix, "draft_vocab_size": size}
        return [Heads("hydra", arguments, tensors, notes=(*notes, *of_vocabulary), remarks=tuple(wrong))]
