"""``headstart regenerate``: replace a dataset's responses with the backbone's own, for training.

Heads predict their backbone's output, so they train best on it rather than on text by people or other models.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.support.errors import UserError
from headstart.support.files import as_path, require_writable, value_hash
from headstart.support.terminal import progress
from headstart.support.text import shortened
from headstart.training.data.data import say_unread, sound_rows
from headstart.training.data.rows import read_rows
from headstart.training.data.tokenise import begun_at, chat_settings, now
from headstart.training.features.caching import open_kept, write_cache
from headstart.training.features.served import KeptFeatures
from headstart.training.recipe.recipe import Data, Recipe, to_dict
from headstart.training.recipe.sections import Dataset
from headstart.training.regenerate.endpoint import Endpoint
from headstart.training.regenerate.in_process import InProcess
from headstart.training.regenerate.items import ERRORS, Item, read_items
from headstart.training.regenerate.partial import PartialFile, begun_with

DATA = ("train", "split", "subset", "format", "column", "columns", "template_kwargs", "template_time")
"""Keys of ``data`` that determine the rows; stored so that an error can name the one that changed."""
SAMPLING = ("temperature", "top_k", "top_p", "max_new_tokens", "unfinished")
"""Keys of ``regenerate`` that responses depend on; batch size, heads and concurrency affect only the speed."""
Responder = InProcess | Endpoint


def write_answers(recipe: Recipe, compile_first: bool = False) -> dict[str, Any]:
    """Write the new dataset, or go on with it; returns the report. ``compile_first``: what decoding on a CPU lacks. Raises UserError."""
    settings = recipe.regenerate
    if settings.out is None:
        raise UserError("regenerate.out is not set; name the file to write, as in regenerate.out=data/answers.jsonl")
    out = as_path("regenerate.out", settings.out)
    require_writable("regenerate.out", out)
    if out.exists():  # before the backbone is loaded
        raise UserError(f"regenerate.out={out} is there already; delete it, or choose another name")
    recipe = begun_at(recipe, [begun_with(out).get("data.template_time")], now())
    data = _one_dataset(recipe)
    limits = [limit for limit in (data.limit, settings.limit) if limit is not None]
    rows = read_rows(data.name, split=data.split, subset=data.subset, limit=min(limits, default=None))
    rows, bad = sound_rows(rows, data, data.name, asked=True)
    say_unread(bad)
    if bad.rows_bad:
        print(f"data      {bad.rows_bad:,} bad rows left out ({bad.bad_row})", file=sys.stderr)
    items = read_items(rows * settings.samples, data, data.name, _templated(recipe))
    keeper = open_kept(recipe) if _caches(recipe) else None
    responder = _responder(recipe, keeper, compile_first)
    with PartialFile(out, _dependencies(recipe, items) | responder.dependencies()) as partial:
        missing = [item for item in items if item.row not in partial.offsets]
        missing.sort(key=lambda item: item.row if settings.hours is None else item.seed(recipe.seed))
        before, start = partial.counts["tokens"], time.perf_counter()
        _answer(responder, missing, partial, len(items))
        seconds, tokens = time.perf_counter() - start, partial.counts["tokens"] - before
        written = partial.finish()
        counts, detail, set_aside, asked = partial.counts, partial.detail, partial.set_aside, len(partial.offsets)
    report = {
        "out": str(out), "rows": len(items), "rows_written": written, "rows_dropped": asked - written, "rows_not_asked": len(items) - asked,
        "turns": counts["turns"], "tokens": counts["tokens"], **{error: counts[error] for error in ERRORS},
        "rows_resumed": len(items) - len(missing), "set_aside": set_aside, "seconds": seconds, "tokens_per_second": tokens / seconds,
        **responder.report(),
    }  # fmt: skip
    _print(report, recipe, detail)
    if keeper is not None:
        keeper.close()
        answers = {"train": [Dataset(path=str(out))], "format": "auto", "column": None, "columns": None}
        report["cache"] = write_cache(recipe.but({"data": answers}), estimate=False)
    return report


def _caches(recipe: Recipe) -> bool:
    """Return True if the answers' features are cached as they are generated: a server extracts them, and there is a folder to keep them."""
    return recipe.features.endpoint is not None and recipe.cache.dir is not None


def _templated(recipe: Recipe) -> bool:
    """Whether a row's prompt is asked as a question; servers have templates of their own."""
    where, served = recipe.backbone, recipe.regenerate.endpoint or recipe.features.endpoint
    tokenizer = None if served else load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
    return recipe.data.format != "text" and (tokenizer is None or bool(chat_settings(recipe.data).template_of(tokenizer)))


def _responder(recipe: Recipe, keeper: KeptFeatures | None, compile_first: bool) -> Responder:
    if keeper is None:
        return InProcess(recipe, compile_first) if recipe.regenerate.endpoint is None else Endpoint(recipe)
    served = {"endpoint": f"{keeper.servers.urls[0]}/v1", "model": keeper.servers.model, "api_key": recipe.features.api_key}
    return Endpoint(recipe.but({"regenerate": served}), keeper)


def _one_dataset(recipe: Recipe) -> Data:
    """Return the settings of the recipe's only dataset. Raises UserError if it has several."""
    datasets = recipe.data.per_dataset()
    if len(datasets) > 1:
        raise UserError(
            f"data.train mixes {len(datasets)} datasets, and answers keep no weights; regenerate them one at a time "
            f"(data.train={datasets[0].name} regenerate.out=...), then mix the files of answers"
        )
    return datasets[0]


def _dependencies(recipe: Recipe, items: Sequence[Item]) -> dict[str, Any]:
    """Return the dependencies of the new rows that hold for all responders."""
    data, sampling = to_dict(recipe.data), to_dict(recipe.regenerate)
    rows = {"rows": len(items), "hash of the rows": value_hash([item.key for item in items])}
    answers = {f"regenerate.{key}": sampling[key] for key in SAMPLING} | {"seed": recipe.seed}
    return {f"data.{key}": data[key] for key in DATA} | rows | answers


def _answer(responder: Responder, missing: Sequence[Item], partial: PartialFile, rows: int) -> None:
    """Append missing rows to the partial file as they finish, beside a bar that moves with every token."""
    tokens, start = 0, time.perf_counter()

    def wrote(more: int) -> None:
        nonlocal tokens
        tokens += more
        bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):,.0f} tokens/s", refresh=False)
        bar.update(0)

    with progress("regenerating", "row", rows) as bar, closing(responder.respond(missing, wrote)) as finished:
        bar.initial = bar.n = rows - len(missing)
        for item in finished:
            line = {"row": item.row, "turns": item.turns, "tokens": item.tokens, "error": item.error, "detail": item.detail}
            partial.append(line | {"result": item.result()})
            bar.update()


def _said_of_tokens(report: dict[str, Any]) -> list[str]:
    """Say what is trained on where a server has answered: the tokens that were written, or those of the text."""
    with_ids, compared, other = (report.get(f"answers_{name}", 0) for name in ("with_token_ids", "compared", "tokenised_otherwise"))
    if "answers_with_token_ids" not in report:
        return []
    source = f"{with_ids:,} answers came with token ids" + ("" if with_ids else ", so training tokenises the text")
    found = f"{other:,} of {compared:,} compared are tokenised otherwise than they were written" if compared else "none could be compared"
    return [f"tokens    {source}; {found}"]


def _print(report: dict[str, Any], recipe: Recipe, detail: str) -> None:
    usual = {"format": "auto", "column": None, "columns": None}
    reset = "".join(f" data.{key}={default or 'null'}" for key, default in usual.items() if getattr(recipe.data, key) != default)
    tau = f", mean acceptance length (tau) {report['tau']:.2f}" if "tau" in report else ""
    rows = {error: f": rows {shortened(sorted(numbers))}" for error, numbers in report["set_aside"].items() if numbers}
    details = {"refused": f" ({detail})", "truncated": ", which is kept cut off" if recipe.regenerate.unfinished == "keep" else ""}
    errors = {error: f"{text}{details.get(error, '')}{rows.get(error, '')}" for error, text in ERRORS.items() if report[error]}
    print(
        f"answers   {report['out']}: {report['rows_written']:,} of {report['rows']:,} rows, {report['turns']:,} answers, "
        f"{report['tokens']:,} tokens",
        *(f"          {report[error]:,} rows had {text}" for error, text in errors.items()),
        *([f"          {report['rows_dropped']:,} rows had no whole answer and were dropped"] if report["rows_dropped"] else []),
        *([f"          {report['rows_not_asked']:,} rows were not asked in time (regenerate.hours)"] if report["rows_not_asked"] else []),
        *_said_of_tokens(report),
        f"speed     {report['tokens_per_second']:,.1f} tokens/s{tau}",
        f"next      train with data.train={report['out']}{reset}{f' cache.dir={recipe.cache.dir}' if _caches(recipe) else ''}",
        sep="\n",
        file=sys.stderr,
    )
