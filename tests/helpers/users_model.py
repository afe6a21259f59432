"""A model that someone is training, and everything of it that heads must leave as it was."""

from typing import Any

import torch
from families import tiny
from transformers import PreTrainedModel


def in_training(family: str = "gpt2", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model in training mode but for its first layer, trained but for its embedding."""
    model = tiny(family, seed, **changes).requires_grad_(True).train()
    model.base_model.get_submodule("h.0" if family == "gpt2" else "layers.0").eval()
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


def state(model: PreTrainedModel) -> dict[str, Any]:
    """What heads must leave as it was; modules and functions by identity."""
    return {
        "attributes": {name: _attributes(part) for name, part in model.named_modules()},
        "modules": {name: (type(part), id(part), part.training, vars(part).get("forward")) for name, part in model.named_modules()},
        "weights": {name: (id(weight), weight.requires_grad, weight._version, weight.grad) for name, weight in model.named_parameters()},
        "methods": [getattr(model, name) for name in ("generate", "forward", "_extract_generation_mode_kwargs", "_sample")],
        "random": torch.get_rng_state().tolist(),
    }


def _attributes(module: torch.nn.Module) -> dict[str, str]:
    apart = ("_parameters", "_buffers", "_modules", "training")
    return {name: repr(value) for name, value in vars(module).items() if name not in apart}
