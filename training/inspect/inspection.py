"""What ``headstart inspect`` shows of a recipe: a sample with its loss mask, the data in numbers, what the heads will read.

The backbone's weights are not needed: its configuration says what can be tapped (training/plan/sketch.py).

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import Backbone, load_tokenizer
from headstart.heads.checkpoint import METADATA, template_hash
from headstart.support.errors import UserError
from headstart.support.token_text import cut
from headstart.training.data.batch_sampler import BatchSampler
from headstart.training.data.data import Sample, Splits, load_data, require_vocabulary
from headstart.training.features.source import require_packable
from headstart.training.inspect.checkpoint import describe
from headstart.training.plan.fake_model import FakeModels, draw
from headstart.training.recipe.recipe import Recipe, load_recipe

LEARNED, REST, SPECIAL = "\x1b[32m", "\x1b[2m", "\x1b[7m"
"""Of the terminal: green, dim, reversed."""
END = "\x1b[0m"
MARKS = "⟦", "⟧"
"""Around what is learned, where there are no colours."""
PERCENTILES = (0, 10, 50, 90, 99, 100)
BARS, WIDTH = 8, 40
"""Of the histogram: how many, and the longest in characters."""


def inspect(what: str, overrides: Sequence[str], row: int) -> tuple[dict[str, Any], list[str]]:
    """What there is to say of a recipe or of trained heads, as JSON holds it and as lines. Raises UserError for what is neither."""
    path = Path(what)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return inspect_recipe(load_recipe(what, overrides), row)
    if path.is_dir() and not (path / METADATA).is_file():
        raise UserError(
            f"{what} is a folder without {METADATA}: neither a recipe nor trained heads; give a recipe (.yaml), or a folder that "
            "training has saved heads in (save.dir)"
        )
    if overrides:
        raise UserError(f"{what} is taken for trained heads, of which nothing can be replaced ({overrides[0]}); a recipe ends in .yaml")
    return describe(what)


def inspect_recipe(recipe: Recipe, row: int) -> tuple[dict[str, Any], list[str]]:
    """Raises UserError for whatever training would refuse of the data, and for a sample that is not there."""
    sketch = draw(recipe, accelerator=False)
    require_packable(recipe, sketch.backbone)
    where = recipe.backbone
    tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
    splits = load_data(recipe.data, tokenizer, sketch.backbone.max_positions or sys.maxsize, progress=sys.stderr.isatty())
    require_vocabulary(splits, sketch.backbone.vocab)
    if not 0 <= row < len(splits.train):
        raise UserError(f"--row {row}: there are samples 0 to {len(splits.train) - 1}")
    sample = splits.train[row]
    pieces = _pieces(sample, tokenizer)
    found = {
        "row": row,
        "sample": [{"token": token, "text": text, "learn": learn, "special": special} for token, text, learn, special in pieces],
        "data": numbers(recipe, splits),
        "contract": contract(recipe, sketch, tokenizer),
        "vocabulary": coverage(recipe, sketch, splits.train),
    }
    return found, _lines(found, painted(pieces, colour()))


def colour() -> bool:
    """Whether there is a terminal that shows colours to someone who wants them."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


Piece = tuple[int, str, bool, bool]
"""Token, its text, whether it is learned, whether it is special."""


def _pieces(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    tokens, special = sample.tokens.tolist(), set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    texts = cut(tokenizer, tokens)
    return [(token, text, learn, token in special) for token, text, learn in zip(tokens, texts, sample.loss_mask.tolist(), strict=True)]


def painted(pieces: list[Piece], colours: bool) -> str:
    """The text; what is learned is green and the rest dim, special tokens are reversed. Without colours the learned stands in `MARKS`."""
    if colours:
        return "".join(f"{LEARNED if learn else REST}{SPECIAL * special}{text}{END}" for _, text, learn, special in pieces if text)
    out, inside = "", False
    for _, text, learn, _ in pieces:
        out += ("" if learn == inside else MARKS[inside]) + text
        inside = learn
    return out + MARKS[1] * inside


def numbers(recipe: Recipe, splits: Splits) -> dict[str, Any]:
    """Of the training samples: what became of the rows, and how long they are."""
    lengths = torch.tensor([len(sample.tokens) for sample in splits.train], dtype=torch.float64)
    longest = int(lengths.max())
    edges = [round(i * longest / BARS) for i in range(BARS + 1)]
    counts = torch.histogram(lengths, torch.tensor(edges, dtype=torch.float64).clamp(min=0) if longest >= BARS else BARS).hist
    found: dict[str, Any] = asdict(splits.stats) | {
        "roles": dict(splits.stats.roles),
        "share": splits.stats.label_tokens / splits.stats.tokens,
        "held_out": len(splits.eval),
        "percentiles": {str(q): int(lengths.quantile(q / 100, interpolation="nearest")) for q in PERCENTILES},
        "histogram": [[edges[i], edges[i + 1], int(count)] for i, count in enumerate(counts.tolist())],
        "said": str(splits.stats),
    }
    if recipe.data.packing:
        rows = BatchSampler(splits.train, recipe.train, recipe.seed, row_length=recipe.data.max_length).rows
        found["packed"] = {"rows": rows, "full": splits.stats.tokens / (rows * recipe.data.max_length)}
    return found


def contract(recipe: Recipe, sketch: FakeModels, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What the heads will read and depend on; of the weights' fingerprint nothing is known before they are loaded."""
    backbone = sketch.backbone
    if recipe.data.chat_template is not None:
        tokenizer.chat_template = recipe.data.chat_template
    return {
        "model_type": backbone.config.model_type,
        "hidden_size": backbone.dim,
        "num_hidden_layers": backbone.num_layers,
        "vocab_size": backbone.vocab,
        "tokenizer_size": len(tokenizer),
        "context": backbone.max_positions,
        "taps": {str(tap): layer_name(backbone, tap) for tap in sketch.taps},
        "norm": norm_name(backbone),
        "chat_template": template_hash(tokenizer),
    }


def layer_name(backbone: Backbone, tap: int) -> str:
    """The module whose output a tap is: the residual stream after so many layers, 0 the embedding."""
    if tap == 0:
        return _name(backbone, backbone.embed)
    return _name(backbone, backbone.layers[tap - 1])


def norm_name(backbone: Backbone) -> str | None:
    """The last norm, behind which the final hidden state is taken."""
    norms = [child for child in backbone.base.children() if "norm" in type(child).__name__.lower()]
    return _name(backbone, norms[-1]) if norms else None


def _name(backbone: Backbone, module: nn.Module) -> str:
    name = next((name for name, found in backbone.model.named_modules() if found is module), "")
    return f"{name} ({type(module).__name__})"


def coverage(recipe: Recipe, sketch: FakeModels, samples: list[Sample]) -> dict[str, Any]:
    """By head with a draft vocabulary: its size, and how many of the learned tokens lie in it, the most frequent ones."""
    counts_V: Tensor = torch.bincount(torch.cat([sample.tokens[sample.loss_mask] for sample in samples]), minlength=sketch.backbone.vocab)
    often_V = counts_V.sort(descending=True).values
    found = {}
    for name, drafter in sketch.drafters.items():
        if drafter.vocabulary is not None:
            size = len(drafter.vocabulary)
            kind = name or str(recipe.drafter["kind"])
            found[kind] = {"size": size, "of": sketch.backbone.vocab, "covered": float(often_V[:size].sum() / often_V.sum())}
    return found | {"different": int((counts_V > 0).sum())}


def _lines(found: dict[str, Any], text: str) -> list[str]:
    data, contract = found["data"], found["contract"]
    sample = found["sample"]
    learned = sum(piece["learn"] for piece in sample)
    longest = max(count for _, _, count in data["histogram"])
    bars = [f"  {first:>6,} - {end:<6,} {'#' * -(-WIDTH * count // longest)} {count:,}" for first, end, count in data["histogram"]]
    packed = [f"packed    into {data['packed']['rows']:,} rows, {data['packed']['full']:.1%} full"] if "packed" in data else []
    covered = [
        f"drafted   {name}: {one['size']:,} of {one['of']:,} tokens, {one['covered']:.2%} of the learned ones"
        for name, one in found["vocabulary"].items()
        if name != "different"
    ]
    return [
        f"sample    {found['row']}: {len(sample)} tokens, {learned} learned",
        text,
        "",
        f"data      {data['said']} ({data['share']:.1%}); {data['held_out']:,} held out",
        f"lengths   {', '.join(f'{q} %: {length:,}' for q, length in data['percentiles'].items())}",
        *bars,
        *packed,
        f"tokens    {found['vocabulary']['different']:,} different ones learned, of {contract['vocab_size']:,}",
        *covered,
        f"backbone  {contract['model_type']}: {contract['num_hidden_layers']} layers of {contract['hidden_size']}, vocabulary "
        f"{contract['vocab_size']:,} (tokenizer {contract['tokenizer_size']:,}), context {contract['context'] or 'not stated'}",
        *(f"tap {tap:<5} {name}" for tap, name in contract["taps"].items()),
        f"norm      {contract['norm'] or 'of a name that is not known'}, behind which the final hidden state is taken",
        f"template  {contract['chat_template'] or 'none'}",
    ]
