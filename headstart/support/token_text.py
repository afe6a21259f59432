"""Text from tokens that arrive one at a time."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"
"""Decoded from the first bytes of a character whose other bytes are still to come."""


class TokenTextStream:
    """The text that each token adds; a character of several tokens comes with the last of them.

    The last few tokens are decoded together with the new one, since many tokenizers write a token's leading space only after another token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = False) -> None:
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self.emitted: list[int] = []
        """The last tokens whose text was returned."""
        self.pending: list[int] = []
        """Tokens whose text was not returned yet."""

    def add(self, token: int) -> str:
        """The text that is certain now."""
        self.pending.append(token)
        text = self._decode(self.emitted + self.pending)
        return "" if text.endswith(INCOMPLETE) else self._emit(text)

    def end(self) -> str:
        """The text that was held back."""
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
    """The text of each token, special ones included; joined, they are the text of all."""
    stream = TokenTextStream(tokenizer)
    texts = [stream.add(token) for token in tokens]
    return [*texts[:-1], texts[-1] + stream.end()] if texts else []
