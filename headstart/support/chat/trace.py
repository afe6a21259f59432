"""Prompts and answers of a conversation, joined to as few samples as hold them all."""

from __future__ import annotations

from collections.abc import Sequence

TokenSample = tuple[list[int], list[bool]]
"""Token ids, and True for those that the model wrote."""


class Trace:
    """The turns of one conversation. A prompt that begins with all tokens before it continues their sample, any other begins a new one."""

    def __init__(self) -> None:
        self.samples: list[TokenSample] = []

    def add(self, prompt: Sequence[int], answer: Sequence[int], labels: Sequence[bool] | None = None) -> None:
        """Add a turn; ``labels``: the tokens of the answer that have a loss (None: all)."""
        last = self.samples.pop() if self.samples else ([], [])
        if list(prompt[: len(last[0])]) != last[0]:
            self.samples.append(last)
            last = ([], [])
        new = [False] * (len(prompt) - len(last[1]))
        self.samples.append(([*prompt, *answer], [*last[1], *new, *([True] * len(answer) if labels is None else labels)]))
