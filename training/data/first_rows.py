"""Mistakes of the data that the first rows of local files show, said before anything slow is loaded."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.training.data.columns import find_column
from headstart.training.data.rows import names_file, read_rows
from headstart.training.data.tokenise import reader_of
from headstart.training.recipe.recipe import Data, Recipe

FIRST = 100
"""Rows of a file that are looked at."""


def checked_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the backbone's tokenizer once `check_data` has passed. Raises UserError, also for conversations without a chat template."""
    check_data(recipe.data)
    tokenizer = load_tokenizer(recipe.backbone.path, trust_remote_code=recipe.backbone.trust_remote_code)
    check_data(recipe.data, tokenizer)
    return tokenizer


def check_data(data: Data, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Raise UserError for a file that is missing, empty, or cannot be read, for one without a known column, or, with the tokenizer, for
    conversations without a chat template.
    """
    held = [(data.eval, data)] if data.eval is not None and data.eval_rows else []
    for name, settings in [*((one.name, one) for one in data.per_dataset()), *held]:
        if names_file(name):
            column = find_column(read_rows(name, limit=FIRST), settings, name)
            if tokenizer is not None:
                reader_of(column, tokenizer, settings)
