"""Whether a device's memory and the backbone's context can hold what a call needs at the least; refused before anything is computed."""

from __future__ import annotations

import os

import torch

from headstart.heads.backbone.backbone import Backbone
from headstart.support.errors import UserError
from headstart.support.text import gigabytes


def device_memory(device: torch.device) -> int:
    """Return the bytes of an accelerator's memory, or of this machine's for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_memory(backbone: Backbone, rows: int, positions: int, nodes: int) -> None:
    """Raise UserError if ``rows`` sequences of ``positions`` tokens with trees of ``nodes`` nodes cannot fit the device.

    Counted are one hidden state of every token and the logits of the trees, without which no forward pass ends; a call that passes may
    still need more.
    """
    needed = rows * (positions * backbone.dim * backbone.dtype.itemsize + nodes * backbone.vocab * 4)
    there = device_memory(backbone.device)
    if needed > there:
        raise UserError(
            f"{rows} sequences of {positions} tokens with trees of {nodes} nodes need at least {gigabytes(needed)}, and the device has "
            f"{gigabytes(there)}; lower the batch size (--batch-size), the prompts or the nodes (--nodes)"
        )


def require_room(what: str, prompt_tokens: int, max_new_tokens: int, backbone: Backbone) -> None:
    """Raise UserError unless the prompt and its answer fit into the backbone's context."""
    context = backbone.max_positions
    if context is not None and prompt_tokens + max_new_tokens > context:
        raise UserError(
            f"{what} has {prompt_tokens} tokens, which with max_new_tokens {max_new_tokens} exceeds the backbone's context of {context};"
            " shorten the prompt or lower --max-new-tokens"
        )
