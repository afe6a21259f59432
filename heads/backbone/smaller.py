"""Smaller causal models with a backbone's vocabulary: pruned copies of the backbone, and other models fitted to it.

Shape suffixes: V vocabulary, D width.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads.backbone.adapter import BASE_LAYER, plain_weight
from headstart.heads.backbone.backbone import Backbone, load_tokenizer
from headstart.heads.backbone.model_config import load_config
from headstart.heads.backbone.recurrent import KIND
from headstart.support.errors import UserError, cause, naming

Tokenizers = tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]
"""The tokenizers of the backbone and of the draft model."""
FAULTS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, StrictDataclassError)
"""What transformers raises for a configuration that it cannot build."""


def evenly(total: int, count: int) -> list[int]:
    """Return ``count`` of ``total`` layer numbers at even distances, the first and the last among them."""
    return [round(i * (total - 1) / max(count - 1, 1)) for i in range(count)]


def pruned_config(backbone: Backbone, layers: Sequence[int]) -> PretrainedConfig:
    """Return the configuration of a model of these layers of the backbone alone; its weights are not quantized."""
    config, total = copy.deepcopy(backbone.config), backbone.num_layers
    for name, value in config.to_dict().items():
        if "layer" in name and isinstance(value, list | tuple) and len(value) == total:  # one entry per layer, such as layer_types
            setattr(config, name, [value[number] for number in layers])
    config.num_hidden_layers = len(layers)
    if "quantization_config" in vars(config):
        del config.quantization_config
    return config


def read_config(path: str) -> PretrainedConfig:
    """Load a model's configuration. Raises UserError."""
    with naming(f"no draft model at {path!r}"):
        return load_config(path)


def config_from(stated: Mapping[str, Any]) -> PretrainedConfig:
    """Return the configuration that a ``config.json`` states. Raises UserError."""
    try:
        return AutoConfig.for_model(**stated)
    except FAULTS as error:
        raise UserError(f"drafter.architecture is no configuration of transformers, with its model_type: {cause(error, 200)}") from None


def stated_config(config: PretrainedConfig) -> dict[str, Any]:
    """Return the ``config.json`` of a configuration."""
    stated: dict[str, Any] = json.loads(config.to_json_string())
    return {name: value for name, value in stated.items() if name != "transformers_version"}


def allocate(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model with a configuration's shapes. Raises UserError."""
    if KIND in (config.to_dict().get("layer_types") or []):
        kind = config.model_type
        raise UserError(f"a draft model of type {kind!r} has recurrent layers, whose states can't follow drafted nodes; use another")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()
    except FAULTS as error:
        raise UserError(f"a draft model of type {config.model_type!r} cannot be built: {cause(error, 200)}") from None
    return model


def trainable(model: PreTrainedModel) -> Backbone:
    """Wrap a model whose weights may be trained; `Backbone.read` then computes gradients. Raises UserError for one that drafts no trees."""
    wrapped = Backbone(model, trees=False)
    if wrapped.no_trees is not None:
        raise UserError(f"a draft model of type {model.config.model_type!r} cannot draft in trees: {wrapped.no_trees}; use another")
    wrapped.trainable = dict(model.named_parameters())
    return wrapped


@torch.no_grad()
def copy_pruned(backbone: Backbone, model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Copy the backbone's weights into a model of `pruned_config`, layer ``layers[i]`` to layer i. Raises UserError."""
    path = next(name for name, module in backbone.model.named_modules() if module is backbone.layers) + "."
    source = {name.replace(BASE_LAYER, "."): weight for name, weight in backbone.model.named_parameters(remove_duplicate=False)}
    kept = {str(i): number for i, number in enumerate(layers)}
    for name, weight in model.named_parameters(remove_duplicate=False):
        number, _, rest = name.removeprefix(path).partition(".")
        found = source.get(f"{path}{kept.get(number)}.{rest}" if name.startswith(path) else name)  # Bart's copy has as many as before
        if found is None or (held := plain_weight(found)).shape != weight.shape:
            kind = type(backbone.model).__name__
            raise UserError(f"{kind} cannot be pruned: weight {name} has no counterpart of its shape; give a smaller model as drafter.path")
        weight.copy_(held)


@torch.no_grad()
def copy_model(source: PreTrainedModel, model: PreTrainedModel) -> None:
    """Copy the weights of a model of the same configuration but for the vocabulary's size, by which rows are left out or are the average of
    the others, and tied layers."""
    held = dict(source.named_parameters(remove_duplicate=False))
    for name, weight in model.named_parameters(remove_duplicate=False):
        rows = min(len(held[name]), len(weight))
        weight[:rows] = held[name][:rows]
        if rows < len(weight):
            weight[rows:] = held[name].float().mean(0)


@torch.no_grad()
def resize(model: PreTrainedModel, vocab: int) -> None:
    """Give a model a vocabulary of this size, in place; new tokens start as the average of the others."""
    before = model.get_output_embeddings().weight.shape[0]
    if before == vocab:
        return
    model.resize_token_embeddings(vocab, mean_resizing=False)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        table.weight[before:] = table.weight[:before].float().mean(0).to(table.weight.dtype)


def find_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """Load a model's tokenizer; None if there is none."""
    try:
        return load_tokenizer(path) if path else None
    except UserError:
        return None


def find_tokenizers(backbone: str, path: str) -> Tokenizers | None:
    """Load both models' tokenizers; None if one is missing."""
    ours, theirs = find_tokenizer(backbone), find_tokenizer(path)
    return None if ours is None or theirs is None else (ours, theirs)


def require_fitting(backbone: Backbone, small: Backbone, tokenizers: Tokenizers | None) -> None:
    """Raise UserError unless the small model can draft for the backbone: no recurrent layers, the same device and the same vocabulary."""
    ours, theirs = (model.name or type(model.model).__name__ for model in (backbone, small))
    if small.no_trees is not None:
        raise UserError(f"draft model {theirs} cannot draft in trees: {small.no_trees}; use a model that can")
    if small.recurrent is not None:
        raise UserError(f"draft model {theirs} has recurrent layers, whose states can't follow drafted nodes; use one with attention alone")
    if small.device != backbone.device:
        raise UserError(f"draft model {theirs} is on {small.device} and backbone {ours} on {backbone.device}; move one to the other")
    if tokenizers is None:
        if small.vocab != backbone.vocab:
            raise UserError(
                f"draft model {theirs} has a vocabulary of {small.vocab} and backbone {ours} of {backbone.vocab}; "
                "draft with a model of the same vocabulary, or give both tokenizers if one size is padded"
            )
        return
    mine, other = ({place: token for token, place in tokenizer.get_vocab().items()} for tokenizer in tokenizers)
    apart = [place for place in mine if place in other and mine[place] != other[place]]
    if apart:
        place = min(apart)
        raise UserError(
            f"token {place} is {other[place]!r} to draft model {theirs} and {mine[place]!r} to backbone {ours} "
            f"({len(apart)} tokens differ); draft with a model of the same vocabulary"
        )
