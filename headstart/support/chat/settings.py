"""What decides how a conversation becomes tokens, beside the tokenizer: one object for recipe, checkpoint, commands and `load`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from headstart.support.files import value_hash

Templates = str | dict[str, str]
"""A Jinja chat template, or several by name, as some tokenizers have them (``default``, ``tool_use``)."""


@dataclass(frozen=True)
class ChatSettings:
    template: Templates | None = None
    """The chat template; None: the tokenizer's own."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as ``enable_thinking``; ``tools`` are those of conversations that bring none."""
    ends: tuple[int, ...] = ()
    """Tokens at which decoding stops, the model's ``generation_config.eos_token_id``; empty: the tokenizer's."""
    time: str | None = None
    """The instant, in ISO 8601, that ``strftime_now`` prints; None: the clock's."""

    def template_of(self, tokenizer: PreTrainedTokenizerBase) -> Templates | None:
        """Return the template that conversations are rendered with, if any."""
        own: Templates | None = tokenizer.chat_template
        return own if self.template is None else self.template

    def to_card(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return what a checkpoint keeps of it: everything but the instant."""
        return {"template": self.template_of(tokenizer), "template_kwargs": dict(self.variables), "eos_token_id": list(self.ends)}

    @classmethod
    def from_card(cls, card: Mapping[str, Any] | None) -> ChatSettings:
        """Read what `to_card` wrote; the default without it."""
        if card is None:
            return cls()
        return cls(card.get("template"), card.get("template_kwargs") or {}, tuple(card.get("eos_token_id") or ()))


def template_hash(template: Templates | None) -> str | None:
    """Hash a chat template; None if there is none."""
    return value_hash(template) if template else None
