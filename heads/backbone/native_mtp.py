"""Multi-token prediction weights inside a backbone's checkpoint, which `transformers` leaves out when it loads the model.

Tensors are named ``mtp.<module>.{enorm,hnorm,eh_proj,norm}.weight`` and ``mtp.<module>.layer.<Llama's name>`` here; each `Layout` maps
these names to those of a family. Engines read MTP weights from the backbone's checkpoint only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.weight_files import weight_files
from headstart.support.errors import UserError
from headstart.support.hub import find_folder, resolve

SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the backbone's embedding and output layer that some checkpoints hold for every module."""


@dataclass(frozen=True)
class Layout:
    """The names of MTP weights in a checkpoint, and what engines compute with them."""

    name: str
    layer: str
    """Prefix of a module's decoder layer: ``{module}`` is its number, ``{layer}`` the number plus that of the backbone's layers."""
    names: Mapping[str, str]
    """Full name of each of the module's other weights, without ``.weight``."""
    count_key: str
    """Key of the configuration that states the number of modules."""
    architecture: str
    """The class of the modules in vLLM."""
    single: bool = False
    """The names allow one module only."""
    hidden_first: bool = False
    """The projection's input is the hidden state, then the embedding."""
    zero_first: bool = True
    """The first position's embedding counts as zero."""
    attention_bias: bool = False
    gated: bool = False
    """The decoder layer is a `GatedLayer`."""

    def native(self, name: str, num_layers: int) -> str:
        """Return the name in the checkpoint of a backbone with ``num_layers`` layers."""
        _, module, rest = name.split(".", 2)
        numbers = {"module": int(module), "layer": num_layers + int(module)}
        if rest.startswith("layer."):
            return self.layer.format(**numbers) + rest.removeprefix("layer.")
        return self.names[rest.removesuffix(".weight")].format(**numbers) + ".weight"


def _under(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {ours: prefix + theirs for ours, theirs in names.items()}


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            "deepseek",
            "model.layers.{layer}.",
            _under("model.layers.{layer}.", {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}),
            "num_nextn_predict_layers",
            "DeepSeekMTPModel",
        ),
        Layout(
            "mimo",
            "model.mtp_layers.{module}.",
            _under(
                "model.mtp_layers.{module}.",
                {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"},
            ),
            "num_nextn_predict_layers",
            "MiMoMTPModel",
            hidden_first=True,
            attention_bias=True,
        ),
        Layout(
            "qwen3_5",
            "mtp.layers.{module}.",
            _under("mtp.", {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}),
            "mtp_num_hidden_layers",
            "Qwen3_5MTP",
            single=True,
            zero_first=False,
            gated=True,
        ),
    )
}


def checkpoint_folder(backbone: Backbone) -> Path:
    """Return the folder of the backbone's checkpoint, downloaded if it is on the hub. Raises UserError if it has none."""
    if backbone.gguf is not None:
        raise UserError(f"MTP weights are read from safetensors, and {backbone.name} is a GGUF file: set drafter.native=false")
    return find_folder(resolve(backbone.name), "checkpoint of the backbone", ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"])


def find_native(backbone: Backbone) -> str:
    """Return the name of the layout of the MTP weights in the backbone's checkpoint. Raises UserError if there are none."""
    folder = checkpoint_folder(backbone)
    files = weight_files(folder)
    first = {name: layout.native("mtp.0.eh_proj.weight", backbone.num_layers) for name, layout in LAYOUTS.items()}
    for name, wanted in first.items():
        if wanted in files:
            return name
    raise UserError(
        f"no MTP weights in the checkpoint {folder}: none of {', '.join(first.values())} in its safetensors files; "
        "set drafter.native=false, or give a backbone that ships them"
    )


def read_native(backbone: Backbone, layout_name: str, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Read the MTP weights of these names and shapes. Raises UserError if any is missing or misshapen, or if a module has others too."""
    layout, folder = LAYOUTS[layout_name], checkpoint_folder(backbone)
    files = weight_files(folder)
    wanted = {layout.native(name, backbone.num_layers): name for name in shapes}
    _require_modules(layout, backbone, wanted, files, folder)
    tensors = {}
    for native, name in wanted.items():
        with safe_open(files[native], framework="pt") as file:
            tensor = file.get_tensor(native)
        if tensor.shape != shapes[name]:
            raise UserError(
                f"{native} in {folder} is {list(tensor.shape)}; a {layout_name} module of this backbone has {list(shapes[name])}: "
                "set drafter.native=false, or give a backbone whose MTP weights fit its configuration"
            )
        tensors[name] = tensor
    return tensors


def _require_modules(layout: Layout, backbone: Backbone, wanted: Mapping[str, str], files: Mapping[str, Path], folder: Path) -> None:
    """Raise UserError unless the checkpoint holds exactly the wanted weights of each wanted module."""
    count, L = len({name.split(".")[1] for name in wanted.values()}), backbone.num_layers
    held = 0
    while layout.native(f"mtp.{held}.layer.input_layernorm.weight", L) in files:
        held += 1
    if held < count:
        name = layout.native(f"mtp.{held}.layer.input_layernorm.weight", L)
        advice = f"set drafter.depth={held}, or drafter.shared=true" if held else "set drafter.native=false"
        raise UserError(f"{count} MTP modules wanted of {folder}, which holds {held} (no {name}): {advice}")
    prefixes = tuple(layout.native(f"mtp.{module}.layer.", L) for module in range(count))
    own = {name for name in files if name.startswith(prefixes) and not name.endswith(SHARED)}
    if odd := sorted({*wanted} - {*files}) or sorted(own - {*wanted}):
        raise UserError(
            f"the MTP layer in {folder} ({layout.name} layout) is not a dense one of a supported kind: {odd[0]} is "
            f"{'there' if odd[0] in files else 'missing'}; mixtures of experts and latent attention are not supported: "
            "set drafter.native=false"
        )
