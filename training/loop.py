"""The training loop: optimiser steps on `accelerate`, with what has to happen between them.

The number that is trained on is the summed loss of the whole global step over its number of learned tokens. That number is
counted before the first forward, over all processes and micro-batches, so every micro-batch is divided by the same one;
times the number of processes, because data parallelism averages the gradients it should sum.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate.utils import set_seed

from headstart.heads.errors import UserError
from headstart.training.average import in_place_of_weights
from headstart.training.checkpoint import pack, write_state
from headstart.training.evaluate import evaluate
from headstart.training.objective import Sums, count_learned
from headstart.training.packing import Batch
from headstart.training.recipe import to_dict
from headstart.training.schedule import learning_rate
from headstart.training.setup import Run
from headstart.training.signals import StopSignal


@dataclass(frozen=True)
class Outcome:
    """What an optimiser step came to, over all processes."""

    loss: float
    grad_norm: float
    tokens: int
    depths: list[list[float]]
    """Per depth: positions that count, first choices that agree, summed overlap."""
    stop: bool
    """Some process has been told to stop."""


def train(run: Run) -> int:
    """Train to the last step, or until told to stop; the exit status of the command."""
    steps = run.feed.steps
    if run.done >= steps:
        run.log.say(f"{run.folder} is already at step {run.done} of {steps}; raise train.steps or train.epochs to go on")
        return 0
    with StopSignal() as signal:
        for step in range(run.done + 1, steps + 1):
            start = time.perf_counter()
            outcome = take_step(run, step, signal)
            run.done, run.tokens = step, run.tokens + outcome.tokens
            run.meter.add(outcome.loss, outcome.grad_norm, outcome.tokens, outcome.depths, time.perf_counter() - start)
            _report(run)
            if outcome.stop or step == steps or _due(step, run.recipe.save.every):
                save(run)
            if outcome.stop and step < steps:
                run.log.say(f"stopped by a signal after step {step} of {steps}, all saved; the same command goes on from there")
                return 128 + signal.number
    run.log.say(f"done: the heads are in {run.folder}")
    return 0


def take_step(run: Run, step: int, signal: StopSignal) -> Outcome:
    """One optimiser step. Raises UserError, before the weights change, if the loss or its gradient is not finite."""
    accelerator, batches = run.accelerator, list(run.feed.share(step, run.accelerator.device))
    set_seed(run.recipe.seed + 1_000_003 * step + accelerator.process_index)   # so that random numbers need no saving
    rate = learning_rate(step, run.feed.steps, run.recipe.train)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    learned = accelerator.reduce(torch.stack([count_learned(batch.learn_BT, batch.document_BT) for batch in batches]).sum(), "sum")
    sums = _backward(run, batches, accelerator.num_processes / learned.clamp(min=1))
    grad_norm = accelerator.clip_grad_norm_(run.drafter.parameters(), run.recipe.train.clip).item()
    tokens = torch.stack([(batch.document_BT >= 0).sum() for batch in batches]).sum()
    own = [sums.loss[None], tokens[None], tokens.new_tensor([signal.received]), sums.count_K, sums.correct_K, sums.overlap_K]
    loss, read, stopped, *depths = accelerator.reduce(torch.cat([part.float() for part in own]), "sum").tolist()
    loss = loss / max(learned.item(), 1)
    _require_finite(run, step, loss, grad_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if run.average is not None:
        run.average.update(step)
    depth = run.drafter.depth
    grad_norm = grad_norm if math.isfinite(grad_norm) else 0.0   # a step that the scaler skipped
    return Outcome(loss, grad_norm, int(read), [depths[i * depth : (i + 1) * depth] for i in range(3)], stopped > 0)


def _backward(run: Run, batches: list[Batch], scale: torch.Tensor) -> Sums:
    """Gradients of all micro-batches; processes synchronise in the last alone."""
    total: Sums | None = None
    for i, batch in enumerate(batches):
        with nullcontext() if i + 1 == len(batches) else run.accelerator.no_sync(run.module):
            sums = run.module(run.source.read(batch))
            run.accelerator.backward(sums.loss * scale)
        sums = Sums(*(part.detach() for part in sums))
        total = sums if total is None else Sums(*(a + b for a, b in zip(total, sums, strict=True)))
    assert total is not None
    return total


def _require_finite(run: Run, step: int, loss: float, grad_norm: float) -> None:
    scaler = run.accelerator.scaler
    if math.isfinite(loss) and (math.isfinite(grad_norm) or (scaler is not None and scaler.get_scale() > 1)):
        return   # an fp16 gradient may overflow: the scaler skips the step and lowers the scale
    raise _diverged(run, f"the loss is {loss:g} and the norm of its gradient {grad_norm:g} at step {step}")


def _diverged(run: Run, what: str) -> UserError:
    saved = sorted((run.folder / "state").glob("step-*"))
    kept = f"the last good checkpoint, {saved[-1]}, is kept" if saved else "no checkpoint had been saved yet (save.every)"
    train = run.recipe.train
    return UserError(
        f"{what}; stopped, and {kept}. Try a lower train.lr (now {train.lr:g}), a longer train.warmup ({train.warmup:g}), "
        f"a smaller train.clip ({train.clip:g}){'' if train.precision == 'no' else ' or train.precision=no'}"
    )


def _report(run: Run) -> None:
    """The log's line and the evaluation, where this step has them."""
    step, last = run.done, run.done == run.feed.steps
    run.log.advance()
    if last or _due(step, run.recipe.log.every):
        rate = learning_rate(step, run.feed.steps, run.recipe.train)
        run.log.line(step, {**run.meter.record(), "lr": rate, "tokens": run.tokens})
        run.meter = type(run.meter)()
    if run.prompts and (last or _due(step, run.recipe.eval.every)):
        if run.accelerator.is_main_process:
            with in_place_of_weights(run.average):
                measured = evaluate(run.backbone, run.drafter, run.prompts, run.recipe.eval, run.recipe.seed)
            run.tau = measured["tau"]
            run.log.line(step, measured)
        run.accelerator.wait_for_everyone()


def save(run: Run) -> None:
    """The heads as they are, loadable, into ``save.dir``; and the state to resume from below it."""
    if run.accelerator.is_main_process:
        if not all(bool(parameter.isfinite().all()) for parameter in run.drafter.parameters()):
            raise _diverged(run, f"the weights are no longer finite after step {run.done}")
        scaler = run.accelerator.scaler
        notes = {
            "recipe": to_dict(run.recipe),
            "data": run.feed.digest,
            "tokens": run.tokens,
            "tau": run.tau,
            "meter": run.meter.state(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        with in_place_of_weights(run.average):
            run.drafter.save_pretrained(run.folder, extra={**run.origin, "steps": run.done, "tokens": run.tokens, "tau": run.tau})
        write_state(run.folder, run.done, pack(run.drafter, run.optimizer, run.average), notes, run.recipe.save.keep)
    run.accelerator.wait_for_everyone()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
