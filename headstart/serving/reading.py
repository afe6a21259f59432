"""A folder of heads, by any trainer, as a drafter of Headstart: recognised, held to the backbone's sizes, and built strictly.

An import also measures acceptance, and saves a checkpoint of Headstart.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.chat.prompts import Prompter, read_prompts
from headstart.chat.template import ChatSettings
from headstart.heads.backbone.backbone import Backbone, load_tokenizer
from headstart.heads.backbone.model_config import end_tokens, load_config
from headstart.heads.base import Drafter
from headstart.heads.card import METADATA
from headstart.heads.checkpoint import check_contract, read_drafter, read_metadata
from headstart.heads.methods import construct_drafter, require_weights
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, continue_texts, measure_tau
from headstart.serving.layouts.block import Block, DflashHf
from headstart.serving.layouts.eagle3 import Eagle, Eagle3, OpenVino, Peagle
from headstart.serving.layouts.eagle4 import Eagle4
from headstart.serving.layouts.files import PROVENANCE, DamagedError, Files, read_files, require_new, stated_format
from headstart.serving.layouts.layout import Counting, Heads, Layout
from headstart.serving.layouts.llamacpp import LlamaCpp, LlamaCppBlock
from headstart.serving.layouts.medusa import Hydra, Medusa, MlpSpeculator
from headstart.serving.layouts.mtp import DraftModel, MtpStitch
from headstart.serving.layouts.speculators import Speculators
from headstart.support.devices import spread
from headstart.support.errors import UserError
from headstart.support.files import atomic, file_hash
from headstart.support.hub import EMBEDDED, resolve
from headstart.support.json_text import read_json
from headstart.support.terminal import progress, watched
from headstart.support.text import shortened

LAYOUTS: tuple[Layout, ...] = (
    Medusa(), Peagle(), Speculators(), Hydra(), MlpSpeculator(), Block(), DflashHf(), Eagle4(), Eagle3(), Eagle(), MtpStitch(),
    DraftModel(), OpenVino(), LlamaCpp(), LlamaCppBlock(),
)  # fmt: skip
"""Every layout, in the order in which they are asked whether a folder is theirs."""
SIZES = {"hidden_size": "width", "vocab_size": "vocabulary", "num_hidden_layers": "layers"}
KINDS: dict[str, tuple[Any, str]] = {
    "a mapping": (dict, "eagle_config dflash_config speculators_config"), "a list of names": (list, "architectures layer_types"),
    "a number": (int | float, "rope_theta ptd_token_id"), "a name": (str, "speculators_model_type"),
}  # fmt: skip
"""Kinds of values of keys, as layouts expect them."""
DERIVED = "rotary_emb.inv_freq"
"""Ending of buffers that follow from the configuration."""


def layouts_of(method: str | None = None) -> list[Layout]:
    """Return the layouts that are written, or those that hold a method's heads, the checkpoint's own first: most engines read it."""
    held = [layout for layout in LAYOUTS if layout.methods and (method is None or method in layout.methods)]
    return sorted(held, key=lambda layout: -len(layout.engines))


def recognise(files: Files) -> Layout:
    """Return the layout in which engines read a folder. Raises UserError if none is known, or for a key of another kind of value."""
    for what, (kind, keys) in KINDS.items():
        for key, value in ((key, files.config[key]) for key in keys.split() if files.config.get(key) is not None):
            if not isinstance(value, kind) or (kind is list and not all(isinstance(name, str) for name in value)):
                raise UserError(f"{files.path}: {key} in config.json is {what}; got {shortened(value)}: correct it, or remove it")
    found = next((layout for layout in LAYOUTS if layout.recognises(files)), None)
    if found is None:
        some, known = ", ".join(sorted(files.shapes)[:3]), ", ".join(dict.fromkeys(layout.title for layout in LAYOUTS))
        raise UserError(f"{files.path} has no known layout (tensors {some}, ...); known: {known}")
    return found


class Saved(Layout):
    """Heads that Headstart saved, or exported with their ``headstart.json``."""

    title = "Headstart"

    def recognises(self, files: Files) -> bool:
        return (files.folder / METADATA).is_file()

    def sizes(self, files: Files) -> dict[str, Any]:
        return dict(read_metadata(files.folder)[1]["contract"])

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        folder, card = read_metadata(files.folder)
        check_contract(files.path, card, backbone, allow_finetuned=True)
        read_drafter(files.path, folder, card, backbone)  # refuses files that were changed, and code that was not imported
        return Heads(card["kind"], card["arguments"], files.read(), notes=(f"saved by Headstart, trained on {card['backbone']}",))


def layout_of(files: Files) -> Layout:
    """Return the layout in which a folder is imported. Raises UserError if none is known."""
    return Saved() if Saved().recognises(files) else recognise(files)


def require_fit(files: Files, layout: Layout, backbone: str, trust_remote_code: bool) -> None:
    """Raise UserError, naming both, if the heads are for a backbone of other sizes; only the backbone's configuration is read."""
    try:
        config = load_config(backbone, trust_remote_code=trust_remote_code).get_text_config()
    except UserError:
        return  # loading the backbone says why
    sizes, given = layout.sizes(files), config.to_dict()
    for key, what in SIZES.items():
        theirs, ours = sizes.get(key), given.get(key)
        if theirs and ours and theirs != ours:
            verifier = ((files.config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
            named = files.config.get("base_model_name_or_path") or verifier
            raise UserError(
                f"{files.path} ({layout.title}) is for a backbone of {what} {theirs}; {backbone} has {what} {ours}: "
                f"give the backbone that they were trained on{f', {named}' if isinstance(named, str) and named else ''}"
            )


def build(heads: Heads, backbone: Backbone, path: str) -> Drafter:
    """Return the drafter with these weights, in fp32. Raises DamagedError naming the first tensor that does not fit."""
    drafter = construct_drafter(heads.kind, backbone, heads.arguments)
    expected = drafter.tensors()
    found = {name: tensor for name, tensor in heads.tensors.items() if not name.endswith(DERIVED)}
    odd = [f"{heads.names.get(name, name)} {list(tensor.shape)}" for name, tensor in found.items() if name not in expected]
    for name, tensor in expected.items():
        theirs, shape = heads.names.get(name, name), list(tensor.shape)
        called = theirs if theirs == name else f"{theirs} ({name} here)"
        if name not in found:
            instead = f"; it has {odd[0]}, which they do not have" if odd else ""
            raise DamagedError(f"{path} lacks the tensor {called} {shape} of {heads.kind} heads{instead}")
        if found[name].shape != tensor.shape:
            fault = f"{path}: tensor {called} is {list(found[name].shape)}"
            raise DamagedError(f"{fault}; with this config.json and backbone it is {shape}")
    if odd:
        raise DamagedError(f"{path} has a tensor {odd[0]}, which {heads.kind} heads of its config.json do not have")
    drafter.load_tensors(found)
    require_weights(drafter, path)
    return drafter.eval().requires_grad_(False)


def stored_dtype(heads: Heads) -> torch.dtype:
    """Return the widest floating-point dtype of the tensors."""
    dtypes = {tensor.dtype for tensor in heads.tensors.values() if tensor.is_floating_point()}
    return reduce(torch.promote_types, dtypes) if dtypes else torch.bfloat16


def read_exported(files: Files, backbone: Backbone) -> Heads:
    """Return what engines read in a folder. Raises UserError for what Headstart does not compute or does not fit the backbone."""
    layout = recognise(files)
    require_fit(files, layout, backbone.name, trust_remote_code=False)
    return layout.parse(files, backbone, "stated").readings()[0]


def round_as_stored(drafter: Drafter, stored: Heads) -> None:
    """Round the weights of a drafter in fp32 to the precision in which a folder stores them."""
    drafter.to(stored_dtype(stored)).to(torch.float32)


def original_of(path: str, backbone: Backbone, allow_finetuned: bool) -> Drafter:
    """Return trained heads in fp32, without their adapter on the backbone, which has no part in a draft after states that are given."""
    folder, card = read_metadata(path)
    check_contract(path, card, backbone, allow_finetuned)
    return read_drafter(path, folder, card, backbone).eval().requires_grad_(False)


# Import.

CHAIN = 5
"""Most tokens of the chains that are measured."""
PROMPTS, WRITTEN = 8, 24
"""Number of prompts, and how long those are that the backbone writes."""


@dataclass(frozen=True)
class Wishes:
    """How to read and measure."""

    counting: Counting | None = None
    depth: int | None = None
    prompts: str | None = None
    new_tokens: int = 48
    trust_remote_code: bool = False
    chat: ChatSettings = field(default_factory=ChatSettings)
    """For the prompts; the variables are kept with the heads."""
    most_prompts: int = PROMPTS
    """Of the file, its first ones."""


def import_heads(path: str, backbone_path: str, out: Path, load: Callable[[], Backbone], wishes: Wishes) -> dict[str, Any]:
    """Write the heads at ``path`` (folder or hub id) as a Headstart checkpoint to ``out`` and return a report.

    ``load`` loads the backbone at ``backbone_path`` once the heads are known to fit it. Raises UserError, and writes nothing, for layouts
    that are unknown or that Headstart's heads cannot compute, for another backbone, and for missing, unexpected or misshapen tensors.
    """
    require_new(out)
    files = read_files(path)
    layout = layout_of(files)
    require_fit(files, layout, backbone_path, wishes.trust_remote_code)
    backbone = load()
    heads, exported = layout.parse(files, backbone, wishes.counting), files.folder / PROVENANCE
    stated = read_json(exported, "export the heads again") if exported.is_file() else None
    if depth := wishes.depth or (stated or {}).get("depth"):  # which layouts do not say
        whole = heads.kind == "peagle" or heads.arguments.get("parallel")
        heads = heads.plus({"depth" if whole else "draft_depth": depth})
    readings = heads.readings()[: None if stated is None else 1]  # what Headstart has exported is read as engines do
    drafters = [build(reading, backbone, path).to(device=backbone.device, dtype=backbone.dtype) for reading in readings]
    prompts, measured_on = prompts_for(backbone, wishes)
    found = [(measure(drafter, prompts, wishes.new_tokens), reading, drafter) for reading, drafter in zip(readings, drafters, strict=True)]
    found.sort(key=lambda pair: -pair[0]["tau"])  # of equal ones the first, which engines read, stays first
    _, best, drafter = found[0]
    quantised = ["quantised weights became the fp32 weights that they stand for"] if stated_format(files.config) is not None else []
    report: dict[str, Any] = {
        "source": path,
        "layout": layout.title,
        "kind": best.kind,
        "arguments": drafter.arguments,
        "notes": [*best.notes, *best.remarks, *quantised],
        "measured_on": measured_on,
        "readings": [{"choice": reading.choice, **figures} for figures, reading, _ in found],
        "files": {file.name: file_hash(file) for file in sorted(set(files.homes.values()))},
    }
    chat: dict[str, Any] = {"template": None, "template_kwargs": dict(wishes.chat.variables), "eos_token_id": []}
    with atomic(out, folder=True) as folder:
        drafter.to(dtype=stored_dtype(best)).save_pretrained(folder, {"imported": report, "chat": chat})
    of_run = {"backbone": backbone.name, "verdict": verdict(report["readings"]), "recipe": recipe_overrides(best.kind, drafter, out)}
    return report | of_run


def recipe_overrides(kind: str, drafter: Drafter, out: Path) -> list[str]:
    """Return what a recipe needs to train these heads further: the arguments that are not the defaults."""
    arguments, defaults = drafter.config.model_dump(mode="json", exclude_none=True), type(drafter.config).model_fields
    own = {key: value for key, value in arguments.items() if value != defaults[key].default and key not in ("architecture", "native")}
    stated = {"kind": kind, "init": str(out), **own}
    return [f"drafter.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in stated.items()]


# Which reading fits: the one whose drafts the backbone accepts most often.


@torch.no_grad()
def measure(drafter: Drafter, prompts: Sequence[Tensor], new_tokens: int) -> dict[str, Any]:
    """Decode the prompts greedily with chains of drafts and return the figures of `measure_tau`."""
    depth = min(CHAIN, drafter.max_depth or CHAIN)
    heads, shown = SpeculativeModel(drafter.backbone, drafter, capture="off"), watched(prompts, "measuring the heads", "prompt")
    figures = measure_tau(heads, shown, max_new_tokens=new_tokens, tree=TreeShape(depth + 1, 1, depth))
    return {**figures, "acceptance_per_depth": figures["acceptance_per_depth"][:depth]}


def verdict(readings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which reading was taken, the first, and how the others did, a line each; the figures alone for a single one."""
    first, *others = readings
    rates = " ".join(f"{rate:.3f}" for rate in first["acceptance_per_depth"])
    lines = [f"tau {first['tau']:.3f} in {first['passes']} passes, acceptance per depth {rates}"]
    if others:
        lines.append(f"read as: {first['choice']}")
        lines += [f"  otherwise tau {choice['tau']:.3f}: {choice['choice']}" for choice in others]
        if first["tau"] - others[0]["tau"] < 0.02 * first["tau"]:
            lines.append("the figures are too close to tell the readings apart: give more prompts with --prompts FILE, or force --counting")
    return lines


def prompts_for(backbone: Backbone, wishes: Wishes) -> tuple[list[Tensor], str]:
    """Return prompts (int64 ``[T]``) and a description of where they are from. Raises UserError."""
    file = wishes.prompts
    if file is None and backbone.name == EMBEDDED:
        file = str(Path(resolve(EMBEDDED)).parent / "prompts.jsonl")
    if file is None:
        texts = written(backbone)
        return texts, f"{len(texts)} texts that the backbone wrote itself"
    settings = replace(wishes.chat, ends=end_tokens(backbone.model.generation_config))
    prompter = Prompter(load_tokenizer(backbone.name, trust_remote_code=wishes.trust_remote_code), settings=settings)
    found = [prompt.ids_T for prompt in read_prompts(file, prompter, wishes.most_prompts)]
    return found, f"{len(found)} prompts of {Path(file).name}"


def written(backbone: Backbone) -> list[Tensor]:
    """Return the beginnings of texts that the backbone samples from its first token, or from different tokens if it has none."""
    first, places = getattr(backbone.config, "bos_token_id", None), {*backbone.placeholders.values()}
    starts = [first] * PROMPTS if isinstance(first, int) else [one for one in spread(1, backbone.vocab - 1, PROMPTS) if one not in places]
    prompts = [torch.tensor([start]) for start in starts]
    with progress("writing prompts with the backbone", "prompt", PROMPTS) as bar:
        output = continue_texts(
            SpeculativeModel(backbone), prompts, Settings(WRITTEN, temperature=1.0), list(range(len(starts))), speculate=False
        )
        bar.update(PROMPTS)
    found = [row_T[: 2 + sum(lengths)].cpu() for row_T, lengths in zip(output.sequences, output.accept_lengths, strict=True)]
    ends = end_tokens(backbone.model.generation_config)
    usable = [row_T for row_T in found if int(row_T[-1]) not in ends and places.isdisjoint(row_T.tolist())]
    if not usable:
        raise UserError(f"{backbone.name or 'the backbone'} ends every text that it begins itself; give prompts with --prompts FILE")
    return usable
