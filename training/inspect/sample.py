"""Show a training sample as text, with label tokens coloured or in brackets, and as a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from headstart.support.page import Section, page
from headstart.support.text import token_texts, visible
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


def sample_page(report: dict[str, Any], recipe: str) -> str:
    """Return the page for a report on a recipe: the sample as a person reads it."""
    data, tokens = report["data"], report["sample"]
    last = max((i for i, token in enumerate(tokens) if token["loss"]), default=-1)
    legend = Markup(
        "<p><span class=a>label</span> the model writes it: trained on &nbsp; <span class=soft>prompt</span> the model reads it before it"
        ' answers &nbsp; <span class="soft unused">neither</span> after the last label: read, and not trained on</p>'
    )
    spans = [_span(token, "a" if token["loss"] else "soft" if i < last else "soft unused") for i, token in enumerate(tokens)]
    about = "What is trained on, token by token; the id of a token is shown where the pointer rests on it."
    text = Markup("<div class=text>{}</div>").format(Markup("").join(spans))
    check = [data["check"]["said"]] if data["check"] else []
    return page("training sample", [f"{recipe}: {data['summary']}", *check], [Section(f"Sample {report['row']}", about, [legend, text])])


def _span(token: dict[str, Any], part: str) -> Markup:
    special = " special" if token["special"] else ""
    return Markup('<span class="{}" title="{}">{}</span>').format(part + special, token["token"], token["text"])
