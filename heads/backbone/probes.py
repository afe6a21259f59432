"""Test forward passes when a model is loaded: they check that it follows tree masks and find how it post-processes its logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

from headstart.heads.backbone.recurrent import Branch
from headstart.support.errors import UserError

if TYPE_CHECKING:
    from headstart.heads.backbone.backbone import Backbone


def require_masks(backbone: Backbone) -> None:
    """Raise UserError unless the model follows 4-D masks and explicit positions.

    A token must have the same hidden state among masked siblings as without them.
    """
    N = min(24, backbone.max_positions or 24)
    tokens = torch.arange(N, device=backbone.device)[None] % backbone.vocab
    seen = torch.ones(N, N, dtype=torch.bool, device=backbone.device).tril()
    seen[-1, 2:-1] = False
    place = torch.arange(N, device=backbone.device)[None].clone()
    place[0, -1] = 2
    alone = backbone.read(tokens[:, [0, 1, N - 1]]).hidden_BTD[:, -1]
    try:
        with nullcontext() if backbone.recurrent is None else backbone.recurrent.along(Branch(None, seen[None], place)):
            beside = backbone.read(tokens, None, place, dict.fromkeys(backbone.windows, seen[None])).hidden_BTD[:, -1]
    except (TypeError, ValueError, RuntimeError):
        beside = None
    if beside is None or (beside - alone).abs().max().item() > 0.05 * alone.abs().max().item():
        name = type(backbone.model).__name__
        raise UserError(f"{name} does not follow a 4-D attention mask and explicit positions, so it can't read trees; use one that does")


POSTPROCESS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "none": lambda logits, value: logits,
    "final_logit_softcapping": lambda logits, value: torch.tanh(logits / value) * value,
    "logit_scale": lambda logits, value: logits * value,
    "logits_scaling": lambda logits, value: logits / value,
    "logits_scaling (multiplied)": lambda logits, value: logits * value,
    "lm_head_multiplier": lambda logits, value: logits * value,
}


@torch.no_grad()
def find_postprocessing(backbone: Backbone) -> Callable[[Tensor], Tensor]:
    """Find the rule of `POSTPROCESS`, with its value in the configuration, that reproduces the model's own logits.

    Raises UserError if none does.
    """
    config = backbone.config.to_dict()
    tokens = torch.arange(2, device=backbone.device)[None]
    logits = backbone.model(input_ids=tokens).logits
    raw = backbone.unembed(backbone.base(input_ids=tokens).last_hidden_state)
    errors = {}
    for rule, apply in POSTPROCESS.items():
        value = config.get(rule.split(" ")[0])
        if rule == "none" or value:
            errors[rule, float(value or 1.0)] = (apply(raw, value).float() - logits.float()).abs().max().item()
    best = min(errors, key=lambda rule: errors[rule])
    if errors[best] > 2e-2 * logits.abs().max().item():
        raise UserError(
            f"{type(backbone.model).__name__} changes its logits in an unknown way (transformers {transformers.__version__}); "
            f"known rules: {', '.join(POSTPROCESS)}"
        )
    apply, scale = POSTPROCESS[best[0]], best[1]
    return lambda logits: apply(logits, scale)
