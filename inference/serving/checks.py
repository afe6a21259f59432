"""Checks of a layout that names and shapes do not cover: layer numbers, draft vocabularies, values. All raise UserError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headstart.support.errors import UserError


def require_layers(config: Mapping[str, Any], num_layers: int, source: str) -> None:
    """Hold that both ways of counting the tapped layers agree, and that the backbone has these layers.

    vLLM's own key counts the layers that the residual stream has passed, the others the layer whose output it is: one less.
    """
    taps = config.get("eagle_aux_hidden_state_layer_ids")
    if taps is None:
        return
    eagle, dflash = config.get("eagle_config", {}), config.get("dflash_config", {})
    for other in (eagle.get("eagle_aux_hidden_state_layer_ids"), dflash.get("target_layer_ids")):
        if other is not None and other != [tap - 1 for tap in taps]:
            raise UserError(f"config.json of {source} states the layers {taps} and {other}, which are not one less each: it is damaged")
    if taps != sorted(set(taps)) or not taps or taps[0] < 0 or taps[-1] > num_layers:
        raise UserError(f"config.json of {source} states the layers {taps}; they ascend from 0 to {num_layers}, the layers of the backbone")


def require_vocabulary(tensors: Mapping[str, Tensor], source: str) -> None:
    """Hold that ``d2t`` (offsets) and ``t2d`` (which tokens are drafted) describe the same draft vocabulary."""
    if "d2t" not in tensors:
        return
    drafted = tensors["t2d"].nonzero().flatten()
    offsets = drafted - torch.arange(len(drafted))
    if tensors["d2t"].dtype != torch.int64 or not torch.equal(offsets, tensors["d2t"]):
        raise UserError(f"d2t and t2d of {source} disagree about the draft vocabulary: it is damaged; train or fetch it again")


def expanded(rows_DVD: Tensor, tokens_DV: Tensor, vocab: int) -> Tensor:
    """Return an output layer ``[V, D]`` over the whole vocabulary for one ``[DV, D]`` over the tokens of a draft vocabulary.

    The rows of all other tokens are the mean of the drafted ones, so that their logit is the mean of the drafted logits and never the
    largest: the layer drafts what the small one does.
    """
    full_VD = rows_DVD.float().mean(0).to(rows_DVD.dtype).repeat(vocab, 1)
    full_VD[tokens_DV] = rows_DVD
    return full_VD
