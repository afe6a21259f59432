"""The samples of rows, as a recipe's data makes them."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from headstart.support.json_text import Row
from headstart.training.data import tokenise
from headstart.training.data.samples import Sample, Stats, find_column
from headstart.training.recipe.recipe import Data


def make_samples(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, data: Data, *, source: str, ends: Sequence[int] = ()
) -> tuple[list[Sample], Stats]:
    """See `tokenise.make_samples`."""
    read = tokenise.reader_of(find_column(rows, data, source), tokenizer, ends)
    return tokenise.make_samples(rows, read, data, source=source)
