"""Logits processors whose state can be undone, such as matchers of grammars: the state forks along a tree.

Contract: a processor with a method ``rollback(n)``, which undoes its last n calls. Each call has one token more than the one before, and
the state follows from the ids alone. For batches it also has ``of_row(row)``, which returns the processor of one row, with a state of its
own. With ``forced(ids)``, it names the tokens that must follow these ids ``[1, T]``, which are drafted; its state is then as before.

Shape suffixes: T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_forkable(processor: Any, rows: int) -> bool:
    """True if the processor's state can be undone, in each of so many rows."""
    return callable(getattr(processor, "rollback", None)) and (rows == 1 or callable(getattr(processor, "of_row", None)))


class Forked:
    """The processor of one row, called for any text that begins with the prompt."""

    def __init__(self, processor: Any, row: int, rows: int) -> None:
        self.processor: Any = processor if rows == 1 else processor.of_row(row)
        self.forced: Callable[[Tensor], list[int]] | None = getattr(self.processor, "forced", None)
        self._called: list[int] | None = None
        """The tokens after the prompt of the last call; None before the first."""
        self._scores_V: Tensor | None = None
        """Some scores, for calls that are made for the state alone."""

    def __call__(self, prompt_T: Tensor, written: list[int], scores_V: Tensor) -> Tensor:
        """Processed scores ``[V]`` after the prompt and these tokens."""
        self._scores_V = scores_V
        self._go_before(prompt_T, written, scores_V)
        return self._call(prompt_T, written, scores_V)

    def settle(self, prompt_T: Tensor, written: list[int]) -> None:
        """Leave the state as calls for this text, and none beyond it, leave it."""
        if self._called != written and self._scores_V is not None:
            self(prompt_T, written, self._scores_V)

    def _go_before(self, prompt_T: Tensor, written: list[int], scores_V: Tensor) -> None:
        """Undo calls for other texts, and call again for what was undone of this one, so that the next call is the one for this text."""
        if self._called is None:
            first = 0
        else:
            common = common_prefix(self._called, written)
            first = min(common + 1, len(written)) if written else 0
            undone = len(self._called) - (first - 1)
            if undone:
                self.processor.rollback(undone)
        for count in range(first, len(written)):
            self._call(prompt_T, written[:count], scores_V)

    def _call(self, prompt_T: Tensor, written: list[int], scores_V: Tensor) -> Tensor:
        self._called = written
        ids_1T = prompt_T[None] if not written else _joined(prompt_T, written)
        processed_V: Tensor = self.processor(ids_1T, scores_V[None].clone())[0]
        return processed_V


def allowed(scores_V: Tensor, token: int) -> bool:
    """True if a pick may be this token: it is not ruled out, or all are and it is the first of them."""
    return scores_V[token].item() > -math.inf or int(scores_V.argmax()) == token


def _joined(prompt_T: Tensor, written: list[int]) -> Tensor:
    return torch.cat([prompt_T, prompt_T.new_tensor(written)])[None]


def common_prefix(one: list[int], other: list[int]) -> int:
    """The number of tokens with which both begin."""
    count = min(len(one), len(other))
    return count if one[:count] == other[:count] else next(i for i in range(count) if one[i] != other[i])
