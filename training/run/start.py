"""What drafters start with: values in place of ``auto``, trained heads (``drafter.init``), draft vocabularies, and values fitted to the
training text.

``auto`` stands for values that depend on the drafter, the steps and the length of the run. The rule was fitted to sweeps over backbones of
width 64 to 384, in runs of 59 to 6,000 steps (docs/defaults.md). Wider drafters and longer runs follow the same exponents, which is an
extrapolation.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from accelerate import Accelerator
from accelerate.utils import is_bf16_available, parse_flag_from_env

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.checkpoint import read_metadata, require_sizes
from headstart.heads.eagle3 import Eagle3
from headstart.heads.own_readout import OwnReadoutDrafter
from headstart.heads.warm_start import WarmStart, read_warm_start, require_kind
from headstart.support.devices import find_accelerator
from headstart.support.errors import naming
from headstart.support.terminal import progress
from headstart.training.data.batches import FORWARD_TOKENS, batches_by_length, collate
from headstart.training.data.data import LabelCounts, most_frequent
from headstart.training.data.samples import Sample
from headstart.training.features.source import FeatureSource, dtype_in_training, read_config
from headstart.training.recipe.recipe import Recipe, split_drafter
from headstart.training.run.processes import is_sharded

WIDTH, STEP_TOKENS, STEPS = 128, 512, 300
"""The size of run at which the learning rate is `PEAK`."""
LONG = 1000
"""Steps from which on the rate falls more slowly."""
PEAK = {"muon": 1e-2, "adamw": 5e-3}
WIDTH_EXPONENT, TOKENS_EXPONENT, STEPS_EXPONENT, LONG_EXPONENT = -1.0, 0.25, -0.5, -0.25
HIGHEST = 3e-2
FEW_STEPS, ENOUGH_STEPS = 200, 600
"""A run of fewer steps than the first learns much more from the same text in as many as the second (measured with EAGLE-3)."""
MANY_PASSES, PASSES = 20, 4
"""A recipe's steps that read the same text as often as the first are meant for more of it; the second is enough for little."""
CPU_DEPTH, CPU_VOCABULARY = 4, 8192
"""What heads that compute the logits of a vocabulary of their own for every depth draft on a CPU (docs/train.md)."""
ADAPTED = 0.3
"""Factor of the learning rate where training goes on from weights that were trained before."""
AUTO = "auto"
CPU_POSITIONS = 1024
"""Positions of a forward pass on a CPU, where more bring no speed and would show progress seldom."""


@dataclass(frozen=True)
class Chosen:
    """Values in place of ``auto`` by dotted key, and what they follow from. Saved with a run, so that resuming it keeps them."""

    values: dict[str, float | str]
    reason: str

    def __str__(self) -> str:
        return f"{', '.join(f'{key}={value}' for key, value in self.values.items())} (auto: {self.reason})"

    def put_into(self, recipe: Recipe) -> Recipe:
        values = {key.removeprefix("train."): value for key, value in self.values.items()}
        return recipe.but({"train": values})


def choose(recipe: Recipe, drafter: Drafter, step_tokens: float, steps: int) -> Chosen:
    """Choose what a drafter's recipe leaves to ``auto``; nothing if it names all values.

    ``step_tokens``: mean number of tokens of an optimizer step, padding excluded; ``steps``: optimizer steps of the run.
    """
    values: dict[str, float | str] = {}
    adapted = drafter.pretrained or split_drafter(recipe.drafter)[0].init is not None
    reason = f"width {drafter.width:,}, {steps:,} steps of about {step_tokens:,.0f} tokens"
    if recipe.train.lr == AUTO:
        optimizer = recipe.train.chosen_optimizer
        values = {"train.optimizer": optimizer, "train.lr": learning_rate(optimizer, drafter.width, step_tokens, steps, adapted)}
        reason += ", weights that were trained before" if adapted else ""
    ratio = drafter.readout_lr_ratio if recipe.train.chosen_optimizer == "muon" and not drafter.frozen() else 1.0
    if recipe.train.readout_lr_ratio == AUTO and ratio != 1.0:
        values["train.readout_lr_ratio"] = ratio
    return Chosen(values, reason)


def with_precision(recipe: Recipe) -> Recipe:
    """Return the recipe with ``train.precision: auto`` resolved, before anything is loaded: an `Accelerator` has to be made with it."""
    if recipe.train.precision != AUTO:
        return recipe
    device = None if parse_flag_from_env("ACCELERATE_USE_CPU") else find_accelerator()
    dtype = dtype_in_training(recipe.backbone, read_config(recipe.backbone), device or torch.device("cpu"))
    return recipe.but({"train": {"precision": autocast_name(recipe.train.precision, dtype)}})


def autocast_name(precision: str, backbone: torch.dtype) -> str:
    """Return ``train.precision`` with ``auto`` resolved; ``backbone``: the dtype that the backbone is loaded in."""
    if precision != AUTO:
        return precision
    return "bf16" if backbone in (torch.bfloat16, torch.float16) and is_bf16_available() else "no"


def learning_rate(optimizer: str, width: int, step_tokens: float, steps: int, adapted: bool = False) -> float:
    """Return the peak learning rate with two significant digits."""
    rate = PEAK[optimizer] * (width / WIDTH) ** WIDTH_EXPONENT
    rate *= (step_tokens / STEP_TOKENS) ** TOKENS_EXPONENT
    rate *= (min(steps, LONG) / STEPS) ** STEPS_EXPONENT * (max(steps, LONG) / LONG) ** LONG_EXPONENT
    return float(f"{min(rate, HIGHEST) * (ADAPTED if adapted else 1.0):.2g}")


def advice(recipe: Recipe, drafters: Iterable[Drafter], steps: int, rows: int, processes: int, accelerator: bool) -> str | None:
    """Return what to set so that heads learn more in the same time; None where nothing is known. ``rows``: of the training data."""
    train = recipe.train
    for one in drafters if not accelerator else ():
        if isinstance(one, Eagle3) and one.depth * one.draft_vocab > 2 * CPU_DEPTH * CPU_VOCABULARY:
            command = f"headstart new-recipe {recipe.backbone.path} --data {recipe.data.train[0].path}"
            return f"{one.depth} depths of {one.draft_vocab:,} tokens are for a GPU; {command} writes a recipe that trains faster on a CPU"
    passes = steps * train.batch_size / max(rows, 1)
    if train.steps is not None and passes > MANY_PASSES:
        return f"{steps:,} steps read the same {rows:,} rows {passes:,.0f} times: train.epochs={PASSES} reads them {PASSES} times"
    unit = math.lcm(processes, train.micro_batch or 1)
    size = max(train.batch_size * steps // ENOUGH_STEPS // unit, 1) * unit
    if train.steps is not None or steps >= FEW_STEPS or size >= train.batch_size:
        return None
    more = steps * train.batch_size // size
    return f"{steps:,} steps are few: train.batch_size={size} makes {more:,} of the same text, and heads learn more from it"


def require_starts(recipe: Recipe) -> Recipe:
    """Return the recipe; raise UserError if a drafter's ``init`` is missing, of another kind, or of a backbone of other sizes."""
    for single in recipe.per_drafter().values():
        options = split_drafter(single.drafter)[0]
        if options.init is not None:
            with naming("drafter.init"):
                require_kind(options.init, read_metadata(options.init)[1], options.kind)
                require_sizes(options.init, recipe.backbone.path, trust_remote_code=recipe.backbone.trust_remote_code)
    return recipe


def read_starts(recipe: Recipe, drafters: Mapping[str, Drafter]) -> dict[str, WarmStart]:
    """Read the trained heads of all drafters that have ``init``. Raises UserError if they do not fit."""
    starts: dict[str, WarmStart] = {}
    for name, single in recipe.per_drafter().items():
        options = split_drafter(single.drafter)[0]
        if options.init is not None:
            starts[name] = read_warm_start(options.init, options.kind, drafters[name].backbone)
            starts[name].require_fits(drafters[name])
    return starts


def set_vocabularies(drafters: Mapping[str, Drafter], counts: LabelCounts) -> None:
    """Set the draft vocabularies to the most frequent tokens of the training data."""
    for drafter in drafters.values():
        if drafter.vocabulary is not None:
            drafter.use_vocabulary(most_frequent(counts.training_V, len(drafter.vocabulary)))


def fit_starts(drafters: Sequence[Drafter], samples: Sequence[Sample], features: FeatureSource, accelerator: Accelerator) -> list[str]:
    """Let new drafters fit start values to texts, in the main process, or all if the backbone is sharded; returns lines for the log."""
    lines: list[str] = []
    fresh = [drafter for drafter in drafters if drafter.start_positions]
    if fresh and (accelerator.is_main_process or is_sharded(fresh[0].backbone)):
        for drafter in fresh:
            read = _features(drafter, samples, features, drafter.start_positions, "start values" if accelerator.is_main_process else None)
            lines.append(drafter.fit_start(read))
    if accelerator.num_processes > 1:
        for drafter in fresh:
            for weight in drafter.parameters():
                torch.distributed.broadcast(weight.detach(), 0)
    return [line for line in lines if line]


def fit_shortlists(drafter: Drafter, samples: Sequence[Sample], features: FeatureSource) -> str | None:
    """Let a trained drafter with ``drafter.shortlist`` find its subspaces on texts, in the main process; returns why it has none."""
    if not isinstance(drafter, OwnReadoutDrafter) or not drafter.shortlist_positions:
        return None
    if is_sharded(drafter.backbone):
        return "no shortlist: the backbone's layers are sharded (backbone.shard), and it is found by one process; drafts use exact logits"
    drafter.fit_shortlists(_features(drafter, samples, features, drafter.shortlist_positions, "the shortlist"))
    return None if drafter.shortlists else "no shortlist: no text that was read for it has labels; drafts use exact logits"


@torch.no_grad()
def _features(drafter: Drafter, samples: Sequence[Sample], source: FeatureSource, positions: int, shown: str | None) -> Iterator[Features]:
    """Yield the features of texts of about so many positions; ``shown``: what is fitted to them, in the main process."""
    source = source.for_starts(drafter.taps)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()  # of a mix, some of each part
    before = accumulate((len(samples[i].tokens) - 2 for i in order), initial=0)  # whose neighbours are known too
    chosen = [i for i, count in zip(order, before, strict=False) if count < positions]
    with progress(f"fitting {shown}", "token", sum(len(samples[i].tokens) for i in chosen), shown is not None) as bar:
        for indices in batches_by_length(samples, chosen, CPU_POSITIONS if drafter.backbone.device.type == "cpu" else FORWARD_TOKENS):
            yield source.read(collate(samples, [[i] for i in indices]).to(drafter.backbone.device))
            bar.update(sum(len(samples[i].tokens) for i in indices))
