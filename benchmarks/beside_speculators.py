"""Compares the speed of EAGLE-3 training with that of speculators, on the same rows and the same backbone.

    pip install speculators==0.9.0      (in a separate environment: it installs a server's packages too)
    python benchmarks/beside_speculators.py [RECIPE] [section.key=value ...] [--steps 25] [--attention sdpa eager]

Both run whole training steps, alternating in one process: the backbone's forward pass, the drafter's passes (``drafter.depth`` of them),
loss and backward, gradient clipping, and Muon with AdamW. speculators runs its own model, loss and optimizer, with all documents in one
row as its data loader builds it, and with its unfused losses where there is no Triton. Prints JSON: the median tokens per second of each,
and the ratio of headstart to speculators. Only speed is compared: a step is the same work, but not the same loss.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from program import options, run

from headstart.training.loop import training_step
from headstart.training.recipe.recipe import load_recipe
from headstart.training.run.signals import StopSignal
from headstart.training.setup import Run, prepare

try:
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.train.optimizers import build_optimizers
except ImportError as error:
    print(f"error: {error}; this compares with speculators: pip install speculators==0.9.0", file=sys.stderr)
    sys.exit(2)

DECAY = 0.8
"""Weight of a pass relative to the previous one in speculators' loss."""


def theirs(ours: Run, attention: str) -> Callable[[int], int]:
    """A function that makes speculators' training step on the rows of step ``number`` and returns the number of tokens."""
    recipe, backbone = ours.recipe, ours.backbone
    config = copy.deepcopy(backbone.config)
    config.num_hidden_layers = 1
    passes, taps = recipe.drafter["depth"], ours.drafter.taps
    model = Eagle3DraftModel.from_training_args(
        config, draft_vocab_size=backbone.vocab, norm_before_residual=False, ttt_steps=passes, verifier_name_or_path=recipe.backbone.path,
        draft_attn_impl=attention, target_layer_ids=list(taps),
    )  # fmt: skip
    rate = ours.trainers[0].recipe.train.peak_lr
    muon = {"muon_lr": rate, "muon_momentum": 0.95, "muon_weight_decay": 0.0, "muon_ns_steps": 5}
    wanted = SimpleNamespace(optimizer="muon", lr=rate, weight_decay=0.0, muon_adjust_lr_fn="match_rms_adamw", **muon)
    optimizers = build_optimizers(model, wanted)
    loss = resolve_loss_config("kl_div", "fused" if torch.cuda.is_available() else "eager")

    def step(number: int) -> int:
        for batch in ours.feed.local_batches(number, backbone.device):
            features = backbone.read(batch.tokens_BT, taps=taps)
            assert features.taps is not None
            follows_BT = batch.document_BT >= 0   # every position but a row's first has a predecessor
            follows_BT[:, 0] = False
            before_BT = follows_BT.roll(-1, 1)
            place_BT = torch.arange(follows_BT.shape[1], device=backbone.device).expand_as(follows_BT)
            row_BT = torch.arange(len(follows_BT), device=backbone.device)[:, None].expand_as(follows_BT)
            summed = model(
                hidden_states=torch.cat([features.taps[tap] for tap in taps], -1)[before_BT][None],
                input_ids=batch.tokens_BT[follows_BT][None],
                document_ids=row_BT[follows_BT][None],
                loss_mask=batch.loss_mask_BT[follows_BT][None],
                position_ids=place_BT[follows_BT][None],
                verifier_last_hidden_states=features.hidden_BTD[follows_BT][None],
                ttt_steps=passes, ttt_step_loss_decay=DECAY, loss_config=loss,
            )[1]  # fmt: skip
            summed.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return int((batch.document_BT >= 0).sum())

    return step


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, StopSignal() as signal:
        given = [*args.overrides, f"save.dir={folder}/heads", "eval.prompts=1", "drafter.draft_vocab_size=null"]
        ours = prepare(load_recipe(args.recipe, given))
        ways: dict[str, Callable[[int], int]] = {"headstart": lambda number: training_step(ours, number, signal).tokens}
        ways |= {f"speculators, {attention}": theirs(ours, attention) for attention in args.attention}
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(1, args.steps + args.warm + 1):
            for name, step in ways.items():
                start = time.perf_counter()
                tokens = step(number)
                speeds[name].append(tokens / (time.perf_counter() - start))
        ours.log.close()
    median = {name: statistics.median(found[args.warm :]) for name, found in speeds.items()}
    ratios = {name: median["headstart"] / found for name, found in median.items() if name != "headstart"}
    head = {"recipe": args.recipe, "overrides": args.overrides, "threads": args.threads, "steps": args.steps}
    return head | {"tokens_a_second": median, "headstart_over": ratios}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart/eagle3.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warm", type=int, default=5, help="steps before the clock counts")
    parser.add_argument("--attention", nargs="+", default=["sdpa"], help="of speculators: sdpa, eager, simple_flex_attention")
    run(parser, measure)
