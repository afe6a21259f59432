"""The instant that chat templates print: a run, a cache and a file of answers keep the one that they began with."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from transformers import PreTrainedTokenizerBase

from headstart.support.chat.template import ChatSettings, Template
from headstart.training.recipe.recipe import Recipe


def now() -> str:
    """Return this instant in ISO 8601, in the local time that templates print."""
    return datetime.now().isoformat(timespec="seconds")


def begun_at(recipe: Recipe, kept: Sequence[str | None], instant: str) -> Recipe:
    """Return the recipe with ``data.template_time``: its own, else the first of those ``kept``, else ``instant``."""
    time = next((time for time in (recipe.data.template_time, *kept) if time), instant)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"template_time": time})})


def prints_date(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template may print a date."""
    settings = ChatSettings(recipe.data.chat_template)
    return bool(settings.template_of(tokenizer)) and Template(tokenizer, settings).prints_date
