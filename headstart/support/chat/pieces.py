"""Texts in pieces that a tokenizer reads apart from each other, so that what texts have in common is tokenised once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain, pairwise

from transformers import PreTrainedTokenizerBase


class Pieces:
    """Cuts texts before special tokens.

    A tokenizer takes added tokens out of a text before anything else, and what stands between them has no influence on each other. That
    does not hold for slow tokenizers, nor beside added tokens that take blanks or look at letters around them: these texts stay whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = [one for one in tokenizer.added_tokens_decoder.values() if one.content and not one.normalized]
        plain = tokenizer.is_fast and not tokenizer.split_special_tokens
        plain = plain and not any(one.lstrip or one.rstrip or one.single_word for one in tokenizer.added_tokens_decoder.values())
        self.special = {one.content for one in added if one.special} if plain else set()
        longest_first = sorted((one.content for one in added), key=len, reverse=True)   # of two at one place the longer one counts
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))

    def cut(self, text: str) -> list[str]:
        """Return the pieces, which together are the text."""
        starts = [found.start() for found in self.pattern.finditer(text) if found.group() in self.special] if self.special else []
        return [text[first:end] for first, end in pairwise(dict.fromkeys([0, *starts, len(text)]))]

    def tokens(self, texts: Sequence[str], tokenise: Callable[[list[str]], list[list[int]]]) -> list[list[int]]:
        """Return the tokens of texts that share pieces, by the tokens of each piece."""
        cut = [self.cut(text) for text in texts]
        pieces = list(dict.fromkeys(chain.from_iterable(cut)))
        known = dict(zip(pieces, tokenise(pieces), strict=True))
        return [[token for piece in one for token in known[piece]] for one in cut]
