"""Export heads: choose the layout, check them, write the folder, and say how engines start with it.

Shape suffixes: B batch, T positions, D width, K depth, V vocabulary.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headstart import __version__
from headstart.heads.backbone.adapter import ADAPTER, ADAPTER_CONFIG
from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.backbone.features import Features
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.model_config import load_config
from headstart.heads.base import Drafter
from headstart.heads.card import METADATA
from headstart.heads.checkpoint import recipe_section
from headstart.serving.engines import ENGINES, LINES, METHODS, Served, nearest, readers, require_engine
from headstart.serving.layouts.files import PROVENANCE, Files, new_folder, read_files, require_new
from headstart.serving.layouts.layout import Checkpoint, Dtype, Layout, read_checkpoint
from headstart.serving.reading import build, layouts_of, original_of, read_exported, round_as_stored
from headstart.support.errors import UserError
from headstart.support.json_text import read_json

BACKBONE = "backbone"
"""Folder of a merged backbone inside the exported folder."""
TEMPLATE = "chat_template.jinja"
"""File of a chat template that the recipe has set."""
FORMAT = 1


@dataclass(frozen=True)
class Request:
    """What ``headstart export`` was asked for."""

    heads: str
    to: str
    """An engine or a layout."""
    out: Path
    backbone: str | None = None
    """From where engines load the backbone (None: from where it was trained)."""
    dtype: Dtype = "auto"
    adapter: Literal["merge", "keep"] = "merge"


def export(request: Request) -> dict[str, Any]:
    """Write heads in the layout of an engine, into a new folder, and return a report: layout, changes, engines and launch lines.

    Raises UserError, before anything is written, for an unknown format, heads that it or the engine cannot hold, damaged heads, a folder
    that is not empty, or a backbone that is missing or another one.
    """
    if request.to not in ENGINES and all(request.to != layout.name for layout in layouts_of()):
        raise nearest(request.to, [*dict.fromkeys([*ENGINES, *sorted(layout.name for layout in layouts_of())])])
    require_new(request.out)
    heads = read_checkpoint(request.heads, request.backbone).cast(request.dtype)
    layout, engine = _chosen(request.to, heads)
    rank = _rank(heads, request.adapter, engine)
    if heads.adapter is not None and request.adapter == "merge":
        heads = replace(heads, served=str(request.out.absolute() / BACKBONE))
    original = original_of(heads.path, heads.ends, allow_finetuned=True)
    with new_folder(request.out) as folder:
        notes, files = layout.write(heads, folder), read_files(folder)
        drafts = _read_back(heads, original, files)
        if heads.adapter is not None and rank:
            shutil.copytree(heads.adapter, folder / ADAPTER)
        elif heads.adapter is not None:
            _write_merged(heads, folder)
        served = _served(heads, request.out.absolute(), files.config, rank)
        if (template := recipe_section(heads.card["provenance"], "data").get("chat_template")) is not None:
            (folder / TEMPLATE).write_text(template, encoding="utf-8")
        report = _report(heads, layout, served, engine, notes)
        stated = {key: value for key, value in report.items() if key not in ("launch", "notes")}
        (folder / PROVENANCE).write_text(json.dumps(stated | {"reference": drafts}, indent=2) + "\n", encoding="utf-8")
    return report


def _chosen(to: str, heads: Checkpoint) -> tuple[Layout, str | None]:
    """Return the layout and, if one was asked for, the engine. Raises UserError if either cannot hold the heads."""
    if heads.method not in METHODS:
        raise UserError(f"{heads.path} holds heads of kind {heads.method!r}, which is code of your own; engines read {', '.join(METHODS)}")
    if not heads.backbone:
        raise UserError(f"{heads.path} does not say which backbone it was trained on; give --backbone")
    held = {layout.name: layout for layout in layouts_of(heads.method)}
    if to in ENGINES:
        require_engine(to, heads.method, list(held))
        layout = next(layout for layout in held.values() if to in layout.engines)
        if reason := layout.unread(heads).get(to):
            advice = "" if layout.name == to else f"; --to {layout.name} writes the layout all the same"
            raise UserError(f"{ENGINES[to]} does not read {heads.path}: {reason}{advice}")
        return layout, to
    if to not in held:
        of = ", ".join(METHODS[method] for layout in layouts_of() if layout.name == to for method in layout.methods)
        allowed = f"for these heads: {', '.join(held)}" if held else "no engine reads these: decode them with headstart.load"
        raise UserError(f"{heads.path} holds {METHODS[heads.method]} heads; the layout {to} is of {of}; {allowed}")
    return held[to], None


def _read_back(heads: Checkpoint, original: Drafter, files: Files) -> list[dict[str, Any]]:
    """Return what the heads draft after given states. Raises UserError unless the written folder, read back, drafts that too."""
    found = read_exported(files, heads.ends)
    round_as_stored(original, found)
    drafts, faults = reference(original), list(found.remarks)
    if not faults and not agreement(build(found, heads.ends, heads.path), drafts).whole:
        faults = ["the written files, read back, draft other tokens"]
    if faults:
        raise UserError(f"{heads.path}: {faults[0]}: {METADATA}, config.json or the weights are damaged; train or fetch the heads again")
    return drafts


def _rank(heads: Checkpoint, how: str, engine: str | None) -> int:
    """Return the rank of an adapter that is kept; 0: none is. Raises UserError unless an engine can serve it unmerged beside heads."""
    if how != "keep":
        return 0
    if heads.adapter is None:
        raise UserError(f"{heads.path} was trained without an adapter on the backbone; leave out --adapter keep")
    if engine not in (None, "vllm"):
        raise UserError(f"--adapter keep is for vLLM; whether {ENGINES[engine]} drafts for an adapter is not known: use --adapter merge")
    if read_json(heads.adapter / ADAPTER_CONFIG, "train again, or restore the file").get("use_dora"):
        raise UserError("--adapter keep does not go with DoRA, which vLLM does not read: use --adapter merge")
    return adapter_rank(heads.adapter)


def adapter_rank(folder: Path) -> int:
    """Return the largest rank of an adapter of PEFT."""
    config = read_json(folder / ADAPTER_CONFIG, "train again, or restore the file")
    return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])


def _write_merged(heads: Checkpoint, folder: Path) -> None:
    """Write the backbone with the adapter merged into its weights, in the dtype of its checkpoint. Raises UserError."""
    assert heads.adapter is not None
    backbone = heads.load_backbone()
    backbone.require_adapter(heads.path, heads.adapter, heads.card["contract"]["adapter"])
    assert backbone.adapter is not None
    model = backbone.adapter.peft.merge_and_unload()
    dtype = load_config(heads.backbone).dtype
    (model if dtype is None else model.to(dtype)).save_pretrained(folder / BACKBONE)
    with suppress(UserError):  # a backbone without a tokenizer stays one
        load_tokenizer(heads.backbone).save_pretrained(folder / BACKBONE)


def _served(heads: Checkpoint, out: Path, config: Mapping[str, Any], rank: int) -> Served:
    backbone = Path(heads.served).expanduser()
    served = str(backbone.absolute()) if backbone.exists() else heads.served  # as its folder: the line is run anywhere
    return Served(heads.method, str(out), served, heads.depth, config, f"{out}/{ADAPTER}" if rank else None, rank)


def _report(heads: Checkpoint, layout: Layout, served: Served, engine: str | None, notes: list[str]) -> dict[str, Any]:
    """Return the report; ``notes``: what differs from the checkpoint."""
    unread, asked = layout.unread(heads), ("vllm",) if served.rank else (engine,) if engine else layout.engines
    reading = {name: entry for name, entry in readers(heads.method).items() if name in asked and name not in unread}
    notes = notes or ["the checkpoint's own layout, nothing changed"]
    notes += [f"not for {ENGINES[name]}: {reason}" for name, reason in unread.items() if name in asked]
    if find_gguf(heads.backbone) is not None and "llama.cpp" not in asked:
        notes.append("the backbone is a GGUF file, which few engines load; the heads fit the model's safetensors too (--backbone)")
    data = recipe_section(heads.card["provenance"], "data")
    flag = "--chat-template-file" if "llama.cpp" in asked else "--chat-template"
    if data.get("chat_template") is not None:
        notes.append(f"trained with a chat template of the recipe's, written as {TEMPLATE}: let the engine ask with it ({flag})")
    if variables := data.get("template_kwargs"):
        notes.append(f"trained with variables of the chat template: send them with requests (chat_template_kwargs {variables})")
    if heads.dtype != "auto":
        notes.append(f"weights are written in {heads.dtype}")
    path = str(Path(heads.path).absolute()) if heads.folder == Path(heads.path).expanduser() else heads.path
    return {
        "format": FORMAT,
        "layout": layout.name,
        "method": heads.method,
        "headstart": __version__,
        "heads": {"path": path, "kind": heads.card["kind"], "sha256": heads.card["weights"]["sha256"]},
        "backbone": served.backbone,
        "engines": list(reading),
        "contract": heads.card["contract"],
        "dtype": heads.dtype,
        "depth": heads.depth,
        "adapter": None if heads.adapter is None else "keep" if served.rank else "merge",
        "notes": notes,
        "launch": {name: {"line": LINES[name](served), "support": f"{ENGINES[name]}, {entry}"} for name, entry in reading.items()},
    }


def lines(report: dict[str, Any], out: Path) -> list[str]:
    first = f"{METHODS[report['method']]}: {report['heads']['path']} written to {out}, layout {report['layout']}"
    notes = [f"  {note}" for note in report["notes"]]
    launch = [line for launch in report["launch"].values() for line in ("", launch["support"], f"  {launch['line']}")]
    return [first, *notes, *launch]


# Drafts that served heads are held to: after states and tokens that a formula gives, so that no backbone runs for them. The folder has
# those of the trained heads, and `headstart verify` compares what it drafts. A draft agrees if it is the likeliest token and its logit, and
# the mean of all logits, are those stored, but for rounding, and so are the odds of a confidence head.

TOKENS, PLACES, DEPTH = 64, (9, 30, 64), 8
"""Length of the text, after how many of its tokens drafts are made, and how many at most."""
TOLERANCE = 2e-4
"""The largest difference of logits that fp32 arithmetic in another order makes, relative to the largest logit."""


@dataclass(frozen=True)
class Agreement:
    """How many of the expected drafts were made, and the largest difference of logits, relative to the largest one."""

    drafts: int
    equal: int
    distance: float

    @property
    def whole(self) -> bool:
        return self.equal == self.drafts and self.distance <= TOLERANCE


@torch.no_grad()
def reference(drafter: Drafter) -> list[dict[str, Any]]:
    """Return drafts after some places of the text, with their logits, as data. A drafter in fp32."""
    found = []
    for place in PLACES:
        logits_KV = draft_logits(drafter, *_text(drafter, place), min(drafter.depth, DEPTH), sure=(sure := list[Any]()))
        drafts = logits_KV.argmax(-1).tolist()
        figures = [[float(f"{x:.7g}") for x in _figures(*drafted)] for drafted in zip(logits_KV, drafts, sure, strict=True)]
        found.append({"place": place, "drafts": drafts, "logits": figures})
    return found


@torch.no_grad()
def agreement(drafter: Drafter, expected: Sequence[dict[str, Any]]) -> Agreement:
    """Compare the drafts of a drafter with those of `reference`, each given the expected drafts before it."""
    equal, distance = 0, 0.0
    for text in expected:
        if drafter.max_depth is not None and drafter.max_depth < len(text["drafts"]):
            continue
        logits_KV = draft_logits(drafter, *_text(drafter, text["place"]), len(text["drafts"]), text["drafts"], sure := list[Any]())
        equal += sum(are_picks(logits_KV, text["drafts"]))
        for logits_V, token, odds, figures in zip(logits_KV, text["drafts"], sure, text["logits"], strict=True):
            largest, own = float(logits_V[logits_V.isfinite()].abs().max()), [*_figures(logits_V, token, odds), math.inf]
            gap = max(abs(a - b) for a, b in zip(own, figures, strict=False)) / max(largest, 1e-6)  # other exports state two
            distance = max(distance, math.inf if math.isnan(gap) else gap)
    return Agreement(sum(len(text["drafts"]) for text in expected), equal, distance)


def _figures(logits_V: Tensor, token: int, odds: Tensor | None) -> list[float]:
    """The logit of a token, the mean of all tokens that can be drafted, and the log-odds of heads that estimate their acceptance."""
    return [float(logits_V[token]), float(logits_V[logits_V.isfinite()].double().mean()), *([] if odds is None else [float(odds)])]


def are_picks(logits_KV: Tensor, tokens: Sequence[int]) -> list[bool]:
    """Whether each token is the most likely one, or as likely but for rounding."""
    rounding_K = TOLERANCE * logits_KV.where(logits_KV.isfinite(), 0.0).abs().amax(-1)
    own_K = logits_KV.gather(-1, torch.tensor(tokens, device=logits_KV.device)[:, None])[:, 0]
    return [*map(bool, own_K >= logits_KV.amax(-1) - rounding_K)]


@torch.no_grad()
def draft_logits(
    drafter: Drafter, features: Features, root: int, depth: int, drafts: Sequence[int] | None = None, sure: list[Any] | None = None
) -> Tensor:
    """Return the logits ``[K, V]`` of a chain of drafts after features ``[1, T]`` and the root; -inf: never drafted.

    Each draft follows those of ``drafts`` before it (None: the likeliest ones). ``sure``: takes what `Drafter.confidence` gives for each.
    """
    state = drafter.reserve(drafter.begin(features), features.tokens_BT.shape[1] + 1 + 2 * depth)
    zero_11, token, logits, at_once = torch.zeros_like(features.tokens_BT[:, :1]), root, list[Tensor](), drafter.all_depths_at_once
    for k in range(depth):
        token_11 = torch.full_like(zero_11, token)
        if k == 0 or not at_once:
            hidden, state = drafter.step(state, token_11, zero_11, k)
        hidden_11D = hidden[:, k : k + 1] if at_once else hidden
        logits_DV = drafter.readout(hidden_11D, k, token_11)[0, 0].float()
        if sure is not None:
            sure.append(drafter.confidence(hidden_11D, token_11))
        whole_V = logits_DV.new_full((drafter.backbone.vocab,), -torch.inf)
        logits.append(logits_DV if drafter.vocabulary is None else whole_V.scatter(0, drafter.vocabulary, logits_DV))
        token = int(logits[-1].argmax()) if drafts is None else drafts[k]
    return torch.stack(logits)


def _text(drafter: Drafter, place: int) -> tuple[Features, int]:
    """Return the features of the first tokens but the last, which is the root, and the root."""
    dim, vocab = drafter.backbone.dim, drafter.backbone.vocab
    tokens_1T = (_noise(0, 1, TOKENS) + 1).mul(vocab / 2).long().clamp(max=vocab - 1)
    states = {tap: _noise(1 + tap, 1, TOKENS, dim)[:, : place - 1] for tap in drafter.taps}
    hidden_1TD = _noise(1 + drafter.backbone.num_layers + 1, 1, TOKENS, dim)[:, : place - 1]
    return Features(tokens_1T[:, : place - 1], hidden_1TD, states or None), int(tokens_1T[0, place - 1])


def _noise(number: int, *shape: int) -> Tensor:
    """Return numbers from -1 to 1, the same on every machine and in every version of torch."""
    x = (torch.arange(math.prod(shape)) + number * 1_000_003) * 2654435761 % 2**32
    x = (x ^ x >> 15) * 2246822519 % 2**32
    return ((x ^ x >> 13).double() / 2**31 - 1).float().view(shape)
