"""Draft models: ordinary causal models of transformers with the backbone's vocabulary, and PARD's, which name a mask token.

Checkpoints are ordinary folders of transformers, written as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.heads.backbone import smaller
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.checkpoint import METADATA
from headstart.heads.draft_model import DraftModel as Drafter
from headstart.inference.serving.layouts.checkpoint import Checkpoint, Dtype
from headstart.inference.serving.layouts.files import Contents, DamagedError, Files
from headstart.inference.serving.layouts.layout import Counting, Imported, ServedLayout, Sizes, require_shapes
from headstart.inference.serving.layouts.reader.base import Reading
from headstart.inference.serving.layouts.reader.heads import DraftModelReader
from headstart.support.errors import UserError

TEXT = {".json", ".txt", ".model", ".jinja"}
"""Suffixes of the files of a tokenizer."""
MASKS = ("pard_token", "ptd_token_id")
"""Keys of the mask token of a parallel model."""
PARALLEL_DEPTH = 8
"""Tokens that a parallel model drafts where its files do not say; PARD's configurations do not."""


class DraftModel(ServedLayout):
    """Weights, configuration and the backbone's tokenizer."""

    name, title, methods = "draft-model", "draft model", ("draft_model", "pard")
    engines = ("vllm", "sglang", "trtllm", "transformers")
    order = 9

    def lay_out(self, heads: Checkpoint, dtype: Dtype) -> Contents:
        own = {METADATA, "config.json", heads.weights_file}
        files = [file for file in heads.folder.iterdir() if file.is_file() and file.suffix in TEXT and file.name not in own]
        return Contents(*heads.cast(dtype), files={file.name: file.read_bytes() for file in files})

    def check(self, heads: Checkpoint, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Hold the tensors against those of the model's architecture, where weights that are one have their first name."""
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
                model.tie_weights()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"config.json of {heads.path} is no model of transformers: {_line(error)}") from None
        named = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(named.items())}
        shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        require_shapes(Reading(None, config, tensors, shapes=shapes), frozenset(named.keys() - first.values()), heads.path)

    def recognises(self, files: Files) -> bool:
        architectures = files.config.get("architectures") or []
        named = any(str(one).endswith(("ForCausalLM", "LMHeadModel")) for one in architectures)
        return named and len(files.shapes) > 0 and "fc.weight" not in files.shapes

    def sizes(self, files: Files) -> Sizes:
        return Sizes()  # the configuration is that of the draft model

    def read(self, files: Files, on: Sizes, counting: Counting | None = None) -> list[Reading]:
        safe = all(file.suffix == ".safetensors" for file in files.homes.values())
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                str(files.folder), dtype=torch.float32, use_safetensors=safe, output_loading_info=True
            )
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{files.folder} is no model that transformers loads: {_line(error)}") from None
        if report["missing_keys"]:
            lacking = sorted(report["missing_keys"])[0]
            raise DamagedError(f"{files.folder} lacks {lacking}: a tensor is missing (half-written); export it again")
        vocab, tensors = model.get_output_embeddings().weight.shape[0], dict(model.state_dict())
        other = f"another vocabulary: the draft model has {vocab} tokens, the backbone {on.vocab}"
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        options = {"model": model.eval(), "mask": _mask(files.config, MASKS)}
        return [Reading(DraftModelReader, files.config, tensors, (), options, (other,) if vocab != on.vocab else (), shapes=shapes)]

    def imports(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> list[Imported]:
        small = load_backbone(str(files.folder), dtype="auto", device=backbone.device)
        smaller.require_fitting(backbone, small, smaller.find_tokenizers(backbone.name, str(files.folder)))
        notes = [] if small.vocab == backbone.vocab else [f"its vocabulary of {small.vocab} was brought to the backbone's {backbone.vocab}"]
        smaller.resize(small.model, backbone.vocab)
        arguments: dict[str, Any] = {"architecture": smaller.stated_config(small.model.config)}
        if (mask := _mask(files.config, MASKS[:1])) is not None:
            arguments |= {"parallel": True, "mask_token": None if mask == backbone.vocab - 1 else mask, "depth": PARALLEL_DEPTH}
            notes.append(f"drafts in parallel; its files do not say how many tokens, {PARALLEL_DEPTH} here: --depth N for others")
        tensors = Drafter(backbone, Drafter.Config(**arguments), small.model).tensors()
        return [Imported("draft_model", arguments, tensors, notes=tuple(notes))]


def _mask(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
