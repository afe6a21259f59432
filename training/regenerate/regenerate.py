"""What ``headstart regenerate`` does: the backbone's own answers to a dataset's prompts, as a dataset to train on.

Heads are to draft what their backbone says, not what a person or another model said; so that is what to teach them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from tqdm.auto import tqdm

from headstart.support.errors import UserError
from headstart.support.files import require_writable, value_hash
from headstart.training.data.rows import read_rows
from headstart.training.recipe.recipe import Recipe, to_dict
from headstart.training.regenerate.answers import FAULTS, Asked, read_asked
from headstart.training.regenerate.endpoint import Endpoint
from headstart.training.regenerate.in_process import InProcess
from headstart.training.regenerate.partial import Partial

DATA = ("train", "split", "subset", "format", "column")
"""Keys of ``data`` by which the rows can differ: they tell why."""
SAMPLING = ("temperature", "top_k", "top_p", "max_new_tokens")
"""Keys of ``regenerate`` that answers depend on; batch, heads and the number of requests change how fast they come."""


class Answerer(Protocol):
    """Who answers."""

    def made(self) -> dict[str, Any]:
        """What the answers depend on besides prompts, seed and sampling, by name."""

    def finish(self, asked: Sequence[Asked]) -> Generator[Asked]:
        """Each row once it waits no more, in any order."""

    def report(self) -> dict[str, Any]:
        """What is to be told of how the answers came about."""


def write_answers(recipe: Recipe) -> dict[str, Any]:
    """Write what is missing of the recipe's new dataset, and finish it; the result as JSON holds it. Raises UserError."""
    settings = recipe.regenerate
    if settings.out is None:
        raise UserError("regenerate.out is not set; name the file to write, as in regenerate.out=data/answers.jsonl")
    out = Path(settings.out).expanduser()
    require_writable("regenerate.out", out)
    if out.exists():   # before the backbone is loaded
        raise UserError(f"regenerate.out={out} is there already; delete it, or choose another name")
    limits = [limit for limit in (recipe.data.limit, settings.limit) if limit is not None]
    rows = read_rows(recipe.data.train, split=recipe.data.split, subset=recipe.data.subset, limit=min(limits, default=None))
    asked = read_asked(rows, recipe.data, recipe.data.train)
    answerer: Answerer = InProcess(recipe) if settings.endpoint is None else Endpoint(recipe)
    with Partial(out, _made(recipe, asked) | answerer.made()) as partial:
        missing = [one for one in asked if one.row not in partial.places]
        before, start = partial.counts["tokens"], time.perf_counter()
        _answer(answerer, missing, partial, len(asked))
        seconds, tokens = time.perf_counter() - start, partial.counts["tokens"] - before
        written = partial.finish()
        counts, note = partial.counts, partial.note
    result = {
        "out": str(out), "rows": len(asked), "written": written, "dropped": len(asked) - written, "turns": counts["turns"],
        "tokens": counts["tokens"], **{fault: counts[fault] for fault in FAULTS}, "resumed": len(asked) - len(missing),
        "seconds": seconds, "tokens_per_second": tokens / seconds, **answerer.report(),
    }  # fmt: skip
    _say(result, recipe, note)
    return result


def _made(recipe: Recipe, asked: Sequence[Asked]) -> dict[str, Any]:
    """What the rows of the new dataset depend on, whoever answers."""
    data, sampling = to_dict(recipe.data), to_dict(recipe.regenerate)
    return (
        {f"data.{key}": data[key] for key in DATA}
        | {"rows": len(asked), "hash of the rows": value_hash([one.key for one in asked])}
        | {f"regenerate.{key}": sampling[key] for key in SAMPLING}
        | {"seed": recipe.seed}
    )


def _answer(answerer: Answerer, missing: Sequence[Asked], partial: Partial, rows: int) -> None:
    """Every missing row into the half-done file, as it finishes."""
    turns = partial.counts["turns"]
    with tqdm(total=rows, initial=rows - len(missing), desc="answering", unit="row") as bar, closing(_finished(answerer, missing)) as found:
        for one in found:
            partial.append(
                {
                    "row": one.row, "turns": one.turns, "tokens": one.tokens, "fault": one.fault, "note": one.note,
                    "answered": one.answered(),
                }  # fmt: skip
            )
            said = {name: f"{value:.2f}" for name, value in answerer.report().items() if name == "tau"}
            bar.set_postfix(turns=partial.counts["turns"] - turns, **said, refresh=False)
            bar.update()


def _finished(answerer: Answerer, missing: Sequence[Asked]) -> Generator[Asked]:
    """Rows once they wait no more; closing it ends what is under way."""
    yield from (one for one in missing if not one.waits)   # there is nothing to ask
    yield from answerer.finish([one for one in missing if one.waits])


def _say(result: dict[str, Any], recipe: Recipe, note: str) -> None:
    again = {"data.format": recipe.data.format != "auto", "data.column": recipe.data.column is not None}
    reset = "".join(f" {key}={'auto' if key == 'data.format' else 'null'}" for key, needed in again.items() if needed)
    tau = f", tau {result['tau']:.2f} (tokens per backbone pass, its own included)" if "tau" in result else ""
    told = {fault: f"{what}{f' ({note})' if fault == 'refused' else ''}" for fault, what in FAULTS.items() if result[fault]}
    print(
        "\n".join(
            [
                f"answers   {result['out']}: {result['written']:,} of {result['rows']:,} rows, {result['turns']:,} answers, "
                f"{result['tokens']:,} tokens",
                *(f"          {result[fault]:,} rows had {what}" for fault, what in told.items()),
                *([f"          {result['dropped']:,} rows had no whole answer and were dropped"] if result["dropped"] else []),
                f"speed     {result['tokens_per_second']:,.1f} tokens/s{tau}",
                f"next      train with data.train={result['out']}{reset}",
            ]
        ),
        file=sys.stderr,
    )
