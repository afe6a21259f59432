"""The model card of published heads. It states what the files say and what was measured, and names no folder of this machine."""

from __future__ import annotations

from typing import Any

from huggingface_hub.utils import yaml_dump

from headstart.heads.backbone.adapter import FOLDER as ADAPTER
from headstart.heads.backbone.gguf_file import SUFFIX
from headstart.heads.checkpoint import recipe_section
from headstart.inference.serving.engines import ENGINES, METHODS, readers
from headstart.inference.serving.export.adapter import BACKBONE
from headstart.inference.serving.formats.format import find_format, layouts_of
from headstart.inference.serving.launch import Served, launch_line
from headstart.inference.serving.publish.heads import Heads
from headstart.inference.serving.publish.measured import Figure, Measured
from headstart.inference.serving.publish.scrub import last_part
from headstart.support.hub import is_hub_id

UNCHANGED = ("eagle3", "draft_model", "pard")
"""Methods whose checkpoints engines load as they are, unless an adapter belongs to them; others are exported first."""
COUNTING = "tau, the mean acceptance length: tokens written per forward pass of the backbone, its own token included (1: no drafting)."


def model_card(heads: Heads, repo: str, measured: list[Measured], license: str | None) -> str:
    """Return README.md for the repository ``repo``; ``license``: the backbone's, if it states one."""
    sections = [_about(heads, license), _figures(measured), _serving(heads, repo), _loading(heads, repo), _training(heads)]
    metadata = yaml_dump(_metadata(heads, license))
    return f"---\n{metadata}---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def _metadata(heads: Heads, license: str | None) -> dict[str, Any]:
    known = {"base_model": heads.base_model, "license": license}
    datasets = [one for one in _data(heads) if is_hub_id(one)]
    tags = ["speculative-decoding", heads.method.replace("_", "-"), "headstart"]
    return {
        **{key: value for key, value in known.items() if value is not None},
        "library_name": "headstart",
        "tags": tags,
        **({"datasets": datasets} if datasets else {}),
    }


def _data(heads: Heads) -> list[str]:
    """Return the training data's names as the recipe gives them."""
    train = recipe_section(heads.provenance, "data").get("train")
    return [str(one) for one in train] if isinstance(train, list | tuple) else [train] if isinstance(train, str) else []


def _about(heads: Heads, license: str | None) -> str:
    lines = [
        f"# {_title(heads)} for {heads.shown_backbone}",
        f"Lookahead heads for speculative decoding: they draft up to {heads.depth} tokens, which {heads.shown_backbone} verifies in one"
        " forward pass. The text is that of the model alone; it arrives sooner.",
    ]
    if heads.contract.get("adapter") is not None:
        lines.append("They were trained together with an adapter on the backbone, which is part of this repository and of the text.")
    if license is None:
        lines.append(f"The licence of {heads.shown_backbone} was not found when this card was written; it applies to its use.")
    return "\n\n".join(lines)


def _title(heads: Heads) -> str:
    name = METHODS.get(heads.method, heads.method).partition(",")[0].partition(" (")[0]
    return name[0].upper() + name[1:] + ("" if name.endswith("model") else " heads")


def _figures(measured: list[Measured]) -> str:
    if not measured:
        return "## Acceptance\n\nNot measured."
    parts = ["## Acceptance", COUNTING]
    for one in measured:
        parts += [_table(one.figures), one.about]
    if any(figure.engines_count is not None for one in measured for figure in one.figures):
        parts.append(
            "vLLM's mean acceptance length counts drafts that are accepted past the end of a text too. To compare with an engine, compare"
            " that column, measured on a chain of as many drafts."
        )
    return "\n\n".join(parts)


def _table(figures: tuple[Figure, ...]) -> str:
    titles = ["task", "prompts", "temperature", "batch", "tree", "tau", "accepted at depth 0, 1, ...", "as vLLM counts it", "speed, x AR"]
    rows = [
        [
            one.task, str(one.prompts), f"{one.temperature:g}", str(one.batch), one.tree, f"{one.tau:.2f}",
            " ".join(f"{share:.2f}" for share in one.per_depth), _number(one.engines_count), _number(one.speedup),
        ]
        for one in figures
    ]  # fmt: skip
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows))


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _serving(heads: Heads, repo: str) -> str:
    reading = {engine: entry for engine, entry in readers(heads.method).items() if engine in heads.engines}
    if not reading:
        return "## Serving\n\nNo serving engine reads these heads; decode them with Headstart."
    parts = ["## Serving"]
    for engine, entry in reading.items():
        first, served = _served(heads, repo, engine if entry.until is None else _layout(heads.method, engine))
        parts += [f"{ENGINES[engine]}, {entry}:", "```\n" + "\n".join([*first, launch_line(engine, served)]) + "\n```"]
    return "\n\n".join(parts)


def _layout(method: str, engine: str) -> str:
    """Return the layout of an engine whose newest version no longer reads it, so that it is asked for by its own name."""
    return next(name for name in layouts_of(method) if engine in find_format(name).engines)


def _served(heads: Heads, repo: str, to: str) -> tuple[list[str], Served]:
    """Return the lines that bring the heads into the layout ``to``, if they are not in it, and what the engine then starts with."""
    adapted, own = heads.contract.get("adapter") is not None, {file.parts[0] for file in heads.files}
    first, folder, backbone = [], repo, heads.base_model or heads.shown_backbone
    if heads.layout is None and (adapted or heads.method not in UNCHANGED):
        own, folder = {BACKBONE}, "heads"   # as export writes them
        first = [f"headstart export --heads {repo} --to {to} --backbone {backbone} --out {folder}"]
    elif adapted:
        folder = "heads"
        first = [f"hf download {repo} --local-dir {folder}"]
    if adapted and BACKBONE in own:
        backbone = f"{folder}/{BACKBONE}"
    kept = f"{folder}/{ADAPTER}" if adapted and ADAPTER in own else None
    return first, Served(heads.method, folder, backbone, heads.depth, heads.config, kept, heads.rank if kept else 0)


def _loading(heads: Heads, repo: str) -> str:
    base = heads.base_model or heads.shown_backbone
    if heads.layout is not None:
        return f"## Headstart\n\n```\nheadstart import {repo} --backbone {base} --out heads\n```"
    carried = any(file.parts[0] == "custom_generate" for file in heads.files)
    gguf, auto = base.endswith(SUFFIX), ["AutoTokenizer.from_pretrained", "AutoModelForCausalLM.from_pretrained"]
    tokenizer, model = ["headstart.load_tokenizer", "headstart.load_backbone"] if gguf else auto
    code = [
        "import headstart",
        *([] if gguf else ["from transformers import AutoModelForCausalLM, AutoTokenizer"]),
        "",
        f'tokenizer = {tokenizer}("{base}")',
        f'model = {model}("{base}"){".model" if gguf else ""}',
        'inputs = tokenizer("def fibonacci(n):", return_tensors="pt")',
        f'heads = headstart.load("{repo}", backbone=model)',
        "output = model.generate(**inputs, custom_generate=heads.generate, max_new_tokens=128)",
    ]
    parts = ["## Headstart and transformers", "`pip install headstart`, then:", "```python\n" + "\n".join(code) + "\n```"]
    if carried:
        call = f'model.generate(**inputs, custom_generate="{repo}", trust_remote_code=True, max_new_tokens=128)'
        parts += ["or, without a line of Headstart's, with the code in `custom_generate/`:", f"```python\n{call}\n```"]
    return "\n\n".join([*parts, f"`headstart bench --heads {repo} --backbone {base} --prompts FILE` measures them on your prompts."])


def _training(heads: Heads) -> str:
    given, versions = heads.provenance, heads.provenance.get("versions", {})
    arguments = ", ".join(f"{name} {value}" for name, value in heads.arguments.items() if value and not isinstance(value, dict | list))
    rows = [
        ("method", f"{METHODS.get(heads.method, heads.method)}: {arguments}" if arguments else ""),
        ("backbone", heads.shown_backbone),
        ("data", ", ".join(map(last_part, _data(heads)))),
        ("steps", f"{given['steps']:,}" if given.get("steps") is not None else ""),
        ("tokens", f"{given['tokens']:,}" if given.get("tokens") is not None else ""),
        ("chat template", f"hash {given['chat_template']}" if given.get("chat_template") else ""),
        ("layout", heads.layout or ""),
        ("weights of the decoder layers", heads.quantize or ""),
        ("made with", ", ".join(f"{name} {number}" for name, number in versions.items())),
        ("commit of Headstart", given.get("commit") or ""),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows if value)
    return f"## Training\n\n| | |\n|---|---|\n{table}"
