"""LoRA (2106.09685) on a trained drafter: its weights are frozen, low-rank adapters on its linear layers are trained.

PEFT replaces the linear layers of the drafter in place. State dicts stay those of the drafter's own weights under their own names, so
`Drafter.tensors` and `load_tensors` read and write the weights without the adapter; the adapter's weights are `Lora.weights`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from headstart.heads.backbone.adapter import ADAPTER_WEIGHTS, require_peft
from headstart.heads.base import Drafter
from headstart.support.errors import UserError

ALL_LINEAR = "all-linear"
INFIX, NAME = ".lora_", ".default."
"""Parts of the adapter's parameter names in PEFT: what marks them, and the adapter's name, which files leave out."""
BASE_LAYER = "base_layer."
"""Prefix that PEFT gives to the parameters of a layer it wraps."""
FILE_PREFIX = "base_model.model."
"""Prefix of module names in PEFT's files."""


class Lora:
    """A LoRA adapter on the linear layers of a drafter."""

    def __init__(self, drafter: Drafter, config: Any, names: list[str]) -> None:
        """``config`` is PEFT's; the layers ``names`` are replaced."""
        holder = nn.Module()  # PEFT would take the drafter's ``config`` for a model's
        holder.add_module("drafter", drafter)
        config.target_modules = "|".join(re.escape(f"drafter.{name}") for name in names)
        require_peft().inject_adapter_in_model(config, holder)
        config.target_modules = sorted(names)
        self.drafter, self.config = drafter, config
        self.layers: dict[str, Any] = {name: drafter.get_submodule(name) for name in names}
        for name, weight in drafter.named_parameters():
            weight.requires_grad_(INFIX in name)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The adapter's weights by their names in the drafter; new objects once the drafter is sharded."""
        return {name: weight for name, weight in self.drafter.named_parameters() if INFIX in name}

    def save(self, folder: Path) -> None:
        """Write the adapter in PEFT's format."""
        self.config.save_pretrained(str(folder))
        tensors = {FILE_PREFIX + name.replace(NAME, "."): weight.detach().cpu().contiguous() for name, weight in self.weights.items()}
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_WEIGHTS).chmod((folder / "adapter_config.json").stat().st_mode)  # safetensors creates it with mode 600

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights by the names of `weights`. Raises ValueError if a name or shape differs."""
        weights = self.weights
        if tensors.keys() != weights.keys():
            raise ValueError(f"it has other tensors, such as {sorted(tensors.keys() ^ weights.keys())[0]}")
        for name, weight in weights.items():
            if tensors[name].shape != weight.shape:
                raise ValueError(f"{name} is {list(tensors[name].shape)}, not {list(weight.shape)}")
            weight.copy_(tensors[name])


def add_lora(drafter: Drafter, rank: int, alpha: float, dropout: float = 0.0, target_modules: str | Sequence[str] = ALL_LINEAR) -> None:
    """Attach a new, trainable adapter, which starts as the identity, and freeze the drafter's weights.

    ``target_modules``: "all-linear" (all but the output layers), a regular expression, or a list of module names or their endings.
    Raises UserError if PEFT is not installed or the drafter has no such linear layers.
    """
    names = _targets(drafter, target_modules)
    config = require_peft().LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout)
    _attach(drafter, config, names)


def lora_weights(drafter: Drafter) -> Mapping[str, Tensor]:
    """Return the adapter's weights by name; none if the drafter has no adapter."""
    return {} if drafter.lora is None else drafter.lora.weights


@torch.no_grad()
def merged(drafter: Drafter) -> Drafter:
    """Return a drafter without adapter whose weights have the adapter added: a copy, or ``drafter`` itself if it has none."""
    if drafter.lora is None:
        return drafter
    with no_init_weights():
        copy = type(drafter)(drafter.backbone, drafter.config)
    copy.load_tensors(drafter.tensors())
    copy.to(next(iter(drafter.lora.weights.values())).device)
    for name, layer in drafter.lora.layers.items():
        copy.get_parameter(f"{name}.weight").add_(layer.get_delta_weight(NAME.strip(".")))
    copy.depth, copy.depth_is_set = drafter.depth, drafter.depth_is_set
    return copy.train(drafter.training)


def merge_saved(drafter: Drafter, folder: Path) -> Drafter:
    """Return the drafter with the adapter saved in ``folder`` added to its weights.

    Raises UserError if PEFT is not installed, or if the adapter is damaged or does not fit.
    """
    peft = require_peft()
    try:
        config = peft.LoraConfig.from_pretrained(str(folder))
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        _attach(drafter, config, [str(name) for name in config.target_modules])
        assert drafter.lora is not None
        drafter.lora.load({re.sub(r"(\.lora_\w+)\.", rf"\1{NAME}", name.removeprefix(FILE_PREFIX)): tensors[name] for name in tensors})
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        cause = " ".join(str(error).split())[:200]
        name = type(drafter).__name__
        raise UserError(f"the adapter in {folder} does not fit {name} ({cause}); train or fetch the heads again") from None
    return merged(drafter)


def _attach(drafter: Drafter, config: Any, names: list[str]) -> None:
    drafter.lora = Lora(drafter, config, names)
    for layer in drafter.lora.layers.values():
        layer.register_state_dict_post_hook(_without_adapter)
        layer.register_load_state_dict_pre_hook(_with_adapter)


def _without_adapter(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Make an adapted layer's part of a state dict that of the layer without adapter."""
    for name in [name for name in state if name.startswith(prefix)]:
        tensor = state.pop(name)
        if name.startswith(prefix + BASE_LAYER):
            state[prefix + name.removeprefix(prefix + BASE_LAYER)] = tensor


def _with_adapter(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Make a layer's part of a state dict that of the adapted layer, with the adapter's present weights."""
    for part in ("weight", "bias"):
        if prefix + part in state:
            state[prefix + BASE_LAYER + part] = state.pop(prefix + part)
    state.update({prefix + name: weight.detach() for name, weight in layer.named_parameters() if not name.startswith(BASE_LAYER)})


def _targets(drafter: Drafter, asked: str | Sequence[str]) -> list[str]:
    """Return the names of the linear layers to adapt."""
    linear = {name: module for name, module in drafter.named_modules() if isinstance(module, nn.Linear)}
    sizes = {drafter.backbone.vocab, drafter.backbone.vocab if drafter.vocabulary is None else len(drafter.vocabulary)}
    if asked == ALL_LINEAR:
        found = [name for name, module in linear.items() if module.out_features not in sizes]
    elif isinstance(asked, str):
        try:
            found = [name for name in linear if re.fullmatch(asked, name)]
        except re.error as error:
            raise UserError(f"drafter.lora.target_modules={asked!r} is not a regular expression: {error}") from None
    else:
        found = [name for name in linear if any(name == one or name.endswith(f".{one}") for one in asked)]
    if not found:
        known = ", ".join(linear) or "none"
        raise UserError(f"drafter.lora.target_modules={asked!r} names no linear layer of {type(drafter).__name__}; it has: {known}")
    return found
