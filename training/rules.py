"""A recipe by rule: the parts that it extends, for its method and its data, and what follows from the model and the hardware.

recipes/shared has the parts, each with its source; docs/recipe.md has the rules as a table, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.backbone.gguf_file import SUFFIX
from headstart.heads.backbone.model_config import empty_model
from headstart.heads.backbone.probes import decoder_layers, layer_kinds
from headstart.heads.methods import find_drafter
from headstart.support.config import parse
from headstart.support.errors import UserError, notice, waiting
from headstart.support.hub import EMBEDDED, local_or_shipped
from headstart.support.text import gigabytes
from headstart.training.data.rows import names_file, read_rows
from headstart.training.features.source import read_config
from headstart.training.plan.fake_model import FakeModels, make_fake_models
from headstart.training.plan.memory import MemoryPlan, MicroBatch, StepMemory
from headstart.training.plan.plan import Machine
from headstart.training.recipe import sections
from headstart.training.recipe.recipe import VOCABULARY_KEY, Recipe
from headstart.training.recipe.sections import Data
from headstart.training.recipe.yaml_text import dump_yaml, merged, read_extended
from headstart.training.run.start import CPU_DEPTH, CPU_VOCABULARY

Tree = dict[str, Any]
METHODS = ("eagle3", "peagle", "block", "medusa", "medusa2", "hydra", "eagle", "mlp", "mtp", "draft_model")
ROWS = {"ultrachat": 207_865, "sharegpt": 68_000, "perfectblend": 500_000, "mix": 507_865}
"""Data presets of conversations, and how many they have."""
TEXT, TEXT_TOKENS = "text", 118_000_000
"""The preset of texts, which are packed, and about how many tokens it has."""
HELD: int = Data.model_fields["eval_rows"].default
"""Rows of the user's own that are held out where there are plenty."""
SHARED = "recipes/shared"
DRAFT_VOCAB = 32_000
CPU_KINDS, CPU_SHARE = ("eagle", "eagle3"), 0.5
"""On a CPU, heads that pass through one layer for each depth draft of fewer tokens and depths, which are trained at fewer positions."""
CPU_ROWS, CPU_ANSWERS = 4, {"max_new_tokens": 256, "unfinished": "keep"}
"""On a CPU: rows of a step over a file, and how the model answers, for as many tokens as possible in the time that there is."""
TOGETHER, SMALL = 32, 2_000_000_000
"""Rows that models of fewer weights answer together on a CPU: the KV cache of so many is small beside them."""
BATCH_TOKENS = 32_768
RATE_WIDTH, AUTO_WIDTH = 4096, 1024
WIDE = 8192
"""Width from which block heads have 2 layers: each takes 14 GB while it is trained, its optimizer state and gradients included."""
LENGTH, LONG = 2048, 4096
PASSES, CPU_PASSES = 2, 4
FORWARD_TOKENS = 4096
"""Tokens of a forward pass, enough to keep an accelerator busy; a trained backbone keeps its activations, and has half."""
BYTES, SHARE_OF_MEMORY = 2, 0.5
"""Of a weight in bf16; of a device's memory that the backbone may take before it is sharded."""
SHARE_OF_ALL = 0.6
"""Of the memory of all devices that it may take before servers run it."""
SERVER = "http://localhost:8000"
"""Where ``headstart serve-features`` serves hidden states by default."""
LEAST_CONTEXT = 32
"""Positions below which a model is no use as a backbone."""
ORDER = ("backbone", "drafter", "features", "data", "regenerate", "objective", "train", "eval", "save")
FIRST = ("path", "kind", "train", "dir", "steps", "epochs", "batch_size", "micro_batch", "lr")
THOUGHTS = ("<think>", "<|channel|>analysis", "enable_thinking")
"""Texts in the chat templates of models that write their reasoning before an answer."""
CONTEXT = 2048
"""Positions assumed for a model whose configuration states none."""


@dataclass(frozen=True)
class Proposal:
    """A recipe: the parts of recipes/shared that it extends, and its own values."""

    extends: tuple[str, ...]
    own: Tree

    @property
    def tree(self) -> Tree:
        """The whole recipe."""
        tree: Tree = {}
        for name in self.extends:
            tree = merged(tree, shared(name))
        return merged(tree, self.own)

    def text(self, folder: str = SHARED) -> str:
        """Return the file; ``folder``: that of the parts, as it names them."""
        return f"extends: [{', '.join(f'{folder}/{name}.yaml' for name in self.extends)}]\n{dump_yaml(self.own)}"

    @waiting("fitting rows into memory")
    def fitted(self, machine: Machine, config: str) -> tuple[Proposal, FakeModels]:
        """Return the proposal with the changes that make it fit the machine, and its models (`fit`). Raises UserError if nothing does."""
        changes, _, models = fit(self.tree, machine, config)
        return self.changed(changes), models

    def changed(self, changes: Tree) -> Proposal:
        """Return the proposal with other values of its own, in the order of docs/recipe.md, paths, kinds and lengths first."""
        tree = {key: values for key, values in merged(self.own, changes).items() if values}
        order = {key: sorted(tree[key], key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)) for key in tree}
        return Proposal(self.extends, {key: {name: tree[key][name] for name in order[key]} for key in sorted(tree, key=ORDER.index)})


def shared(name: str) -> Tree:
    """Return the values of a part in recipes/shared."""
    return read_extended(local_or_shipped(f"{SHARED}/{name}.yaml"))[0]


def require_method(name: str) -> None:
    """Raise UserError for a method that is none."""
    if name not in METHODS:
        raise UserError(f"--method {name} is unknown; methods are {', '.join(METHODS)}")


def own_data(name: str) -> Tree:
    """Return the section of data that is no preset: a file, of whose few rows every tenth is held out, or a dataset. Raises UserError."""
    if not name.strip():
        raise UserError(f"--data is one of {', '.join([*ROWS, TEXT])}, a file of rows, or the name of a dataset; got {name!r}")
    if name in ROWS or name == TEXT:
        return {}
    count = len(read_rows(name, limit=10 * HELD)) if names_file(name) else 10 * HELD
    return {"train": name} | ({"eval_rows": max(1, count // 10)} if count < 10 * HELD else {})


def propose(facts: ModelFacts, method: str, machine: Machine, data: str | None = None) -> Proposal:
    """Return a recipe by rule, without planning it. ``data``: a preset, file or dataset (None: by the model). Raises UserError."""
    require_method(method)
    if facts.context < LEAST_CONTEXT:
        raise UserError(f"{facts.path} has a context of {facts.context} tokens; heads need a backbone of at least {LEAST_CONTEXT}")
    part, preset = shared(method), data or ("ultrachat" if facts.chat else TEXT)
    takes_layers = "backbone" in part or method == "draft_model"
    section, length = own_data(preset), min(LONG if facts.thinks else LENGTH, facts.context)
    values: Tree = {
        "backbone": {"path": facts.path}, "drafter": _drafter(facts, method, machine), "data": {**section, "max_length": length},
        "regenerate": {"temperature": 0.7, "max_new_tokens": length // 2} | ({} if machine.accelerator else CPU_ANSWERS),
        "train": _train(facts, part, preset, length, machine),
        "save": {"dir": f"out/{facts.name}/{method}"},
    }  # fmt: skip
    if not machine.accelerator and facts.parameters < SMALL:
        values["regenerate"]["batch_size"] = TOGETHER
    if machine.accelerator:
        values["backbone"]["dtype"] = values["train"]["precision"] = "bf16"
    if preset == TEXT and facts.packable:
        values["data"]["packing"] = True
    all_devices = SHARE_OF_ALL * machine.memory * machine.processes
    if machine.accelerator and facts.parameters * BYTES > all_devices and not takes_layers:
        values["features"] = {"endpoint": SERVER}
    elif machine.processes > 1 and "backbone" not in part and not fits_one(facts, machine.memory):
        values["backbone"]["shard"] = True
    return Proposal((method, *(() if section else (preset,))), {}).changed(values)


def fits_one(facts: ModelFacts, memory: float) -> bool:
    """Whether the rules train on one GPU of this many bytes: the backbone takes at most half of it."""
    return facts.parameters * BYTES <= SHARE_OF_MEMORY * memory


def _drafter(facts: ModelFacts, method: str, machine: Machine) -> Tree:
    kind, values = shared(method)["drafter"]["kind"], Tree()
    if kind == "block":
        values = {"layers": max(1, min(5 if facts.width < WIDE else 2, facts.layers // 2)), "correction_rank": min(256, facts.width)}
    if kind == "mlp" and facts.vocab > 2 * DRAFT_VOCAB:
        values = {"tie_weights": True}  # each depth would have two tables
    chosen = VOCABULARY_KEY in find_drafter(kind).Config.model_fields
    if chosen and facts.vocab > 2 * DRAFT_VOCAB:
        values[VOCABULARY_KEY] = DRAFT_VOCAB
    if not machine.accelerator and kind in CPU_KINDS:
        values |= {"depth": CPU_DEPTH} if shared(method)["drafter"]["depth"] > CPU_DEPTH else {}
        values |= {"deeper_share": CPU_SHARE} if kind == "eagle3" else {}
        values |= {VOCABULARY_KEY: CPU_VOCABULARY} if chosen and facts.vocab > 2 * CPU_VOCABULARY else {}
    return values


def _train(facts: ModelFacts, part: Tree, preset: str, length: int, machine: Machine) -> Tree:
    """Return the length of the run, its rows and its learning rate."""
    rows = part["train"].get("batch_size") or 1 << max(1, BATCH_TOKENS // length).bit_length() - 1
    tokens = FORWARD_TOKENS // 2 if "backbone" in part else FORWARD_TOKENS
    steps = ROWS[preset] / rows if preset in ROWS else TEXT_TOKENS / BATCH_TOKENS
    train: Tree = {"epochs": PASSES if machine.accelerator else CPU_PASSES}
    if preset in ROWS or preset == TEXT:
        train = {"steps": max(100, round(PASSES * steps / 100) * 100)}
    short, published = "epochs" in train and not machine.accelerator, part["train"]["lr"]
    automatic = short or facts.width < AUTO_WIDTH  # published rates are for ten times as many steps
    rate = "auto" if automatic else float(f"{published * max(1, RATE_WIDTH / facts.width):.1e}")
    rows = min(rows, CPU_ROWS) if short else rows
    train |= {} if rows == part["train"].get("batch_size") else {"batch_size": rows}
    train["micro_batch"] = min(max(1, rows // machine.processes), 1 << (max(1, tokens // length).bit_length() - 1))
    return train if rate == published else {**train, "lr": rate}


def fit(tree: Tree, machine: Machine, config: str) -> tuple[Tree, int, FakeModels]:
    """Return the changes that make the recipe ``tree`` fit the machine, none if it does, the bytes that it takes at most then, and models.

    Activations are recomputed, then the backbone is sharded; on each step fewer rows are tried. ``config``: the folder or hub id of the
    backbone's configuration. Raises UserError, naming the largest part, if nothing makes it fit.
    """
    closest: StepMemory | None = None
    for change in _ladder(tree, machine):
        recipe = parse(Recipe, merged(merged(tree, change), {"backbone": {"path": config}}))
        plan = MemoryPlan(recipe, make_fake_models(recipe, machine.accelerator), machine.accelerator, True, machine.processes)
        if sum(plan.persistent.values()) > machine.usable:
            closest = closest or StepMemory({"training": plan.persistent})
            continue
        rows = int(tree["train"]["micro_batch"])
        while rows:
            closest = plan.step(MicroBatch(rows, tree["data"]["max_length"]))
            if closest.peak <= machine.usable:
                smaller = {"train": {"micro_batch": rows}} if rows < tree["train"]["micro_batch"] else {}
                return merged(change, smaller), closest.peak, plan.models
            rows //= 2
    assert closest is not None
    part = closest.largest_part
    largest = gigabytes(closest.phases[closest.peak_phase][part])
    more = "more memory (--memory)" if machine.processes > 1 else "more GPUs (--gpus), which share the backbone, or more memory (--memory)"
    needed = f"it takes {gigabytes(closest.peak)}, of which the largest part is {part}, {largest}"
    fault = f"nothing fits {machine.processes} x {gigabytes(machine.memory)}, not even one row at a time"
    raise UserError(f"{fault}: {needed}; give {more}, or a smaller backbone")


def _ladder(tree: Tree, machine: Machine) -> Iterator[Tree]:
    frozen = tree["backbone"].get("lora") is None
    recomputed = {"train": {"gradient_checkpointing": True}}
    can_recompute = not frozen or find_drafter(tree["drafter"]["kind"]).recomputable  # the backbone can
    steps = [{}, recomputed] if can_recompute else [{}]
    yield from steps
    if machine.processes > 1 and frozen and not tree["backbone"].get("shard"):
        yield from (merged({"backbone": {"shard": True}}, change) for change in steps)


@dataclass(frozen=True)
class ModelFacts:
    path: str
    """Hub id or folder, as the recipe names the backbone."""
    parameters: int
    layers: int
    width: int
    vocab: int
    context: int
    packable: bool
    """Whether several documents may share a row: not where layers follow no mask."""
    chat: bool
    """Whether the tokenizer has a chat template."""
    thinks: bool
    """Whether the chat template knows reasoning before the answer."""

    @property
    def name(self) -> str:
        """The folder of its recipes: the last part of the path in lower case."""
        return "embedded" if self.path == EMBEDDED else Path(self.path).name.lower().removesuffix(SUFFIX)


@waiting("reading the model's configuration and tokenizer")
def read_facts(path: str, *, trust_remote_code: bool = False) -> ModelFacts:
    """Look at a model, a folder or hub id. Raises UserError if it is no backbone."""
    config = read_config(sections.Backbone(path=path, trust_remote_code=trust_remote_code))
    model = empty_model(config, path, trust_remote_code=trust_remote_code)
    config = model.config.get_text_config()
    stated, readout = config.to_dict(), model.get_output_embeddings()
    layers = decoder_layers(model, config.num_hidden_layers)
    tokenizer: PreTrainedTokenizerBase | None = None
    try:
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    except UserError:
        notice("assumed: a tokenizer with a chat template: none could be read")
    template = "" if tokenizer is None else str(tokenizer.chat_template or "")
    _, recurrent, no_trees = layer_kinds(model, layers)
    context = stated.get("max_position_embeddings") or stated.get("n_positions")
    if context is None:
        notice(f"assumed: a context of {CONTEXT:,} tokens: its configuration states none")
    return ModelFacts(
        path=path, parameters=sum(weight.numel() for weight in model.parameters()),
        layers=len(layers), width=config.hidden_size, vocab=readout.weight.shape[0], context=context or CONTEXT,
        packable=recurrent is None and no_trees is None, chat=tokenizer is None or bool(template),
        thinks=any(text in template for text in THOUGHTS),
    )  # fmt: skip
