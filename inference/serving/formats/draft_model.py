"""A draft model as an ordinary folder of transformers: the checkpoint as it is."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.heads.checkpoint import METADATA
from headstart.inference.serving.formats.format import Format
from headstart.inference.serving.layout import Layout
from headstart.inference.serving.shapes import Shapes, require_shapes
from headstart.inference.serving.trained import Dtype, Trained
from headstart.support.errors import UserError

TEXT = {".json", ".txt", ".model", ".jinja"}
"""Suffixes of the files of a tokenizer."""


class DraftModelFormat(Format):
    """Weights, configuration and the backbone's tokenizer."""

    methods = ("draft_model", "pard")
    engines = ("vllm", "sglang", "trtllm", "transformers")

    def lay_out(self, trained: Trained, dtype: Dtype) -> Layout:
        require_shapes(trained.tensors, *_shapes(trained), trained.path)
        config, tensors = trained.cast(dtype)
        own = {METADATA, "config.json", trained.weights_file}
        files = [file for file in trained.folder.iterdir() if file.is_file() and file.suffix in TEXT and file.name not in own]
        return Layout(config, tensors, "model.safetensors", {file.name: file.read_bytes() for file in files})


def _shapes(trained: Trained) -> tuple[Shapes, Shapes]:
    """Return the tensors of the model's architecture: those that a file must hold, and further names of weights that are shared."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**trained.config))
            model.tie_weights()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"config.json of {trained.path} is no model of transformers: {' '.join(str(error).split())[:200]}") from None
    named = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(named.items())}
    shapes = {name: list(tensor.shape) for name, tensor in named.items()}
    needed = {name: shapes[name] for name in first.values()}
    return needed, {name: shape for name, shape in shapes.items() if name not in needed}
