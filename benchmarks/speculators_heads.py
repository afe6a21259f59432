"""Trains EAGLE-3 heads with speculators 0.9, for benchmarks/transfer.py to compare with: its model, start, loss, optimizer and schedule.

Only the loop and the order of the rows are ours (its trainer needs an accelerator), and the features come from our backbone: the taps, and
the residual stream after the last layer, before the final norm, which speculators applies itself. Everything else has its defaults, but for
attention and loss that run on a CPU. ``pip install speculators==0.9.0 openai hs-connectors``, in a separate environment: it installs a
server's packages too.

Shape suffixes: B rows, T positions.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import nn
from transformers import get_linear_schedule_with_warmup

from headstart.heads.backbone.embedded import resolve
from headstart.heads.base import Drafter
from headstart.heads.methods import construct_drafter
from headstart.training.data.packing import Batch
from headstart.training.recipe.recipe import Recipe
from headstart.training.setup import Run, prepare

OURS = ("verifier_", "embed_tokens.", "rotary_emb.", "t2d", "d2t")
"""Tensors of their model that are the backbone's, or that a whole vocabulary does not need."""


def trained(recipe: Recipe) -> tuple[Run, Drafter]:
    """Train their head on the recipe's rows, batches, number of steps and learning rate; returns the run and the head in our layout."""
    from speculators.model import SpeculatorModel
    from speculators.train.cli import build_draft_model, set_seed
    from speculators.train.config import TrainConfig
    from speculators.train.optimizers import build_optimizers

    run = prepare(recipe)
    run.prompts = []
    run.log.close()
    backbone, taps = run.backbone, run.drafter.taps
    args = argparse.Namespace(**TrainConfig.resolve(_flags(recipe, taps)).flatten())
    set_seed(recipe.seed)
    kind: Any = SpeculatorModel.registry["eagle3"]
    model = build_draft_model(args, kind, None, None, backbone.vocab).train()
    settings, _ = kind.get_trainer_kwargs(**vars(args))
    optimizers = build_optimizers(model, args)
    steps = run.feed.steps
    schedules = [get_linear_schedule_with_warmup(optimizer, int(0.01 * steps), steps) for optimizer in optimizers]
    for step in range(1, steps + 1):
        for batch in run.feed.local_batches(step, backbone.device):
            model(**_inputs(run, batch, taps), **settings)[1].backward()
            run.tokens += int((batch.document_BT >= 0).sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        run.done = step
    return run, _in_our_layout(model, run, args, taps)


def _flags(recipe: Recipe, taps: tuple[int, ...]) -> list[str]:
    """speculators' command line: its defaults, but for the learning rate and what a CPU cannot run."""
    flags = {
        "verifier-name-or-path": resolve(recipe.backbone.path), "data-path": os.devnull, "speculator-type": "eagle3", "on-missing": "raise",
        "loss-implementation": "eager", "draft-attn-impl": "sdpa", "hidden-states-dtype": "float32", "ttt-steps": recipe.drafter["depth"],
        "lr": recipe.train.peak_lr, "seed": recipe.seed,
    }  # fmt: skip
    return ["--target-layer-ids", *map(str, taps), *(text for name, value in flags.items() for text in (f"--{name}", str(value)))]


@torch.no_grad()
def _inputs(run: Run, batch: Batch, taps: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """All documents in one row, as its data loader builds it: the token after, with the states before it."""
    backbone = run.backbone
    last = backbone.num_layers
    features = backbone.read(batch.tokens_BT, taps=(*taps, last))
    assert features.taps is not None
    follows_BT = batch.document_BT >= 0   # every position but a row's first has a predecessor
    follows_BT[:, 0] = False
    before_BT = follows_BT.roll(-1, 1)
    place_BT = torch.arange(follows_BT.shape[1]).expand_as(follows_BT)
    row_BT = torch.arange(len(follows_BT))[:, None].expand_as(follows_BT)
    return {
        "hidden_states": torch.cat([features.taps[tap] for tap in taps], -1)[before_BT][None],
        "input_ids": batch.tokens_BT[follows_BT][None],
        "document_ids": row_BT[follows_BT][None],
        "loss_mask": batch.loss_mask_BT[follows_BT][None],
        "position_ids": place_BT[follows_BT][None],
        "verifier_last_hidden_states": features.taps[last][follows_BT][None],
    }


def _in_our_layout(model: nn.Module, run: Run, args: argparse.Namespace, taps: tuple[int, ...]) -> Drafter:
    norms = {name: bool(getattr(args, name)) for name in ("norm_before_residual", "norm_before_fc", "norm_output")}
    drafter = construct_drafter("eagle3", run.backbone, {"depth": run.drafter.depth, "taps": list(taps), **norms})
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(OURS)}
    drafter.load_tensors({name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in own.items()})
    return drafter
