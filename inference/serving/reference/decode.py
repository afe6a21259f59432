"""Greedy chains of drafts with heads as read, and their logits.

Shape suffixes: K depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.inference.serving.reference.methods import drafting_of
from headstart.inference.serving.reference.reading import Drafting, Reading
from headstart.inference.serving.reference.target import Target
from headstart.support.errors import UserError


@torch.no_grad()
def begin(reading: Reading, target: Target, text: Sequence[int]) -> Drafting:
    """Prepare to draft after any prefix of a text."""
    return drafting_of(reading)(reading, target, target.read(text, reading.taps))


def require_depth(drafting: Drafting, depth: int) -> None:
    """Raise UserError unless that many tokens can be drafted."""
    if drafting.max_depth is not None and depth > drafting.max_depth:
        raise UserError(f"these heads draft {drafting.max_depth} tokens; got a depth of {depth}: give --depth {drafting.max_depth} or less")


@torch.no_grad()
def draft_at(drafting: Drafting, position: int, depth: int) -> list[int]:
    """Return the drafted tokens after the first ``position`` tokens, each the most likely one."""
    next_token, token, drafts = drafting.after(position), int(drafting.text.tokens_T[position - 1]), []
    for _ in range(depth):
        token = int(next_token(token).argmax())
        drafts.append(token)
    return drafts


@torch.no_grad()
def logits_at(drafting: Drafting, position: int, drafts: Sequence[int]) -> Tensor:
    """Return the logits ``[K, V]`` of each draft after ``position`` tokens, given the drafts before it."""
    next_token = drafting.after(position)
    given = [int(drafting.text.tokens_T[position - 1]), *drafts[:-1]]
    return torch.stack([next_token(token) for token in given])
