"""What benchmarks/transfer.py trains: backbones with their data, settings, and the order of the cells.

A setting is a list of ``a.b=c`` on top of `BASE`, named by what it changes (`setting`). Backbones come from a folder that ``--assemble``
fills.
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
    "train.readout_lr_ratio=1", "drafter.norm_output=false",
)  # fmt: skip
RATES = (0.0025, 0.003, 0.004, 0.0045, 0.005, 0.006, 0.007, 0.008, 0.01, 0.012, 0.014, 0.016, 0.02, 0.028, 0.04)
"""Learning rates by name, as in ``default+muon+lr0.01``: a rate without an optimizer is AdamW's."""


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
    "prose2-short": Backbone(128, 2, 2048, 2.0, "prose2-short"),
    "tasks5": Backbone(160, 5, 1536, 2.4, "tasks5"),
    "tasks5-short": Backbone(160, 5, 1536, 2.4, "tasks5-short"),
    "chat-7m": Backbone(256, 8, 4096, 7.0, "chat"),
    "embedded": Backbone(384, 12, 4096, 12.0, "python"),
}
RIVAL = "speculators"
"""Settings that begin so train speculators' heads (speculators_heads.py)."""
BASES: dict[str, tuple[str, ...]] = {
    "base": (),
    "rule": ("train.lr={rate}",),
    "default": (
        "drafter.norm_output=true", "train.batch_size=1", "train.optimizer=auto", "train.lr=auto", "train.readout_lr_ratio=auto",
        "train.min_lr_ratio=0.1",
    ),
    RIVAL: ("train.batch_size=1",),
}  # fmt: skip
"""Overrides by name: none, the learning rate by width, the defaults of a recipe with steps of one text, speculators' own."""
CHANGES: dict[str, tuple[str, ...]] = {
    **{f"lr{rate:g}": (f"train.lr={rate:g}",) for rate in RATES},
    "muon": ("train.optimizer=muon",),
    "half": ("train.lr={half}",),
    "double": ("train.lr={double}",),
    **{f"batch{size}": (f"train.batch_size={size}",) for size in (1, 2, 4, 8)},
    **{f"readout{ratio:g}": (f"train.readout_lr_ratio={ratio:g}",) for ratio in (0.1, 0.3, 1)},
    "frozen": ("drafter.freeze_readout=true",),
    "normed": ("drafter.norm_output=true",),
    "residual": ("drafter.norm_before_residual=true",),
    "before_fc": ("drafter.norm_before_fc=true",),
    "fc_norm": ("drafter.fc_norm=true",),
    "final_tap": ("drafter.taps={final}",),
    "all_taps": ("drafter.taps={all}",),
    "two_layers": ("drafter.layers=2",),
    "wide": ("drafter.intermediate_size={wide}",),
    "deeper": ("drafter.depth=8",),
    "even": ("objective.depth_weights=geometric", "objective.depth_decay=1.0"),
    "tv": ("objective.terms={ce: 0.1, tv: 0.9}",),
    "lk": ("objective.terms={lk: 1.0}",),
    "linear": ("train.schedule=linear", "train.min_lr_ratio=0"),
    "average": ("train.ema_decay=0.99",),
    "unclipped": ("train.max_grad_norm=.inf",),
    "decay": ("train.weight_decay=0.1",),
    "on_policy": ("objective.on_policy=1",),
    "four_epochs": (),
    "fp32": ("train.precision=no",),
    "own": ("data.train={own}",),
}
"""By name, what can be added to those. ``{final}`` and ``{all}`` stand for taps that depend on the number of layers, ``{wide}`` for a width
of the feed-forward part, ``{own}`` for the backbone's own text (``--own-text``), ``{rate}`` for a learning rate inverse to the width.
``four_epochs`` takes a quarter of the rows."""
SMALL, LARGE = ("stories260K", "babyllama-tok105", "prose2", "tasks5"), ("chat-7m", "embedded")
RIVALS = tuple(f"{RIVAL}+lr{rate:g}" for rate in (0.01, 0.005, 0.02, 0.0025))
TIERS: tuple[tuple[tuple[str, ...], tuple[str, ...], int, float], ...] = (
    (("default",), (*SMALL, *LARGE), 0, 1.0),
    (RIVALS, (*SMALL, *LARGE), 0, 1.0),
    (("default+own", f"{RIVAL}+lr0.01+own", f"{RIVAL}+lr0.005+own"), SMALL, 0, 1.0),
    (("default", f"{RIVAL}+lr0.01"), ("stories260K", "babyllama-tok105"), 0, 4.0),
    (("default", *RIVALS), (*SMALL, *LARGE), 0, 0.1),
    (("default", *RIVALS), (*SMALL, *LARGE), 1, 1.0),
)
"""Settings, backbones, a seed and the fraction of ``--tokens``, most telling first; within a tier the largest cells start first."""


def setting(name: str) -> str:
    """Return the name of a setting: one of `BASES`, then any of `CHANGES`, as in ``default+frozen+batch2``."""
    base, *changes = name.split("+")
    if base not in BASES or not {*changes} <= {*CHANGES}:
        raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(BASES)}, followed by any of +{', +'.join(CHANGES)}")
    return name


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


def model_path(backbone: str, folder: Path) -> str | None:
    """Where a backbone is; None if it is not there yet."""
    if backbone == "embedded":
        return backbone
    return str(folder / backbone) if (folder / backbone / "tokenizer_config.json").exists() else None


def recipe_of(cell: Cell, args: argparse.Namespace, out: str) -> Recipe:
    """Return the recipe that trains a cell into ``out`` on as many rows, read once, as have its tokens."""
    backbone, sample = BACKBONES[cell.backbone], 200
    rows = args.folder / backbone.rows
    place = [f"backbone.path={model_path(cell.backbone, args.folder)}"]
    place += [f"data.{part}={rows}/{part}.jsonl.gz" for part in ("train", "eval")]
    sizes = [f"data.eval_rows={2 * args.prompts}", f"eval.prompts={args.prompts}", f"eval.max_new_tokens={args.new_tokens}"]
    given = [*BASE, *place, *sizes, "eval.prompt_tokens=32", f"seed={cell.seed}", f"save.dir={out}", *overrides_of(cell, args.folder)]
    recipe = load_recipe(RECIPE, [*given, f"data.limit={sample}", "train.steps=1"])
    stats = load_data(recipe.data, load_tokenizer(recipe.backbone.path), recipe.data.max_length, progress=False).stats
    steps = max(1, round(cell.tokens * stats.samples / stats.tokens / recipe.train.batch_size))
    limit = max(1, round(1.05 * cell.tokens * stats.rows / stats.tokens / (4 if "four_epochs" in cell.setting.split("+") else 1)))
    return load_recipe(RECIPE, [*given, f"data.limit={limit}", f"train.steps={steps}"])


def overrides_of(cell: Cell, folder: Path) -> list[str]:
    """The setting's overrides for the backbone."""
    L, rate = BACKBONES[cell.backbone].layers, 1.024 / BACKBONES[cell.backbone].width
    values = {"{rate}": f"{rate:g}", "{half}": f"{rate / 2:g}", "{double}": f"{2 * rate:g}", "{own}": f"{folder}/own/{cell.backbone}.jsonl"}
    values |= {"{final}": f"{sorted({max(1, min(2, L // 3)), L // 2, L})}", "{all}": f"{[*range(1, L + 1)]}"}
    values["{wide}"] = f"{8 * BACKBONES[cell.backbone].width}"
    base, *names = cell.setting.split("+")
    changes = [*BASES[base], *(change for name in names for change in CHANGES[name])]
    for name, value in values.items():
        changes = [change.replace(name, value) for change in changes]
    return changes
