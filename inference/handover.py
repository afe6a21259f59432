"""What transformers' ``generate`` hands to a method given as ``custom_generate``: the arguments of the call that it would drop."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from headstart.heads.backbone.backbone import Backbone
from headstart.support.errors import UserError


class Decoding:
    """Base class of what has a method for ``custom_generate``, which then gets the call's streamer and tokenizer (see `hand_over`)."""

    backbone: Backbone

    def require_model(self, model: PreTrainedModel) -> None:
        """Raise UserError unless ``model``, whose ``generate`` was called, is the one that the heads are on."""
        if model is not self.backbone.model:
            raise UserError(f"these heads are on another model object ({self.backbone.name}); load them with backbone=this model")


def hand_over(model: PreTrainedModel) -> None:
    """Patch the model so that ``streamer`` and ``tokenizer`` (for stop strings) reach `SpeculativeModel.generate`.

    transformers 5.23 drops both before calling a ``custom_generate`` callable, and rejects stop strings without the tokenizer.
    """
    if "_extract_generation_mode_kwargs" in vars(model):
        return
    original = model._extract_generation_mode_kwargs

    def extract(
        self: PreTrainedModel,
        custom_generate: str | Callable | None,
        kwargs: dict[str, Any],
        synced_gpus: bool | None,
        assistant_model: PreTrainedModel | None,
        streamer: BaseStreamer | None,
    ) -> dict[str, Any]:
        tokenizer = kwargs.get("tokenizer")
        arguments = original(custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        if isinstance(custom_generate, MethodType) and isinstance(custom_generate.__self__, Decoding):
            if assistant_model is not None:
                raise UserError("assistant_model and heads both draft; leave assistant_model out")
            dropped = {"streamer": streamer, "tokenizer": tokenizer}   # with beams, transformers rejects even streamer=None
            arguments |= {name: value for name, value in dropped.items() if value is not None}
        return arguments

    model._extract_generation_mode_kwargs = MethodType(extract, model)
