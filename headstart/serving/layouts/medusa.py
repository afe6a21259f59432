"""Heads of linear layers.

Medusa as FasterDecoding, TGI and vLLM write it: heads of residual blocks, with output layers of their own (v1) or the backbone's (v2).

``[ResBlock] * n`` in FasterDecoding's code repeats one block: its files hold the block n times, or once if the copies were dropped. An
export is written twice: ``medusa_lm_head.safetensors`` for vLLM up to 0.32 and TGI, ``medusa_lm_head.pt`` for FasterDecoding and the
TensorRT backend of TensorRT-LLM up to 1.2.1.

Hydra in the paper's own code (2402.05109): ``hydra_mlp``, ``hydra_lm_head`` and, for Hydra++, ``prefix_embeding_layer``. No engine loads
Hydra heads, so they are read to be imported, and nothing is written.

IBM's accelerators, MLP speculators (2404.19124), with weights of each depth or shared ones (``tie_weights``). TGI and vLLM up to 0.9.2 load
the checkpoint as it is, over the whole vocabulary.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.mlp import PREFIX as MLP_PREFIX
from headstart.serving.layouts.files import Files, write_folder
from headstart.serving.layouts.layout import Checkpoint, Counting, Heads, Layout, whole_number
from headstart.serving.layouts.parts import over_whole_vocabulary, with_vocabulary
from headstart.support.errors import UserError

PREFIX = re.compile(r"^(medusa_heads|medusa_head|heads)\.")
HEADS, LAYERS = ("medusa_num_heads", "num_heads"), ("medusa_num_layers", "num_hidden_layers")
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
VLLM_BLOCK, VLLM_OUTPUT = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), re.compile(r"lm_heads\.(\d+)\.weight")


class Medusa(Layout):
    """FasterDecoding's names; no ``architectures``, with which TGI refuses the directory."""

    name, title, methods, engines = "medusa", "Medusa", ("medusa",), ("vllm", "tgi", "trtllm")

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        config, tensors, notes = over_whole_vocabulary(heads, f".{heads.config['medusa_num_layers']}.weight")
        write_folder(folder, config, tensors, "medusa_lm_head.safetensors", pickled="medusa_lm_head.pt")
        return [*notes, "the weights are also written as medusa_lm_head.pt, for FasterDecoding's code"]

    def recognises(self, files: Files) -> bool:
        return any(key in files.config for key in (HEADS[0], LAYERS[0])) or files.config.get("model_type") == "medusa"

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        path, config = files.path, files.config
        if "token_map" in files.shapes:
            fault = f"token_map {list(files.shapes['token_map'])} in {path}"
            raise UserError(f"{path} has a truncated vocabulary ({fault}), which vLLM fails on and which is not read")
        tensors = {_renamed(name): tensor for name, tensor in files.read().items()}
        blocks = [match for name in tensors if (match := BLOCK.fullmatch(name))]
        numbers = {int(match[1]) for match in blocks}
        depth, layers = len(numbers), 1 + max((int(match[2]) for match in blocks), default=0)
        if not blocks or numbers != set(range(depth)):
            raise UserError(f"{path} has no Medusa heads 0 to n - 1: blocks of the heads {sorted(numbers)}")
        heads = Heads("medusa", {"depth": depth, "layers": layers}, tensors)
        stated = _stated(config, LAYERS) or layers
        if layers == 1 and stated > 1 and "0.1.weight" not in tensors:
            repeated = {name.replace(".0.", f".{i}.", 1): tensor for name, tensor in tensors.items() if BLOCK.fullmatch(name)
                        for i in range(1, stated)}  # fmt: skip
            layers, note = stated, f"config.json states {stated} blocks a head and the file holds one, which FasterDecoding's code repeats"
            heads = heads.plus({"layers": layers}, repeated, [note])
        elif stated != layers:
            heads = heads.plus(remarks=[f"config.json states {stated} blocks per head, the file holds {layers}"])
        if (count := _stated(config, HEADS) or depth) != depth:
            heads = heads.plus(remarks=[f"config.json states {count} heads, the file holds {depth}: all {depth} are used"])
        if not config.get("medusa_fc_bias") and any(bool(x.any()) for name, x in tensors.items() if name.endswith("linear.bias")):
            heads = heads.plus(remarks=["medusa_fc_bias is not true in config.json, so vLLM drops the biases"])
        outputs = {f"{k}.lm": f"{k}.{layers}.weight" for k in range(depth)}
        renamed = {name: tensors[theirs] for theirs, name in outputs.items() if theirs in tensors}
        heads = _completed(heads.without(outputs).plus(tensors=renamed), config, [*outputs.values()], backbone)
        return with_vocabulary(heads, [*outputs.values()], backbone.vocab, path)


def _completed(heads: Heads, config: Mapping[str, Any], outputs: list[str], backbone: Backbone) -> Heads:
    """Add the output layers and biases that files of some kinds share or lack."""
    if config.get("original_lm_head") and outputs[0] in heads.tensors:
        note = "original_lm_head: the first output layer is that of all heads"
        heads = heads.plus(tensors=dict.fromkeys(outputs, heads.tensors[outputs[0]]), notes=[note])
    elif not any(name in heads.tensors for name in outputs):
        note = "without output layers of their own (version 2): the heads start with copies of the backbone's"
        heads = heads.plus(tensors=dict.fromkeys(outputs, backbone.unembed.weight.detach().cpu()), notes=[note])
    if any(name.endswith(".linear.bias") for name in heads.tensors):
        return heads
    zeros = {name.replace("weight", "bias"): torch.zeros(backbone.dim) for name in heads.tensors if name.endswith(".linear.weight")}
    return heads.plus(tensors=zeros, notes=["blocks without biases, which are zero here"])


def _stated(config: Mapping[str, Any], keys: tuple[str, str]) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)


def _renamed(name: str) -> str:
    """Return FasterDecoding's name, which is Headstart's, for vLLM's; its output layers are ``k.lm``."""
    return VLLM_OUTPUT.sub(r"\1.lm", VLLM_BLOCK.sub(r"\1.\2.linear.\3", PREFIX.sub("", name)))


ARCHITECTURES = {"mlp": False, "prefix-mlp": True}
"""Head architectures, and whether they have a prefix layer."""
UNUSED = "prefix_embeding_layer.embed_tokens.weight"
"""The prefix layer is a whole Llama model, which is given hidden states: its embedding is not used."""
HYDRA_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")


class Hydra(Layout):
    """Blocks are counted with dropout layers where there is a prefix layer."""

    title = "Hydra"

    def recognises(self, files: Files) -> bool:
        return "hydra_head_arch" in files.config or bool(files.names("hydra_mlp."))

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        path, config = files.path, files.config
        kind = config.get("hydra_head_arch", "prefix-mlp" if files.names("prefix_embeding_layer.") else "mlp")
        if kind not in ARCHITECTURES:
            raise UserError(f"{path} has heads of hydra_head_arch {kind!r}; hydra heads here are {' or '.join(ARCHITECTURES)}")
        if not config.get("grounded_heads", True):
            raise UserError(f"{path} has heads that do not read the drafted tokens (grounded_heads false); hydra heads here do")
        if config.get("hidden_state_offset", 0) != 0:
            raise UserError(f"{path} has hidden_state_offset {config['hidden_state_offset']}; hydra heads here read the last hidden state")
        blocks = [(int(match[1]), int(match[2])) for name in files.shapes if (match := HYDRA_BLOCK.fullmatch(name))]
        if not blocks:
            raise UserError(f"{path} has no tensors hydra_mlp.0.0.linear.weight and so on, of Hydra heads")
        prefix, depth = ARCHITECTURES[kind], 1 + max(head for head, _ in blocks)
        stored = 1 + max(block for _, block in blocks) // (2 if prefix else 1)
        tensors = files.read(name for name in files.shapes if name != UNUSED)
        heads = Heads("hydra", {"depth": depth, "layers": stored, "prefix_attention": prefix}, tensors)
        if (stated := config.get("hydra_num_heads")) not in (None, depth):
            heads = heads.plus(notes=[f"config.json states {stated} heads, the file holds {depth}: all {depth} are used"])
        layers = config.get("hydra_num_layers") or stored
        if layers > stored == 2:  # the file holds the repeated block once
            step, first = (2, 3) if prefix else (1, 1)
            second = {name: x for name, x in tensors.items() if re.match(rf"hydra_mlp\.\d+\.{first}\.linear\.", name)}
            repeated = {name.replace(f".{first}.linear.", f".{first + step * i}.linear."): tensor for name, tensor in second.items()
                        for i in range(1, layers - 1)}  # fmt: skip
            note = f"config.json states {layers} blocks a head and the file holds two, of which the code repeats the second"
            heads = heads.plus({"layers": layers}, repeated, [note])
        outputs = [f"hydra_lm_head.{k}.{'1.' if prefix else ''}{part}" for k in range(depth) for part in ("weight", "bias")]
        return with_vocabulary(heads, outputs, backbone.vocab, path)


SHARED = re.compile(re.escape(MLP_PREFIX) + r"(emb|proj|ln|head)\.(\d+)\.(weight|bias)")


class MlpSpeculator(Layout):
    """A stack of linear layers, embeddings and norms, one of each a depth."""

    name, title, methods, engines = "mlp-speculator", "IBM accelerator (MLP speculator)", ("mlp",), ("vllm", "tgi")

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        config, tensors, notes = over_whole_vocabulary(heads, ".head.")
        write_folder(folder, config, tensors)
        return notes

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        return {} if heads.config["tie_weights"] else {"tgi": "it reads speculators with drafter.tie_weights only"}

    def recognises(self, files: Files) -> bool:
        return files.config.get("model_type") == "mlp_speculator" or bool(files.names(f"{MLP_PREFIX}proj."))

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        path, config = files.path, files.config
        if config.get("n_predict") is None:
            raise UserError(f"{path}: config.json does not say n_predict, the number of tokens that it drafts; add it")
        depth, tied = whole_number(config, "n_predict", path), bool(config.get("tie_weights", False))
        tensors = {name if name in ("d2t", "t2d") else MLP_PREFIX + name.removeprefix(MLP_PREFIX): x for name, x in files.read().items()}
        for name in sorted(tensors) if tied else ():  # files may hold the shared weights once or once for every depth
            match = SHARED.fullmatch(name)
            first = 1 if match and match[1] == "proj" else 0
            if match and int(match[2]) > first:
                shared = tensors.get(f"{MLP_PREFIX}{match[1]}.{first}.{match[3]}")
                if shared is None or not shared.equal(tensors[name]):
                    raise UserError(f"{path} says tie_weights, but {name} differs from the {match[1]} of other depths; set it to false")
                del tensors[name]
        inner = config.get("inner_dim") or config.get("emb_dim") or backbone.dim  # 0: the width of the backbone
        arguments = {
            "depth": depth,
            "inner_dim": None if inner == backbone.dim else inner,
            "tie_weights": tied,
            "scale_input": bool(config.get("scale_input", False)),
        }
        heads = Heads("mlp", arguments, tensors)
        return with_vocabulary(heads, [f"{MLP_PREFIX}head.{k}.weight" for k in range(1 if tied else depth)], backbone.vocab, path)
