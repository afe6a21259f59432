"""Incremental detokenization."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"
"""Replacement character that an incomplete character decodes to."""


class TokenTextStream:
    """Returns the text that each new token adds; a character of several tokens is returned with the last one.

    The last tokens are decoded again with the new one, since many tokenizers write a token's leading space only after another token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = False) -> None:
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self.emitted: list[int] = []
        """The last tokens whose text has been returned."""
        self.pending: list[int] = []
        """Tokens whose text has not been returned."""

    def add(self, token: int) -> str:
        """Add a token and return the new complete text."""
        self.pending.append(token)
        text = self._decode(self.emitted + self.pending)
        return "" if text.endswith(INCOMPLETE) else self._emit(text)

    def end(self) -> str:
        """Return the text held back."""
        return self._emit(self._decode(self.emitted + self.pending)) if self.pending else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._decode(self.emitted)) :]
        if new:
            self.emitted, self.pending = self.pending, []
        return new

    def _decode(self, tokens: list[int]) -> str:
        text = self.tokenizer.decode(tokens, skip_special_tokens=self.skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """Return the text of each token, special tokens included; joined, they are the whole text."""
    stream = TokenTextStream(tokenizer)
    texts = [stream.add(token) for token in tokens]
    return [*texts[:-1], texts[-1] + stream.end()] if texts else []
