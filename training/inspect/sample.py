"""Show a training sample as text, with label tokens coloured or in brackets."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from headstart.support.token_text import token_texts
from headstart.support.visible import visible
from headstart.training.data.sample import Sample

LABEL, CONTEXT, SPECIAL = "green", "dim", "reverse"
"""Styles of label, context and special tokens."""
BRACKETS = "⟦", "⟧"
"""Marks of label tokens in output without colours."""


@dataclass(frozen=True)
class TokenText:
    token: int
    text: str
    loss: bool
    special: bool


def read_tokens(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[TokenText]:
    """Return each token with its text and whether it has a loss."""
    tokens, special = sample.tokens.tolist(), set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    texts, losses = token_texts(tokenizer, tokens), sample.loss_mask.tolist()
    return [TokenText(token, text, loss, token in special) for token, text, loss in zip(tokens, texts, losses, strict=True)]


def paint(tokens: list[TokenText], marks: bool) -> Text:
    """Show label tokens green, context dim and special tokens reversed; with ``marks``, label tokens in brackets instead."""
    painted, inside = Text(overflow="fold"), False
    for token in tokens:
        if marks:
            painted.append(("" if token.loss == inside else BRACKETS[inside]) + visible(token.text))
            inside = token.loss
        else:
            painted.append(visible(token.text), style=f"{LABEL if token.loss else CONTEXT}{f' {SPECIAL}' if token.special else ''}")
    return painted.append(BRACKETS[1] if inside else "")
