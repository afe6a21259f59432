"""What benchmarks/transfer.py trains: backbones with their data, settings, and the order of the cells.

A setting is a list of ``a.b=c`` on top of `BASE`; it is named by what it changes. Backbones come from a folder that ``--assemble`` fills.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.training.data.data import load_data
from headstart.training.recipe.recipe import Recipe, load_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart" / "eagle3.yaml"
DEPTH = 5
BASE = (
    f"drafter.depth={DEPTH}", "drafter.draft_vocab_size=null", "data.max_length=256", "data.packing=false", "eval.every=0", "save.every=0",
    "log.every=50", "data.overlong=truncate", "data.limit=null", "train.optimizer=muon", "train.min_lr_ratio=0.02", "train.batch_size=2",
    "train.lr=8e-3", "train.max_grad_norm=1.0", "train.warmup_ratio=0.03", "objective.terms={kl: 1.0}", "objective.depth_weights=expected",
    "drafter.norm_output=false",
)  # fmt: skip


@dataclass(frozen=True)
class Backbone:
    """A model with its data, and how its folder is assembled."""

    width: int
    layers: int
    vocabulary: int
    cost: float
    """Relative cost of a training token; the largest cells start first."""
    rows: str
    """Folder of ``train.jsonl.gz`` and ``eval.jsonl.gz`` within the assembled one."""


BACKBONES = {
    "stories260K": Backbone(64, 5, 512, 1.0, "stories"),
    "babyllama-tok105": Backbone(128, 5, 105, 1.2, "stories"),
    "prose2": Backbone(128, 2, 2048, 2.0, "prose2"),
    "tasks5": Backbone(160, 5, 1536, 2.4, "tasks5"),
    "chat-7m": Backbone(256, 8, 4096, 7.0, "chat"),
    "embedded": Backbone(384, 12, 4096, 12.0, "python"),
}
RIVAL = "speculators"
"""Settings of this name train speculators' heads (speculators_heads.py)."""
TV, LK = "objective.terms={ce: 0.1, tv: 0.9}", "objective.terms={lk: 1.0}"
FROZEN, NORMED = "drafter.freeze_readout=true", "drafter.norm_output=true"
EVEN = ("objective.depth_weights=geometric", "objective.depth_decay=1.0")


def lr(rate: float) -> str:
    return f"train.lr={rate:g}"


def batch(size: int) -> str:
    return f"train.batch_size={size}"


SETTINGS: dict[str, tuple[str, ...]] = {
    "base": (),
    "lr4e-3": (lr(4e-3),),
    "lr16e-3": (lr(16e-3),),
    "tv": (TV,),
}
RULED = {
    "": (),
    "-lr-half": ("train.lr={half}",),
    "-lr-double": ("train.lr={double}",),
    "-batch1": (batch(1),),
    "-batch1-lr-half": (batch(1), "train.lr={half}"),
    "-batch4": (batch(4),),
    "-frozen": (FROZEN,),
    "-normed": (NORMED,),
    "-eagle3.1": (NORMED, "drafter.fc_norm=true"),
    "-even": EVEN,
    "-normed-even": (NORMED, *EVEN),
    "-residual": ("drafter.norm_before_residual=true",),
    "-normed-residual": (NORMED, "drafter.norm_before_residual=true"),
    "-final-tap": ("drafter.taps={final}",),
    "-unclipped": ("train.max_grad_norm=.inf",),
    "-tv": (TV,),
    "-lk": (LK,),
    "-linear": ("train.schedule=linear",),
    "-warmup10": ("train.warmup_ratio=0.1",),
    "-average": ("train.ema_decay=0.99",),
    "-rival-like": (FROZEN, NORMED, "drafter.norm_before_residual=true", "drafter.norm_before_fc=true", *EVEN),
}
SETTINGS |= {f"rule{name}": ("train.lr={rate}", *changes) for name, changes in RULED.items()}
SETTINGS |= {f"{RIVAL}-lr{rate:g}": (batch(1), lr(rate)) for rate in (2.5e-3, 5e-3, 1e-2, 2e-2)}
"""By name, what a setting changes. ``{final}`` stands for taps that depend on the number of layers, ``{rate}`` for the learning rate that
training/run/defaults.py takes since the first sweep, for steps of two texts: inverse to the width."""
SMALL, LARGE, TINY = ("stories260K", "babyllama-tok105", "prose2", "tasks5"), ("chat-7m", "embedded"), ("stories260K", "babyllama-tok105")
TIERS: tuple[tuple[tuple[str, ...], tuple[str, ...], int, float], ...] = (
    (("base", "lr4e-3", "lr16e-3", "tv"), (*SMALL, *LARGE), 0, 1.0),
    (("rule", "rule-lr-half", "rule-lr-double"), TINY, 0, 4.0),
    (("rule-frozen", "rule-final-tap", "rule-batch1"), LARGE, 0, 1.0),
    (("rule-batch1", "rule-batch4", "rule-frozen", "rule-final-tap", "rule-normed", "rule-unclipped"), SMALL, 0, 1.0),
    (tuple(f"{RIVAL}-lr{rate:g}" for rate in (5e-3, 1e-2)), SMALL, 0, 1.0),
    (("rule", "rule-lr-half", "rule-lr-double"), (*SMALL, *LARGE), 0, 0.25),
    (("rule-tv",), TINY, 0, 4.0),
    (tuple(f"{RIVAL}-lr{rate:g}" for rate in (2.5e-3, 2e-2)), SMALL, 0, 1.0),
    (("rule", "rule-rival-like", "rule-linear", "rule-lk"), SMALL, 1, 1.0),
    (("rule-batch1-lr-half", "rule-warmup10", "rule-average"), SMALL, 0, 1.0),
    (("rule", "rule-lr-half", "rule-lr-double"), (*SMALL, *LARGE), 1, 1.0),
)
"""Settings, backbones, a seed and the fraction of ``--tokens``, most telling first; within a tier the largest cells start first."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    setting: str
    backbone: str
    seed: int
    tokens: int

    @property
    def cost(self) -> float:
        return self.tokens * BACKBONES[self.backbone].cost


def cells(tokens: int, settings: list[str], backbones: list[str], seeds: list[int]) -> list[Cell]:
    """Return the cells of the tiers, in order and each once; with ``settings``, those with all ``seeds`` instead."""
    tiers = [(tuple(settings), tuple(backbones), seed, 1.0) for seed in seeds] if settings else TIERS
    found: dict[Cell, None] = {}
    for names, ones, seed, share in tiers:
        tier = [Cell(name, one, seed, round(tokens * share)) for name in names for one in ones if one in backbones]
        found |= dict.fromkeys(sorted(tier, key=lambda cell: -cell.cost))
    return [*found]


def model_path(cell: Cell, folder: Path) -> str | None:
    """Where the cell's backbone is; None if it is not there yet."""
    if cell.backbone == "embedded":
        return cell.backbone
    return str(folder / cell.backbone) if (folder / cell.backbone / "tokenizer_config.json").exists() else None


def recipe_of(cell: Cell, args: argparse.Namespace, out: str) -> Recipe:
    """Return the recipe that trains a cell into ``out`` on as many rows, read once, as have its tokens."""
    backbone, sample = BACKBONES[cell.backbone], 200
    rows = args.folder / backbone.rows
    place = [f"backbone.path={model_path(cell, args.folder)}", f"data.train={rows}/train.jsonl.gz", f"data.eval={rows}/eval.jsonl.gz"]
    sizes = [f"data.eval_rows={2 * args.prompts}", f"eval.prompts={args.prompts}", f"eval.max_new_tokens={args.new_tokens}"]
    given = [*BASE, *place, *sizes, "eval.prompt_tokens=32", f"seed={cell.seed}", f"save.dir={out}", *_changes(cell)]
    recipe = load_recipe(RECIPE, [*given, f"data.limit={sample}", "train.steps=1"])
    stats = load_data(recipe.data, load_tokenizer(recipe.backbone.path), recipe.data.max_length, progress=False).stats
    steps = max(1, round(cell.tokens * stats.samples / stats.tokens / recipe.train.batch_size))
    limit = max(1, round(1.05 * cell.tokens * stats.rows / stats.tokens))
    return load_recipe(RECIPE, [*given, f"data.limit={limit}", f"train.steps={steps}"])


def _changes(cell: Cell) -> list[str]:
    """The setting's overrides for the backbone's number of layers."""
    L, rate = BACKBONES[cell.backbone].layers, 1.024 / BACKBONES[cell.backbone].width
    values = {"{rate}": f"{rate:g}", "{half}": f"{rate / 2:g}", "{double}": f"{2 * rate:g}"}
    values |= {"{final}": f"{sorted({max(1, min(2, L // 3)), L // 2, L})}"}
    changes = list(SETTINGS[cell.setting])
    for name, value in values.items():
        changes = [change.replace(name, value) for change in changes]
    return changes
