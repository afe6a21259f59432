"""Text from tokens that come one at a time."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""What the beginning of a character decodes to whose other bytes are still to come."""


class TokenTextStream:
    """What each token adds to the text; a character of several tokens comes with the last of them.

    A few tokens before the new one are decoded with it, since many tokenizers write a token's space only behind another token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = False) -> None:
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self.told: list[int] = []
        """Tokens whose text has been given, the last few."""
        self.held: list[int] = []
        """Tokens whose text has not been given."""

    def add(self, token: int) -> str:
        """What is certain now."""
        self.held.append(token)
        text = self._decode(self.told + self.held)
        return "" if text.endswith(UNFINISHED) else self._tell(text)

    def end(self) -> str:
        """What was held back."""
        return self._tell(self._decode(self.told + self.held)) if self.held else ""

    def _tell(self, text: str) -> str:
        new = text[len(self._decode(self.told)) :]
        if new:
            self.told, self.held = self.held, []
        return new

    def _decode(self, tokens: list[int]) -> str:
        text = self.tokenizer.decode(tokens, skip_special_tokens=self.skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def cut(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The text of each token, special ones included; put together they are the text of all."""
    pieces = TokenTextStream(tokenizer)
    found = [pieces.add(token) for token in tokens]
    return [*found[:-1], found[-1] + pieces.end()] if found else []
