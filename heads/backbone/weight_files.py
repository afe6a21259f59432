"""Single weights of a checkpoint in safetensors, read by name; nothing else of its files is read.

Weights in 8 or 4 bits are dequantized by the scales beside them. ``weight_scale_inv`` (DeepSeek-V3, 2412.19437, section 3.3) and
``weight_scale`` (compressed-tensors, ModelOpt) are factors of a block, a row or the whole. NVFP4 holds two numbers (E2M1) in a byte, the
first in the low bits, and an FP8 factor for each 16 of them, and one for all: ``weight_scale_2`` multiplies (ModelOpt), and
``weight_global_scale`` divides (compressed-tensors).

Among them are those of multi-token prediction (MTP), which `transformers` leaves out when it loads the model.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.support.errors import UserError, cause
from headstart.support.hub import find_folder, inside, resolve
from headstart.support.json_text import read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of NVFP4 without their sign, which is the highest bit."""
GROUP = 16
"""Numbers of NVFP4 that share a factor."""
BLOCK = (128, 128)
"""Rows and columns that share a factor, where the configuration does not say."""
OTHER_PARTS = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|mtp\w*|encoder|layers|h|blocks)\.")
"""Parts of a model whose norms and tables are not those of its language model as a whole."""


class WeightFiles:
    """The checkpoint at ``path``, a folder or hub id, of which only the index and the files that hold what is read are downloaded."""

    def __init__(self, path: str, quantization: Mapping[str, Any] | None = None) -> None:
        """``quantization``: the ``quantization_config`` of the model's configuration. Raises UserError if there is no checkpoint."""
        self.path, self.quantization = path, quantization or {}
        self.rename: Callable[[str], str] = str
        """What transformers makes of a name in the files."""
        self.read_names: list[str] = []
        """The tensors read so far, by their names in the files."""

    @cached_property
    def _file_of(self) -> dict[str, str]:
        """The file of each tensor, by their names."""
        folder = self._folder(["*.json"])
        if (index := folder / INDEX).is_file():
            listed: dict[str, str] = read_json(index, "fetch the backbone again")["weight_map"]
            return listed
        return {name: path.name for name, path in weight_files(self._folder(["*.json", SINGLE])).items()}

    @cached_property
    def _renamed(self) -> dict[str, list[str]]:
        """The names in the files of weights outside the layers, by transformers' names; several of which it joins the rows."""
        pairs = [(self.rename(key), key) for key in self._file_of if not re.search(r"(^|\.)(layers|h|blocks)\.\d", key)]
        return {name: [key for other, key in pairs if other == name] for name, _ in pairs}

    def _folder(self, files: Sequence[str]) -> Path:
        return find_folder(resolve(self.path), "backbone", files)

    def find(self, name: str) -> str | None:
        """Return the name in the files of a weight that transformers calls ``name``; None if there is none.

        A checkpoint may have it under a name that transformers changes, under another prefix, as those of models with images do, or packed.
        """
        for wanted in (name, f"{name.removesuffix('.weight')}.weight_packed"):
            if wanted in self._file_of:
                return wanted
            if wanted in self._renamed:
                return self._renamed[wanted][0]
            tail = ".".join(wanted.split(".")[-2:]) if "layers." not in wanted else wanted[wanted.index("layers.") :]
            found = [key for key in self._file_of if f".{key}".endswith(f".{tail}")]
            found = [key for key in found if not OTHER_PARTS.search(key.removesuffix(tail))]
            if len(found) == 1:
                return found[0]
        return None

    def read(self, name: str) -> Tensor | None:
        """Return a weight, dequantized to fp32 where it is quantized; None if there is none. Raises UserError if it cannot be read."""
        key = self.find(name)
        if key is None:
            return None
        if len(parts := self._renamed.get(name, [])) > 1:  # as the embedding of Molmo2
            return torch.cat([self._tensor(one) for one in sorted(parts)])
        tensor, stem = self._tensor(key), re.sub(r"weight(_packed)?$", "", key)
        scales = {kind: self._tensor(at) for kind in ("_scale_inv", "_scale", "_scale_2", "_global_scale")
                  if (at := f"{stem}weight{kind}") in self._file_of}  # fmt: skip
        if tensor.dtype == torch.uint8 and "_scale" in scales:
            return _from_nvfp4(tensor, scales)
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            scale = scales.get("_scale_inv", scales.get("_scale"))
            return tensor.float() if scale is None else tensor.float() * self._spread(scale.float(), tensor.shape)
        if not tensor.dtype.is_floating_point:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{key} of {self.path} is {kind}, in a way that is not known (known: floating point, FP8, NVFP4); give the model "
                "before it was quantized as the backbone, which has the same embedding and output layer"
            )
        return tensor

    def _spread(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """Return the factor of every entry of a matrix: one for all, for each row, or for each block."""
        if scale.numel() == 1 or len(shape) == 1:
            return scale.reshape(-1) if scale.numel() > 1 else scale.reshape(())
        if scale.numel() == shape[0]:
            return scale.reshape(-1, 1)
        rows, columns = self.quantization.get("weight_block_size") or BLOCK
        return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]

    def _tensor(self, key: str) -> Tensor:
        name = self._file_of[key]
        file = inside(self._folder(["*.json", name]), name)
        self.read_names.append(key)
        try:
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(key)
                return tensor
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read {key} in {file}: {cause(error, 200)}; fetch the backbone again") from None


def _from_nvfp4(packed: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    pairs = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    scale = scales["_scale"].float()
    scale = scale * scales["_scale_2"].float() if "_scale_2" in scales else scale / scales.get("_global_scale", torch.ones(1)).float()
    return values[pairs.long()] * scale.repeat_interleave(GROUP, -1)[..., : pairs.shape[-1]]


def weight_files(folder: Path) -> dict[str, Path]:
    """Map the name of every tensor in a folder's safetensors files to its file."""
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read {path}: {cause(error, 200)}; fetch the backbone again") from None
    return files


# Multi-token prediction. Tensors are named ``mtp.<module>.{enorm,hnorm,eh_proj,norm}.weight`` and ``mtp.<module>.layer.<Llama's name>``
# here; each `Layout` maps these names to those of a family. Engines read MTP weights from the backbone's checkpoint only.

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
