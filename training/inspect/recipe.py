"""Inspect a recipe: a sample with its loss mask, data statistics, and the hidden layers that the heads use.

The backbone's weights are not needed, only its configuration (`plan.fake_model`).

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from rich.console import RenderableType
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import Backbone, load_tokenizer
from headstart.heads.backbone.end_tokens import read_end_tokens
from headstart.support.chat.template import template_hash
from headstart.support.errors import UserError
from headstart.support.terminal import labelled
from headstart.training.data.batch_sampler import BatchSampler
from headstart.training.data.data import Splits, load_data, require_vocabulary
from headstart.training.data.tokenise import chat_settings
from headstart.training.data.vocabulary import coverage_report, describe_coverage, label_counts, most_frequent
from headstart.training.features.source import require_packable
from headstart.training.inspect.sample import paint, read_tokens
from headstart.training.plan.fake_model import FakeModels, make_fake_models
from headstart.training.recipe.recipe import Recipe

PERCENTILES = (0, 10, 50, 90, 99, 100)
BINS, BAR_WIDTH = 8, 40
"""Number of bins of the length histogram, and its width in characters."""


def inspect_recipe(recipe: Recipe, row: int, marks: bool) -> tuple[dict[str, Any], list[RenderableType]]:
    """Return the report and the output to print. Raises UserError for data that training would reject or a nonexistent sample."""
    models = make_fake_models(recipe, accelerator=False)
    require_packable(recipe, models.backbone)
    where = recipe.backbone
    tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
    ends = read_end_tokens(where.path, trust_remote_code=where.trust_remote_code)
    splits = load_data(recipe.data, tokenizer, models.backbone.max_positions or sys.maxsize, ends=ends, progress=sys.stderr.isatty())
    require_vocabulary(splits, models.backbone.vocab)
    if not 0 <= row < len(splits.train):
        raise UserError(f"--row {row}: there are samples 0 to {len(splits.train) - 1}")
    tokens = read_tokens(splits.train[row], tokenizer)
    report = {
        "row": row,
        "sample": [asdict(token) for token in tokens],
        "data": data_statistics(recipe, splits),
        "contract": contract(recipe, models, tokenizer),
        "vocabulary": vocabulary_coverage(recipe, models, splits),
    }
    return report, _screen(report, paint(tokens, marks))


def data_statistics(recipe: Recipe, splits: Splits) -> dict[str, Any]:
    """Count training rows and samples, and return the distribution of sample lengths."""
    lengths = torch.tensor([len(sample.tokens) for sample in splits.train], dtype=torch.float64)
    longest = int(lengths.max())
    edges = [round(i * longest / BINS) for i in range(BINS + 1)]
    counts = torch.histogram(lengths, torch.tensor(edges, dtype=torch.float64).clamp(min=0) if longest >= BINS else BINS).hist
    statistics: dict[str, Any] = asdict(splits.stats) | {
        "roles": dict(splits.stats.roles),
        "label_share": splits.stats.label_tokens / splits.stats.tokens,
        "held_out": len(splits.eval),
        "percentiles": percentiles(lengths),
        "histogram": [[edges[i], edges[i + 1], int(count)] for i, count in enumerate(counts.tolist())],
        "summary": str(splits.stats),
        "mix": None if splits.mix is None else str(splits.mix),
        "check": None if splits.check is None else splits.check.report(),
    }
    if recipe.data.packing:
        rows = BatchSampler(splits.train, recipe.train, recipe.seed, row_length=recipe.data.max_length, mix=splits.mix).rows
        statistics["packed"] = {"rows": rows, "fill": splits.stats.tokens / (rows * recipe.data.max_length)}
    return statistics


def percentiles(lengths: Tensor) -> dict[str, int]:
    """Return the `PERCENTILES` of any number of lengths; `torch.quantile` takes at most 2^24."""
    found = np.percentile(lengths.numpy(), PERCENTILES, method="nearest")
    return {str(q): int(value) for q, value in zip(PERCENTILES, found, strict=True)}


def contract(recipe: Recipe, models: FakeModels, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the properties that the heads depend on, without the weights' fingerprint, since they are not loaded."""
    backbone = models.backbone
    return {
        "model_type": backbone.config.model_type,
        "hidden_size": backbone.dim,
        "num_hidden_layers": backbone.num_layers,
        "vocab_size": backbone.vocab,
        "tokenizer_size": len(tokenizer),
        "context": backbone.max_positions,
        "adapter": recipe.backbone.adapter,
        "taps": {str(tap): layer_name(backbone, tap) for tap in models.taps},
        "final_norm": norm_name(backbone),
        "chat_template": template_hash(chat_settings(recipe.data).template_of(tokenizer)),
    }


def layer_name(backbone: Backbone, tap: int) -> str:
    """Return the name of the module whose output is the tap: the embedding for 0, else decoder layer ``tap - 1``."""
    return _name(backbone, backbone.embed if tap == 0 else backbone.layers[tap - 1])


def norm_name(backbone: Backbone) -> str | None:
    """Return the name of the final norm, whose output is the final hidden state."""
    norms = [child for child in backbone.base.children() if "norm" in type(child).__name__.lower()]
    return _name(backbone, norms[-1]) if norms else None


def _name(backbone: Backbone, module: nn.Module) -> str:
    name = next((name for name, other in backbone.model.named_modules() if other is module), "")
    return f"{name} ({type(module).__name__})"


def vocabulary_coverage(recipe: Recipe, models: FakeModels, splits: Splits) -> dict[str, Any]:
    """Count distinct label tokens, and report the coverage of each draft vocabulary that training will choose."""
    counts, drafters = label_counts(splits, models.backbone.vocab), {}
    for name, drafter in models.drafters.items():
        if drafter.vocabulary is not None and drafter.lora is None:   # an adapted drafter keeps its vocabulary
            chosen = most_frequent(counts.training_V, len(drafter.vocabulary))
            drafters[name or str(recipe.drafter["kind"])] = coverage_report(counts, chosen)
    return {"distinct_label_tokens": int((counts.training_V > 0).sum()), "drafters": drafters}


def _screen(report: dict[str, Any], sample: RenderableType) -> list[RenderableType]:
    data, contract, vocabulary = report["data"], report["contract"], report["vocabulary"]
    labels = sum(token["loss"] for token in report["sample"])
    packed = [("packed", f"into {data['packed']['rows']:,} rows, {data['packed']['fill']:.1%} full")] if "packed" in data else []
    return [
        labelled([("sample", f"{report['row']}: {len(report['sample'])} tokens, {labels} of them label tokens")]),
        sample,
        "",
        labelled([
            ("data", f"{data['summary']} ({data['label_share']:.1%}); {data['held_out']:,} held out"),
            ("lengths", ", ".join(f"{q} %: {length:,}" for q, length in data["percentiles"].items())),
        ]),
        _histogram(data["histogram"]),
        labelled([
            *([("answers", data["check"]["said"])] if data["check"] else []),
            *([("warning", data["check"]["warning"])] if data["check"] and data["check"]["warning"] else []),
            *([("mix", data["mix"])] if data["mix"] else []),
            *packed,
            ("tokens", f"{vocabulary['distinct_label_tokens']:,} distinct label tokens, of {contract['vocab_size']:,}"),
            *(
                ("drafted", f"{name}: {describe_coverage(one)}")
                for name, one in vocabulary["drafters"].items()
            ),
            ("backbone", f"{contract['model_type']}: {contract['num_hidden_layers']} layers of {contract['hidden_size']}, vocabulary "
             f"{contract['vocab_size']:,} (tokenizer {contract['tokenizer_size']:,}), context {contract['context'] or 'unknown'}"),
            *([("adapter", contract["adapter"])] if contract["adapter"] else []),
            *((f"tap {tap}", name) for tap, name in contract["taps"].items()),
            ("norm", f"{contract['final_norm'] or 'unknown'}, whose output is the final hidden state"),
            ("template", contract["chat_template"] or "none"),
        ]),
    ]  # fmt: skip


def _histogram(bins: list[list[int]]) -> Table:
    most = max(count for _, _, count in bins)
    table = Table.grid(padding=(0, 1), pad_edge=True)
    for justify in ("right", "center", "left", "left"):
        table.add_column(justify=justify)
    for first, end, count in bins:
        table.add_row(f"{first:,}", "-", f"{end:,}", f"{'#' * -(-BAR_WIDTH * count // most)} {count:,}")
    return table
