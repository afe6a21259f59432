"""The data of a run: rows as samples (tokens with a loss mask), the prompts for evaluation, and draft vocabularies: the most frequent
label tokens, and how much of the data they cover.

Shape suffixes: T positions, V backbone vocabulary, DV draft vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.chat.images import ImageReader, make_chat
from headstart.chat.messages import prompt_length
from headstart.heads.backbone.backbone import Backbone, load_tokenizer
from headstart.heads.backbone.features import image_reader
from headstart.support.errors import UserError, notice
from headstart.training.data.batches import Mix
from headstart.training.data.kept import Check, Splits, compare, keep_splits, read_splits, tokens_file
from headstart.training.data.rows import Row, names_file, read_rows
from headstart.training.data.samples import CONVERSATIONS, Column, Sample, Stats, find_column
from headstart.training.data.tokenise import chat_settings, make_samples, reader_of
from headstart.training.recipe.recipe import Data, Eval, Recipe

FIRST = 100
"""Rows of a file that are looked at before anything slow is loaded."""
LEAST, FEW = 0.01, 20
"""Share of bad rows from which on they end the run, whatever ``data.on_bad_row`` is; a single one among at least so many rows does not."""


def checked_tokenizer(recipe: Recipe) -> tuple[PreTrainedTokenizerBase, ImageReader | None]:
    """Load the tokenizer, and what reads the rows' images, once `check_data` has passed. Raises UserError, also without a chat template."""
    columns, tokenizer = check_data(recipe.data), load_tokenizer(recipe.backbone.path, trust_remote_code=recipe.backbone.trust_remote_code)
    images = read_images(recipe, tokenizer)
    for column in columns:
        reader_of(column, tokenizer, images=images)
    return tokenizer, images


def read_images(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> ImageReader | None:
    """Load what reads the images of a recipe's rows, if they have some. Raises UserError."""
    where = recipe.backbone
    return image_reader(where.path, tokenizer, trust_remote_code=where.trust_remote_code) if recipe.data.images else None


def check_data(data: Data) -> list[Column]:
    """Return the columns of the data's files. Raises UserError for a file that is missing, empty, or cannot be read, or without one."""
    named = [dataset for dataset in (*data.per_dataset(), *data.held_out()) if names_file(dataset.name)]
    return [find_column(read_rows(dataset.name, limit=FIRST), dataset, dataset.name) for dataset in named]


def load_for(
    recipe: Recipe, backbone: Backbone, tokenizer: PreTrainedTokenizerBase, images: ImageReader | None, ends: Sequence[int], bar: bool
) -> Splits:
    """Load a recipe's data (`load_data`), which the backbone's context and vocabulary must hold. Raises UserError."""
    context = backbone.max_positions or sys.maxsize
    splits = load_data(recipe.data, tokenizer, context, ends=ends, images=images, progress=bar)
    require_vocabulary([*splits.train, *splits.eval], min(backbone.vocab, len(backbone.embed.weight)))
    return splits


def load_data(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    *,
    ends: Sequence[int] = (),
    images: ImageReader | None = None,
    progress: bool = True,
) -> Splits:
    """Read and tokenise a recipe's data, or take what an earlier start kept; ``context``: the backbone's positions. Raises UserError."""
    if data.max_length > context:
        raise UserError(f"data.max_length={data.max_length} is longer than the backbone's context of {context}; lower it")
    file = tokens_file(data, tokenizer, ends)
    splits = read_splits(file) if file is not None else None
    if splits is None:
        splits = _make_splits(data, tokenizer, ends, images, progress)
        if file is not None:
            keep_splits(file, splits)
    say_unread(splits.stats)
    return splits


def _make_splits(data: Data, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], images: ImageReader | None, progress: bool) -> Splits:
    datasets, other = data.per_dataset(), data.held_out()
    read_from = [(one, read_rows(one.name, split=one.split, subset=one.subset, limit=one.limit)) for one in (*datasets, *other)]
    found = [sound_rows(named, one, one.name) for one, named in read_from]
    rows, counts = [sound for sound, _ in found], [stats for _, stats in found]
    rows, held = rows[: len(datasets)], [*zip(rows[len(datasets) :], other, strict=True)]
    if data.eval is None and data.eval_rows:
        rows, out = hold_out(rows, data.eval_rows, data.name)
        held = [(part, one) for part, one in zip(out, datasets, strict=True) if part]
    train: list[list[Sample]] = []
    for part, one in zip(rows, datasets, strict=True):
        read = reader_of(find_column(part, one, one.name), tokenizer, ends, images)
        samples, stats = make_samples(part, read, one, source=one.name, progress=progress)
        train, counts = [*train, samples], [*counts, stats]
    held_out: list[Sample] = []
    for part, one in held:
        uncut = one.model_copy(update={"overlong": "truncate"}) if data.splits_long else one  # later pieces are not prompts
        read = reader_of(find_column(part, one, one.name), tokenizer, ends, images)
        held_out += make_samples(part, read, uncut, source=f"the held-out rows of {one.name}")[0]
    check = sum((_check(part, tokenizer, one, ends, images) for part, one in zip(rows, datasets, strict=True)), Check(0, 0, stored=True))
    check.require()
    whole = [sample for samples in train for sample in samples]
    if images is not None and not any(sample.images for sample in whole):
        raise UserError(f"no row of {data.name} has an image; set data.images=false")
    weights = tuple(dataset.weight for dataset in data.train if dataset.weight is not None)
    mix = Mix(tuple(dataset.path for dataset in data.train), tuple(map(len, train)), weights) if len(weights) > 1 else None
    return Splits(whole, held_out, sum(counts, Stats()), mix, check if check.answers else None)


def sound_rows(rows: list[Row], data: Data, source: str, asked: bool = False) -> tuple[list[Row], Stats]:
    """Return the rows that can be read, with counts. Raises UserError if 1 % or more are bad, or one under ``data.on_bad_row=error``."""
    column, sound, stats = find_column(rows, data, source, asked), [], Stats()
    for number, row in enumerate(rows, 1):
        try:
            stats.unread.update(column.require(row, f"{source}, row {number}"))
        except UserError as error:
            if data.on_bad_row == "error":
                raise
            stats.rows_bad, stats.bad_row = stats.rows_bad + 1, stats.bad_row or str(error)
        else:
            sound.append(row)
    if stats.rows_bad >= LEAST * len(rows) and stats.rows_bad > (len(rows) >= FEW):
        below = "below 1 % they are skipped" if len(rows) >= FEW else f"one of at least {FEW} is skipped"
        many = f" ({stats.rows_bad:,} of {len(rows):,} rows are bad; {below})" if len(rows) > 1 else ""
        raise UserError(f"{stats.bad_row}{many}")
    return sound, stats


def say_unread(stats: Stats) -> None:
    """Name fields that nothing reads, if any: other trainers may obey one of them."""
    if stats.unread:
        notice(f"rows have fields that are not read: {', '.join(sorted(stats.unread))}")


def _check(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, data: Data, ends: Sequence[int], images: ImageReader | None) -> Check:
    """Compare some of a dataset's conversations with an independent side; no answers are compared where there are none."""
    column, settings = find_column(rows, data, data.name), chat_settings(data, ends)
    exact = column.kind == "tokens"
    if exact:  # the text beside the tokens
        name = next((name for name in CONVERSATIONS if rows[0].get(name) is not None), "")
        column = Column(name, "chat" if name else "text", data.model_copy(update={"format": "auto"}))
    if column.kind == "text" or data.loss_on == "all" or not settings.template_of(tokenizer):
        return Check(0, 0, stored=True)
    return compare(rows, data.name, column, make_chat(tokenizer, settings, images), exact)


def require_vocabulary(samples: Sequence[Sample], vocab: int) -> None:
    """Raise UserError if a token is outside the backbone's vocabulary of size ``vocab``."""
    largest = max(int(sample.tokens.max()) for sample in samples)
    if largest >= vocab:
        raise UserError(f"the tokenizer gives token {largest}, but the backbone embeds and scores {vocab} alone; use the backbone's own")


def hold_out(datasets: Sequence[list[Row]], count: int, source: str) -> tuple[list[list[Row]], list[list[Row]]]:
    """Split each dataset's rows into training and ``count`` held-out rows, evenly spaced over all, since files are often sorted."""
    total = sum(map(len, datasets))
    if count >= total:
        raise UserError(f"data.eval_rows={count} would hold out all {total} rows of {source}; lower it, or set data.eval")
    held = {i * total // count for i in range(count)}
    kept, out, first = list[list[Row]](), list[list[Row]](), 0
    for rows in datasets:
        kept.append([row for i, row in enumerate(rows, first) if i not in held])
        out.append([row for i, row in enumerate(rows, first) if i in held])
        first += len(rows)
    if not all(kept):
        raise UserError(f"data.eval_rows={count} would hold out all rows of one of {source}; lower it, or set data.eval")
    return kept, out


def prompts(samples: Sequence[Sample], settings: Eval, context: int) -> list[Sample]:
    """Return up to ``settings.prompts`` prompts with room for an answer: conversations up to the last one, or beginnings of plain texts."""
    longest = context - settings.max_new_tokens
    fitting = [prompt for sample in samples if 0 < len((prompt := _prompt(sample, settings.prompt_tokens)).tokens) <= longest]
    if samples and not fitting:
        fault = f"no held-out prompt leaves eval.max_new_tokens={settings.max_new_tokens} of the backbone's context of {context}"
        raise UserError(f"{fault}; lower eval.max_new_tokens, eval.prompt_tokens or data.max_length")
    return fitting[: settings.prompts]


def _prompt(sample: Sample, prompt_tokens: int) -> Sample:
    if sample.loss_mask.all():
        return sample.cut(prompt_length(len(sample.tokens), prompt_tokens))
    labels = sample.loss_mask.nonzero().flatten().tolist()
    return sample.cut(next(i for i in range(labels[-1], -1, -1) if i == 0 or not sample.loss_mask[i - 1]))


class LabelCounts(NamedTuple):
    """How often each token is a label token (int64 ``[V]``)."""

    training_V: Tensor
    held_out_V: Tensor | None
    """None if nothing is held out."""

    @classmethod
    def of(cls, splits: Splits, vocab: int) -> LabelCounts:
        """Count those of the training and the held-out data. Raises UserError as `count_labels` does."""
        return cls(count_labels(splits.train, vocab), count_labels(splits.eval, vocab) if splits.eval else None)

    def coverage(self, tokens_DV: Tensor) -> dict[str, Any]:
        """Return the sizes and the share of label tokens covered, in training and held-out data (None if nothing is held out)."""
        names, sides = ("training", "held_out"), (self.training_V, self.held_out_V)
        shares = [None if side is None else int(side[tokens_DV.cpu()].sum()) / max(int(side.sum()), 1) for side in sides]
        return {"size": len(tokens_DV), "vocab_size": len(self.training_V), **dict(zip(names, shares, strict=True))}


def count_labels(samples: Sequence[Sample], vocab: int) -> Tensor:
    """Count each token among the label tokens (int64 ``[V]``). Raises UserError for a token outside the vocabulary."""
    require_vocabulary(samples, vocab)
    return torch.bincount(torch.cat([sample.tokens[sample.loss_mask] for sample in samples]), minlength=vocab)


def most_frequent(counts_V: Tensor, size: int) -> Tensor:
    """Return the ``size`` most frequent tokens, ascending; ties go to the lower id. Raises UserError if there are not as many."""
    if not 1 <= size <= len(counts_V):
        raise UserError(f"a draft vocabulary has between 1 and {len(counts_V)} tokens, as many as the backbone's; got {size}")
    return counts_V.sort(descending=True, stable=True).indices[:size].sort().values


def describe_coverage(report: dict[str, Any]) -> str:
    """Describe what `LabelCounts.coverage` returns: ``2,048 of 4,096 tokens, 96.1 % of the label tokens (held out 95.8 %)``."""
    held_out = "" if report["held_out"] is None else f" (held out {report['held_out']:.1%})"
    return f"{report['size']:,} of {report['vocab_size']:,} tokens, {report['training']:.1%} of the label tokens{held_out}"
