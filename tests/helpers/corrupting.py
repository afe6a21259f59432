"""Capture backends that change what a captured forward pass computes, to see that it is noticed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.capture import capture as capturing
from headstart.inference.capture.backend import Backend, Call, Capture, Function

Change = Callable[[Call, Tensor], None]
"""Changes the logits ``[B, N, V]`` of a pass over trees, or a tensor of the call that it wrote into."""


def a_logit(call: Call, logits_BNV: Tensor) -> None:
    """One logit after the root is 20 larger."""
    logits_BNV[0, 0, 5] += 20


def a_value(call: Call, logits_BNV: Tensor) -> None:
    """One number of the values in the cache is another one: of the second layer's fourth token."""
    _, values = call.held[0]
    values[0][1, 0, 0, 3, 1] = 3000


def last_places(call: Call, logits_BNV: Tensor) -> None:
    """Every logit moves by a unit in the last place, up, down or not at all."""
    signs = torch.randint(-1, 2, logits_BNV.shape)
    logits_BNV += logits_BNV.abs() * torch.finfo(logits_BNV.dtype).eps * signs


def register(monkeypatch: pytest.MonkeyPatch, change: Change | None) -> None:
    """Have the backend ``cuda-graph`` run functions as they are and change the result of each pass over trees."""

    class Changed(Backend):
        name = "cuda-graph"

        @classmethod
        def unavailable(cls, device: torch.device) -> str | None:
            return None

        def variant(self, call: Call) -> Any:
            return call.shapes

        def capture(self, function: Function, call: Call) -> Capture:
            return Changing(function)

    class Changing(Capture):
        def __init__(self, function: Function) -> None:
            super().__init__()
            self.function = function

        def __call__(self, call: Call) -> Any:
            result = self.function(call.held, *call.inputs)
            if change is not None and isinstance(result, tuple) and len(result) == 3 and call.held is not None:  # a pass over trees
                change(call, result[1])
            return result

    monkeypatch.setitem(capturing.BACKENDS, "cuda-graph", lambda: Changed)


def like_smollm2(dtype: torch.dtype, twins: bool = False) -> Backbone:
    """A random model of SmolLM2-135M's widths with two layers and 4,096 tokens; with ``twins``, every two tokens have equal logits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, initializer_range=0.05, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if twins:
        with torch.no_grad():
            model.lm_head.weight[1::2] = model.lm_head.weight[::2]
    return Backbone(model.to(dtype))
