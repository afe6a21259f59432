"""What a call of ``generate`` gives beside tokens and mask: images, and positions.

Shape suffixes: B batch, T positions, X axes of positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.images import ENCODED, KINDS, Images, features_of, image_arguments, placeholders
from headstart.heads.backbone.versions import CACHE, NAMES
from headstart.support.errors import UserError

NO_EFFECT = (
    "attention_mask", "position_ids", *NAMES, "use_cache", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits",
)  # fmt: skip
"""Arguments of the model's forward that are read elsewhere or change no token."""


def read_images(backbone: Backbone, ids_BT: Tensor, pads: list[int], model_kwargs: Mapping[str, Any]) -> tuple[Images | None, ...]:
    """Return the images of each row; empty if none has any. Raises UserError for what cannot be read, or does not fit the tokens."""
    given = {name: value for name, value in model_kwargs.items() if name not in NO_EFFECT and value is not None and value is not False}
    encoded = {what: output for what, output in (given.pop(ENCODED, None) or {}).items() if output is not None}
    stand = placeholders(backbone.model.config)
    for name in given if not stand else {*given} - image_arguments(backbone.base):
        raise UserError(f"{name} is not supported: heads decode from input_ids{' and images' if stand else ''}; leave it out")
    kinds = {name: value for name, value in given.items() if name.endswith(KINDS)}
    pixels = {name: value for name, value in given.items() if name not in kinds}
    if not pixels and not encoded:
        return ()
    _require_readable(backbone, ids_BT, pixels, encoded, model_kwargs)
    position_ids = model_kwargs.get("position_ids")
    if position_ids is None:
        position_ids = (torch.arange(ids_BT.shape[1], device=ids_BT.device) - torch.tensor(pads, device=ids_BT.device)[:, None]).clamp(min=0)
    counts = {what: (ids_BT == stand[what]).sum(1).tolist() for what in encoded}
    rows: list[Images | None] = []
    for b, pad in enumerate(pads):
        arguments = dict(pixels)
        if len(pads) == 1:
            arguments |= {ENCODED: encoded} if encoded else {}
        elif own := {what: (sum(many[:b]), sum(many[: b + 1])) for what, many in counts.items() if many[b]}:
            arguments[ENCODED] = {what: features_of(encoded[what], *span) for what, span in own.items()}
        arguments |= {name: value[b : b + 1, pad:] for name, value in kinds.items()} if arguments else {}
        rows.append(Images(arguments, position_ids[..., b : b + 1, pad:]) if arguments else None)
    return tuple(rows)


def _require_readable(
    backbone: Backbone, ids_BT: Tensor, pixels: Mapping[str, Any], encoded: Mapping[str, Any], model_kwargs: Mapping[str, Any]
) -> None:
    """Raise UserError for images that the tokens have no or another number of places for, or that cannot be told apart by row."""
    name, stand = type(backbone.model).__name__, placeholders(backbone.model.config)
    if backbone.rope_limit is not None:
        raise UserError(f"{name} changes its rotary frequencies with the length of a text, and heads then read no images; give text alone")
    if (past := model_kwargs.get(CACHE)) is not None and past.get_seq_length():
        raise UserError(f"images beside a {CACHE} that holds tokens are not read; give images with an empty one, and then text")
    if pixels and len(ids_BT) > 1:
        raise UserError(f"{name} is given {' and '.join(pixels)} of several rows together, which cannot be told apart; give one row at a time")
    found = {what: int((ids_BT == token).sum()) for what, token in stand.items()}
    if not any(found.values()):
        raise UserError(f"there are images and the prompt has no place for them (token {stand}); write the prompt with the model's processor")
    for what, output in encoded.items():
        features = output.get("pooler_output") if isinstance(output, Mapping) else None
        needed = found.get(what, 0) if features is None else sum(one.numel() for one in features) // backbone.dim
        if needed != found.get(what, 0):
            raise UserError(
                f"the prompt has {found.get(what, 0)} tokens {stand.get(what)} for {what} input of {needed} features;"
                " write it with the model's processor, an image for each place"
            )
    if any((ids_BT[:, -1] == token).any() for token in stand.values()):
        raise UserError("the prompt ends with an image, and what follows has no usual position; let text follow it")
    if max(stand.values()) >= backbone.vocab:
        raise UserError(f"{name} has no embedding for {stand}, which drafters read; give text alone")


def require_text(backbone: Backbone, ids_T: Tensor) -> None:
    """Raise UserError if a prompt without images has places for them."""
    for what, token in placeholders(backbone.model.config).items():
        if count := int((ids_T == token).sum()):
            raise UserError(f"the prompt has {count} tokens {token}, places for {what} input, and there is none; give it, or leave them out")


def require_usual_positions(position_ids: Tensor | None, ids_BT: Tensor, pads: list[int], continued: bool) -> None:
    """Raise UserError for ``position_ids`` other than those that transformers makes; what they are for padding does not matter.

    ``continued``: after what is in a cache, where images may have taken fewer positions than tokens.
    """
    if position_ids is None:
        return
    T, rows = ids_BT.shape[1], len(pads)
    if position_ids.shape[-1] != T:
        raise UserError(f"position_ids or attention_mask are for {position_ids.shape[-1]} tokens, input_ids has {T}; give as many")
    usual_BT = torch.arange(T) - torch.tensor(pads)[:, None]
    given_XBT = position_ids.reshape(-1, *position_ids.shape[-2:]).cpu()  # some models have several positions for each token
    given_XBT = given_XBT[:, :: max(given_XBT.shape[1] // rows, 1)]  # of beams, the first
    if continued:
        given_XBT = given_XBT - (given_XBT[..., -1:] - usual_BT[:, -1:])
    if bool(((given_XBT != usual_BT) & (usual_BT >= 0)).any()):
        raise UserError(
            "position_ids other than 0, 1, 2, ... from each row's first token on are not supported: drafts have positions of their own; "
            "leave position_ids out"
        )
