"""The time of a training step: measured here with a few steps of the training loop on the recipe's backbone and data, in a temporary
folder, or estimated from its arithmetic for hardware that is not here; and whether the heads will pay on this machine.

Untrained heads draft in the time in which trained ones do. A chain of k drafted tokens, of which each is accepted with probability p if
all before it are, writes 1 + p + ... + p^k tokens in the time of drafting and verifying it. A pass over several tokens is taken to last no
shorter than one over a single token, which noise may say.

The backbone's forward pass takes two operations per active weight of its layers and token. A drafter's forward and backward pass and the
objective run on fake tensors and are counted by torch's formulas for each operation, so by their own code: on a row of a few tokens,
scaled to all of them. Attention scores grow faster than that and are left out: about 5 % at 2,048 tokens of a model of 8 billion weights.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.base import Drafter
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, continue_text
from headstart.support.errors import UserError, waiting
from headstart.support.hub import resolve
from headstart.training.features.cached import FeaturesBetweenEpochs
from headstart.training.features.manifest import read_manifest
from headstart.training.loop import training_step
from headstart.training.plan.memory import MemoryPlan, MicroBatch
from headstart.training.recipe.recipe import Recipe
from headstart.training.run.processes import StopSignal
from headstart.training.setup import Run, prepare

STEPS = 4
"""Number of steps that are timed, the first a warm-up."""
PROMPT, WRITTEN, WARM = 64, 12, 32
"""Tokens of the text that is continued, tokens written to it in each shape, and by passes without drafts before, as captures need."""
DEPTHS, ACCEPTANCE = (1, 2, 4, 8), (0.4, 0.6, 0.8)
LEARNED = ((46_000, 93_000, 1_047_000), (0.34, 0.40, 0.51))
"""Label tokens of the model's own answers, and the share of drafts that is accepted of EAGLE-3 heads trained on them (docs/train.md)."""
UTILISATION = 0.4
"""Share of the peak that a step is assumed to reach: an estimate, not measured; large models are commonly trained at 0.35 to 0.55."""
SAMPLE = 128
"""Positions of the row whose operations are counted."""
ROUTED = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that configurations give to the number of experts; ``num_experts_per_tok`` says how many of them a token meets."""


def why_not_loadable(recipe: Recipe) -> str | None:
    """Return the reason why the backbone's weights cannot be loaded without a download; None if they can."""
    if recipe.features.endpoint is not None and recipe.cache.dir is None:
        return "its hidden states come from servers (features.endpoint), which are as fast as they are"
    path = resolve(recipe.backbone.path)
    if find_gguf(path) is not None:
        return None
    if Path(path).is_dir():
        return None if list(Path(path).glob("*.safetensors")) else f"{recipe.backbone.path} has no weights (*.safetensors)"
    kept = [try_to_load_from_cache(path, name) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
    return None if any(isinstance(file, str) for file in kept) else f"the weights of {recipe.backbone.path} are not downloaded"


def live_until_cached(recipe: Recipe) -> Recipe:
    """Return the recipe, without its feature cache unless that is complete. Raises UserError."""
    manifest = None if recipe.cache.dir is None else read_manifest(Path(recipe.cache.dir))
    if manifest is not None and not manifest.missing():
        return recipe
    return recipe.but({"cache": {"dir": None}})


@waiting("timing")
def trial(recipe: Recipe, processes: int, tokens: Mapping[str, int]) -> tuple[float, dict[str, dict[str, Any] | str]]:
    """Return the mean seconds of a step of one of ``processes`` processes, without communication and evaluation, and by drafter what
    `gain_of` finds, or why nothing decodes here. ``tokens``: the plan's. Raises UserError for recipes that training would reject.
    """
    share = -(-recipe.train.batch_size // processes)
    limit = recipe.train.micro_batch or share
    fitting = max(size for size in range(1, share + 1) if share % size == 0 and size <= limit)
    lengths = {"steps": max(tokens["steps"], STEPS), "epochs": None, "batch_size": share, "micro_batch": fitting}
    with tempfile.TemporaryDirectory(prefix="headstart-plan-") as folder, redirect_stderr(StringIO()):
        run = prepare(recipe.but({"train": lengths, "save": {"dir": folder}, "log": {"wandb": "off"}}))
        try:
            epochs = max(1.0, run.feed.steps * share / run.feed.rows)
            first = _median(run)
            later = _median(run) if isinstance(run.source, FeaturesBetweenEpochs) and epochs > 1 else first  # the same steps, read
            seconds = (first + (epochs - 1) * later) / epochs
            drafters = {name: single.drafter for name, single in recipe.per_drafter().items()}
            learned = [tokens["label_tokens"] * (options["kind"] == "eagle3" and not options.get("init")) for options in drafters.values()]
            gains = {name: _gain(trainer.drafter, count) for name, trainer, count in zip(drafters, run.trainers, learned, strict=True)}
        finally:
            run.log.close()
    return seconds, gains


def _median(run: Run) -> float:
    seconds = []
    with StopSignal() as signal:
        for step in range(1, STEPS + 1):
            start = time.perf_counter()
            training_step(run, step, signal)
            seconds.append(time.perf_counter() - start)
            if signal.received:
                raise KeyboardInterrupt
    return statistics.median(seconds[1:])


def _gain(drafter: Drafter, label_tokens: int) -> dict[str, Any] | str:
    if not drafter.backbone.whole:
        return "features come from a cache, so that the model is not loaded (cache.dir=null: it is)"
    try:
        return gain_of(drafter, label_tokens)
    except UserError as error:
        return str(error)


def gain_of(drafter: Drafter, label_tokens: int = 0) -> dict[str, Any]:
    """Return ``step_ms`` of decoding without drafts, ``chains``: depth -> ``draft_ms`` and ``verify_ms``, and what follows.

    ``break_even`` is the acceptance from which on some chain is faster than no drafts, None if none is; ``likely`` the one after training
    on so many label tokens (`likely`); ``expected`` has, by acceptance, the best depth, its ``tau`` and ``speedup``. The drafter no longer
    trains afterwards. Raises UserError for a model that decodes with no drafts.
    """
    heads = SpeculativeModel(drafter.backbone, drafter)
    depths = sorted({*(depth for depth in DEPTHS if depth < drafter.depth), drafter.depth})
    drafter.eval().requires_grad_(False)  # drafts of weights in training are not captured
    steps_of(heads, 0, WARM)
    turns = [{depth: steps_of(heads, depth, WRITTEN) for depth in (0, *depths)} for _ in range(3)]
    times = {depth: turns[1][depth] + turns[2][depth] for depth in turns[0]}  # by then all passes are captured, where they are at all
    (_, step), *rest = ((quick(times[depth], "draft"), quick(times[depth], "verify", "host")) for depth in times)
    chains = dict(zip(depths, rest, strict=True))
    costs = {depth: draft / step + max(verify / step, 1.0) for depth, (draft, verify) in chains.items()}
    known = likely(label_tokens)
    best = {p: best_chain(p, costs) for p in (*ACCEPTANCE, *([] if known is None else [known]))}
    return {
        "step_ms": step,
        "chains": {depth: {"draft_ms": draft, "verify_ms": verify} for depth, (draft, verify) in chains.items()},
        "break_even": next((p / 100 for p in range(101) if best_chain(p / 100, costs)[1] > 1), None),
        "expected": {p: {"depth": depth, "tau": tau(p, depth), "speedup": speedup} for p, (depth, speedup) in best.items()},
        "likely": known,
    }


def steps_of(heads: SpeculativeModel, depth: int, tokens: int) -> list[dict[str, float]]:
    """Return the seconds by part of the steps that continue a text by so many tokens, with chains of this depth; 0: without drafts."""
    ids_T = torch.randint(heads.backbone.vocab, (PROMPT,), generator=torch.Generator().manual_seed(0)).to(heads.backbone.device)
    settings = Settings(tokens, tree=TreeShape(1 + max(depth, 1), 1, max(depth, 1)))
    return [step.seconds for step in continue_text(heads, ids_T, settings, 0, speculate=depth > 0, timed=True).steps]


def quick(steps: list[dict[str, float]], *parts: str) -> float:
    """Return the milliseconds that these parts take in the quicker steps, which other programs did not hold up: the lower quartile."""
    return 1e3 * statistics.quantiles([sum(step[part] for part in parts) for step in steps], n=4)[0]


def likely(label_tokens: int) -> float | None:
    """Return the acceptance by what was measured (`LEARNED`); None of fewer tokens."""
    return None if label_tokens < LEARNED[0][0] else float(np.interp(math.log(label_tokens), np.log(LEARNED[0]), LEARNED[1]))


def tau(p: float, depth: int) -> float:
    """Return the mean tokens of a pass that verifies a chain of that depth."""
    return sum(p**k for k in range(depth + 1))


def best_chain(p: float, costs: Mapping[int, float]) -> tuple[int, float]:
    """Return the depth at which acceptance ``p`` brings most, and its speedup. ``costs``: depth -> steps without drafts that it takes."""
    return max(((depth, tau(p, depth) / cost) for depth, cost in costs.items()), key=lambda found: found[1])


def step_operations(memory_plan: MemoryPlan, size: MicroBatch) -> dict[str, int]:
    """Return the operations of a micro-batch's step: the backbone's forward, and the drafters with a trained backbone's backward."""
    recipe, backbone = memory_plan.recipe, memory_plan.models.backbone
    sample = MicroBatch(1, min(SAMPLE, size.length), size.label_share)
    with _Counter() as counter, counter.pause_in(backbone):
        memory_plan.step(sample)
    lora = recipe.backbone.lora
    passes = 0 if recipe.cache.dir is not None or recipe.features.endpoint is not None else 2 if lora is not None and lora.kl_weight else 1
    tokens = size.rows * size.length
    return {
        "backbone": passes * 2 * active_parameters(backbone.layers, backbone.config.to_dict()) * tokens,
        "drafters": counter.operations * tokens // sample.length,
    }


def active_parameters(layers: nn.ModuleList, stated: Mapping[str, Any]) -> int:
    """Return how many weights a token meets: all, or of the experts as many as the router of the configuration (``stated``) chooses."""
    experts = next((stated[name] for name in ROUTED if stated.get(name)), None)
    named = [(name, weight.numel()) for layer in layers for name, weight in layer.named_parameters()]
    total = sum(count for _, count in named)
    if experts is None:
        return total
    routed = sum(count for name, count in named if ".experts." in f".{name}")
    return total - routed + routed * int(stated["num_experts_per_tok"]) // int(experts)


class _Counter(TorchDispatchMode):
    """Counts floating-point operations. `FlopCounterMode` would count by module too, for which it cannot run `autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.paused = 0, False

    @contextmanager
    def pause_in(self, backbone: Backbone) -> Iterator[None]:
        """Count nothing while the backbone runs."""
        pause = backbone.base.register_forward_pre_hook(lambda *_: setattr(self, "paused", True))
        resume = backbone.base.register_forward_hook(lambda *_: setattr(self, "paused", False))
        with pause, resume:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None and not self.paused:
            self.operations += formula(*args, **kwargs, out_val=result)
        return result
