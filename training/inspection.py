"""``headstart inspect`` for a recipe or a checkpoint.

Of a recipe: a sample with its loss mask, data statistics, and the hidden layers that the heads use. The backbone's weights are not needed,
only its configuration (`plan.fake_model`). Of a checkpoint, without loading it or its backbone: metadata, and tensor shapes.

Shape suffixes: V vocabulary.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from headstart.chat.images import inline, shown
from headstart.chat.template import template_hash
from headstart.heads.backbone.head_only import final_norm
from headstart.heads.backbone.model_config import read_end_tokens
from headstart.heads.card import METADATA
from headstart.heads.checkpoint import read_metadata, weights_file
from headstart.support.errors import UserError
from headstart.support.files import file_hash, settle
from headstart.support.hub import local_or_shipped
from headstart.support.terminal import Section, labelled, page
from headstart.support.text import gigabytes, token_texts, visible
from headstart.training.data.data import LabelCounts, checked_tokenizer, describe_coverage, load_for, most_frequent
from headstart.training.data.kept import Splits
from headstart.training.data.samples import Sample
from headstart.training.data.tokenise import chat_settings
from headstart.training.features.source import require_packable
from headstart.training.plan.fake_model import FakeModels, make_fake_models
from headstart.training.recipe.recipe import Recipe, load_recipe
from headstart.training.recipe.yaml_text import read_extended

LABEL, CONTEXT, SPECIAL = "green", "dim", "reverse"
"""Styles of label, context and special tokens."""
BRACKETS = "⟦", "⟧"
"""Marks of label tokens in output without colours."""
PERCENTILES = (0, 10, 50, 90, 99, 100)


def read_tokens(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return each ``token`` with its ``text``, whether it has a ``loss``, and whether it is ``special``."""
    tokens, special = sample.tokens.tolist(), set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    texts, losses = token_texts(tokenizer, tokens), sample.loss_mask.tolist()
    rows = zip(tokens, texts, losses, strict=True)
    return [{"token": token, "text": text, "loss": loss, "special": token in special} for token, text, loss in rows]


def paint(tokens: list[dict[str, Any]], marks: bool) -> Text:
    """Show label tokens green, context dim and special tokens reversed; with ``marks``, label tokens in brackets instead."""
    painted, inside = Text(overflow="fold"), False
    for token in tokens:
        if marks:
            painted.append(("" if token["loss"] == inside else BRACKETS[inside]) + visible(token["text"]))
            inside = token["loss"]
        else:
            style = f"{LABEL if token['loss'] else CONTEXT}{f' {SPECIAL}' if token['special'] else ''}"
            painted.append(visible(token["text"]), style=style)
    return painted.append(BRACKETS[1] if inside else "")


def sample_page(report: dict[str, Any], recipe: str) -> str:
    """Return the page for a report on a recipe: the sample as a person reads it."""
    data, tokens = report["data"], report["sample"]
    last = max((i for i, token in enumerate(tokens) if token["loss"]), default=-1)
    legend = Markup(
        "<p><span class=a>label</span> the model writes it: trained on &nbsp; <span class=soft>prompt</span> the model reads it before it"
        ' answers &nbsp; <span class="soft unused">neither</span> after the last label: read, and not trained on</p>'
    )
    parts = ["a" if token["loss"] else "soft" if i < last else "soft unused" for i, token in enumerate(tokens)]
    span = Markup('<span class="{}" title="{}">{}</span>')
    spans = [span.format(part + " special" * tok["special"], tok["token"], tok["text"]) for part, tok in zip(parts, tokens, strict=True)]
    about = "What is trained on, token by token; the id of a token is shown where the pointer rests on it."
    text = Markup("<div class=text>{}</div>").format(Markup("").join(spans))
    check = [data["check"]["said"]] if data["check"] else []
    img = Markup('<p><img src="{}" alt="" height=160><br>{}</p>')
    pictures = [img.format(inline(image["name"], "image"), _said(image)) for image in report["images"]]
    sections = [Section(f"Sample {report['row']}", about, [legend, *pictures, text])]
    return page("training sample", [f"{recipe}: {data['summary']}", *check], sections)


def _said(image: dict[str, Any]) -> str:
    (width, height), (start, end) = image["size"], image["place"]
    return f"{shown(image['name'])}: {width} x {height} pixels, {image['tokens']} tokens ({start} to {end - 1}), no labels"


def inspect_recipe(recipe: Recipe, row: int, marks: bool) -> tuple[dict[str, Any], list[RenderableType]]:
    """Return the report and the output to print. Raises UserError for data that training would reject or a nonexistent sample."""
    tokenizer, images = checked_tokenizer(recipe)
    models = make_fake_models(recipe, accelerator=False)
    require_packable(recipe, models.backbone)
    ends = read_end_tokens(recipe.backbone.path, trust_remote_code=recipe.backbone.trust_remote_code)
    splits = load_for(recipe, models.backbone, tokenizer, images, ends, bar=sys.stderr.isatty())
    if not 0 <= row < len(splits.train):
        raise UserError(f"--row {row}: there are samples 0 to {len(splits.train) - 1}")
    sample = splits.train[row]
    tokens = read_tokens(sample, tokenizer)
    report = {
        "row": row,
        "sample": tokens,
        "images": [{"name": image.name, "size": image.size, "tokens": image.tokens, "place": image.place} for image in sample.images],
        "data": data_statistics(recipe, splits),
        "contract": contract(recipe, models, tokenizer),
        "vocabulary": vocabulary_coverage(recipe, models, splits),
    }
    return report, _screen_of_recipe(report, paint(tokens, marks))


def data_statistics(recipe: Recipe, splits: Splits) -> dict[str, Any]:
    """Count training rows and samples, and return the distribution of sample lengths."""
    lengths = np.percentile([len(sample.tokens) for sample in splits.train], PERCENTILES, method="nearest")
    statistics: dict[str, Any] = asdict(splits.stats) | {
        "roles": dict(splits.stats.roles),
        "unread": ", ".join(sorted(splits.stats.unread)),
        "label_share": splits.stats.label_tokens / splits.stats.tokens,
        "held_out": len(splits.eval),
        "percentiles": {str(q): int(length) for q, length in zip(PERCENTILES, lengths, strict=True)},
        "summary": str(splits.stats),
        "mix": None if splits.mix is None else str(splits.mix),
        "check": None if splits.check is None else splits.check.report(),
    }
    if recipe.data.packing:
        rows = splits.feed(recipe).rows
        statistics["packed"] = {"rows": rows, "fill": splits.stats.tokens / (rows * recipe.data.max_length)}
    return statistics


def contract(recipe: Recipe, models: FakeModels, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the properties that the heads depend on, without the weights' fingerprint, since they are not loaded."""
    backbone = models.backbone
    named: dict[Any, str] = {module: f"{name} ({type(module).__name__})" for name, module in backbone.model.named_modules()}
    return {
        "model_type": backbone.config.model_type,
        "hidden_size": backbone.dim,
        "num_hidden_layers": backbone.num_layers,
        "vocab_size": backbone.vocab,
        "tokenizer_size": len(tokenizer),
        "context": backbone.max_positions,
        "adapter": recipe.backbone.adapter,
        "taps": {str(tap): named[backbone.layers[tap - 1] if tap else backbone.embed] for tap in models.taps},
        "final_norm": named.get(final_norm(backbone.model)),
        "chat_template": template_hash(chat_settings(recipe.data).template_of(tokenizer)),
    }


def vocabulary_coverage(recipe: Recipe, models: FakeModels, splits: Splits) -> dict[str, Any]:
    """Count distinct label tokens, and report the coverage of each draft vocabulary that training will choose."""
    counts, drafters = LabelCounts.of(splits, models.backbone.vocab), {}
    for name, drafter in models.drafters.items():
        if drafter.vocabulary is not None:
            chosen = most_frequent(counts.training_V, len(drafter.vocabulary))
            drafters[name or str(recipe.drafter["kind"])] = counts.coverage(chosen)
    return {"distinct_label_tokens": int((counts.training_V > 0).sum()), "drafters": drafters}


def _screen_of_recipe(report: dict[str, Any], sample: RenderableType) -> list[RenderableType]:
    data, contract, vocabulary = report["data"], report["contract"], report["vocabulary"]
    labels = sum(token["loss"] for token in report["sample"])
    packed = [("packed", f"into {data['packed']['rows']:,} rows, {data['packed']['fill']:.1%} full")] if "packed" in data else []
    return [
        labelled([("sample", f"{report['row']}: {len(report['sample'])} tokens, {labels} of them label tokens"),
                  *(("image", _said(image)) for image in report["images"])]),
        sample,
        "",
        labelled([
            ("data", f"{data['summary']} ({data['label_share']:.1%}); {data['held_out']:,} held out"),
            ("lengths", ", ".join(f"{q} %: {length:,}" for q, length in data["percentiles"].items())),
            *([("answers", data["check"]["said"])] if data["check"] else []),
            *([("warning", data["check"]["warning"])] if data["check"] and data["check"]["warning"] else []),
            *([("mix", data["mix"])] if data["mix"] else []),
            *packed,
            ("tokens", f"{vocabulary['distinct_label_tokens']:,} distinct label tokens, of {contract['vocab_size']:,}"),
            *(
                ("drafted", f"{name}: {describe_coverage(coverage)}")
                for name, coverage in vocabulary["drafters"].items()
            ),
            ("backbone", f"{contract['model_type']}: {contract['num_hidden_layers']} layers of {contract['hidden_size']}, vocabulary "
             f"{contract['vocab_size']:,} (tokenizer {contract['tokenizer_size']:,}), context {contract['context'] or 'unknown'}"),
            *([("adapter", contract["adapter"])] if contract["adapter"] else []),
            *((f"tap {tap}", name) for tap, name in contract["taps"].items()),
            ("norm", f"{contract['final_norm'] or 'unknown'}, whose output is the final hidden state"),
            ("template", contract["chat_template"] or "none"),
        ]),
    ]  # fmt: skip


# A checkpoint.

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
FLOATS = ("F64", "F32", "F16", "BF16")
PROVENANCE = ("steps", "tokens", "tau", "command", "commit", "versions", "chat_template", "init", "draft_vocabulary")


def inspect_checkpoint(path: str) -> tuple[dict[str, Any], list[RenderableType]]:
    """Return the report on a folder or hub id, and the output to print. Raises UserError for missing or damaged heads."""
    folder, metadata = read_metadata(path)
    file = weights_file(path, folder, metadata)
    matches = file_hash(file) == metadata["weights"]["sha256"]
    tensors = _tensors(file)
    steps = [path.name.removeprefix("step-") for path in (folder / "state").glob("step-*")]
    report = {
        **{key: metadata[key] for key in ("kind", "arguments", "backbone")},
        "contract": {key: value for key, value in metadata["contract"].items() if key != "weights"},
        "tensors": tensors,
        "parameters": sum(tensor["elements"] for tensor in tensors if tensor["dtype"] in FLOATS),
        "file": file.name,
        "bytes": file.stat().st_size,
        "weights_match_hash": matches,
        "provenance": {key: metadata["provenance"].get(key) for key in PROVENANCE},
        "resumable_steps": sorted(int(step) for step in steps if step.isdecimal()),
    }
    return report, _screen_of_checkpoint(path, report)


def _tensors(file: Path) -> list[dict[str, Any]]:
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a mapping)
            shapes = {name: (tensor.get_shape(), tensor.get_dtype()) for name, tensor in slices.items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is damaged ({error}); train or fetch the heads again") from None
    return [
        {
            "name": name, "shape": list(shape), "dtype": dtype, "elements": math.prod(shape),
            "bytes": math.prod(shape) * BITS.get(dtype, 8) // 8,
        }
        for name, (shape, dtype) in shapes.items()
    ]  # fmt: skip


def _screen_of_checkpoint(path: str, report: dict[str, Any]) -> list[RenderableType]:
    provenance, contract = report["provenance"], report["contract"]
    start = provenance["init"]
    arguments = ", ".join(f"{name}={value}" for name, value in report["arguments"].items())
    versions = ", ".join(f"{name} {number}" for name, number in (provenance["versions"] or {}).items())
    trained = [f"{provenance[key]:,} {key}" for key in ("steps", "tokens") if provenance[key] is not None]
    trained += [f"mean acceptance length (tau) {provenance['tau']:.3f}"] if provenance["tau"] is not None else []
    state = "match their hash" if report["weights_match_hash"] else "do NOT match their hash: train or fetch them again"
    tensors = Table.grid(padding=(0, 2), pad_edge=True)
    for tensor in report["tensors"]:
        tensors.add_row(tensor["name"], tensor["dtype"], " x ".join(map(str, tensor["shape"])) or "1")
    rows = [
        ("backbone", f"{report['backbone'] or 'not named'}: {', '.join(f'{key} {value}' for key, value in contract.items())}"),
        ("template", provenance["chat_template"] or "none"),
        ("trained", ", ".join(trained) or "unknown"),
        *([("started", f"from {start['path']}, {start['weights']['file']} {start['weights']['sha256'][:16]}")] if start else []),
        *([("drafted", describe_coverage(provenance["draft_vocabulary"]))] if provenance["draft_vocabulary"] else []),
        *([("command", provenance["command"])] if provenance["command"] else []),
        *([("versions", versions)] if versions else []),
        *([("resumes", f"from step {', '.join(map(str, report['resumable_steps']))}")] if report["resumable_steps"] else []),
    ]
    return [
        labelled([
            ("heads", f"{path}: {report['kind']} ({arguments})"),
            ("size", f"{report['parameters']:,} parameters, {gigabytes(report['bytes'])} in {report['file']}; the weights {state}"),
        ]),
        tensors,
        labelled(rows),
    ]  # fmt: skip


def inspect(target: str, overrides: Sequence[str], row: int, marks: bool) -> tuple[dict[str, Any], list[RenderableType]]:
    """Return the report and the output to print; ``marks``: label tokens in brackets, not in colours. Raises UserError."""
    path = local_or_shipped(target)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        report, screen = inspect_recipe(load_recipe(target, overrides), row, marks)
        extended = [str(file) for file in read_extended(local_or_shipped(path))[1]]
        shown: list[RenderableType] = [labelled([("extends", ", ".join(extended))]), ""] if extended else []
        return {"extends": extended, **report}, [*shown, *screen]
    settle(path)
    if path.is_dir() and not (path / METADATA).is_file():
        wanted = "give a recipe (.yaml), or a folder that training has saved heads in (save.dir)"
        raise UserError(f"{target} is a folder without {METADATA}: neither a recipe nor trained heads; {wanted}")
    if overrides:
        raise UserError(f"{target} is taken for trained heads, which take no overrides ({overrides[0]}); a recipe ends in .yaml")
    return inspect_checkpoint(target)
