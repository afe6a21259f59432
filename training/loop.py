"""The training loop: optimiser steps on `accelerate`, with what has to happen between them.

The number that is trained on is the summed loss of the whole global step over its number of learned tokens. That number is
counted before the first forward, over all processes and micro-batches, so every micro-batch is divided by the same one;
times the number of processes, because data parallelism averages the gradients it should sum.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass

import torch
from safetensors import SafetensorError

from headstart.support.errors import UserError
from headstart.training.data.packing import Batch
from headstart.training.log.evaluate import evaluate
from headstart.training.log.log import Result
from headstart.training.objective.objective import Sums, count_learned
from headstart.training.recipe.recipe import to_dict
from headstart.training.run.checkpoint import write_state
from headstart.training.run.schedule import learning_rate
from headstart.training.run.sharding import all_finite, is_sharded
from headstart.training.run.signals import StopSignal
from headstart.training.run.trainer import DrafterTrainer
from headstart.training.setup import Run

SKIPPED_IN_A_ROW = 10
"""So many steps that are not finite, one after another, end a run that skips them: the weights themselves have gone wrong."""


@dataclass(frozen=True)
class Outcome:
    """What an optimiser step came to, over all processes."""

    tokens: int
    stop: bool
    """Some process has been told to stop."""
    results: list[Result | None]
    """Of each trainer; None where its step was skipped."""


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
            run.done, run.tokens, seconds = step, run.tokens + outcome.tokens, time.perf_counter() - start
            for trainer, result in zip(run.trainers, outcome.results, strict=True):
                trainer.meter.add(result, outcome.tokens, seconds)
            _report(run)
            if outcome.stop or step == steps or _due(step, run.recipe.save.every):
                save(run)
            if outcome.stop and step < steps:
                run.log.say(f"stopped by a signal after step {step} of {steps}, all saved; the same command goes on from there")
                return 128 + signal.number
    run.log.say(f"done: the heads are in {', '.join(str(trainer.folder) for trainer in run.trainers)}{_skipped(run)}")
    return 0


def take_step(run: Run, step: int, signal: StopSignal) -> Outcome:
    """One optimiser step of every trainer. Raises UserError, before any weight changes, for a loss or gradient that ends the run."""
    accelerator, batches = run.accelerator, list(run.feed.share(step, run.accelerator.device))
    for trainer in run.trainers:
        trainer.set_rate(step, run.feed.steps)
    learned = accelerator.reduce(torch.stack([count_learned(batch.loss_mask_BT, batch.document_BT) for batch in batches]).sum(), "sum")
    sums = _backward(run, step, batches, accelerator.num_processes / learned.clamp(min=1))
    norms = [trainer.clip() for trainer in run.trainers]
    tokens = torch.stack([(batch.document_BT >= 0).sum() for batch in batches]).sum()
    own = [tokens[None], tokens.new_tensor([signal.received])]
    own += [part for each in sums for part in (each.loss[None], each.count_K, each.correct_K, each.overlap_K)]
    read, stopped, *told = accelerator.reduce(torch.cat([part.float() for part in own]), "sum").tolist()
    results = []
    for trainer, norm in zip(run.trainers, norms, strict=True):
        depth = trainer.drafter.trained_depth
        loss, depths, told = told[0], told[1 : 1 + 3 * depth], told[1 + 3 * depth :]
        results.append(Result(loss / max(learned.item(), 1), norm, [depths[i * depth : (i + 1) * depth] for i in range(3)]))
    taken = [_is_good(run, trainer, result, step) for trainer, result in zip(run.trainers, results, strict=True)]
    for trainer, good in zip(run.trainers, taken, strict=True):
        trainer.move(step) if good else trainer.skip()
    return Outcome(int(read), stopped > 0, [result if good else None for result, good in zip(results, taken, strict=True)])


def _backward(run: Run, step: int, batches: list[Batch], scale: torch.Tensor) -> list[Sums]:
    """Gradients of all micro-batches; what the backbone says of each is read once for all trainers."""
    totals: list[Sums] = []
    for i, batch in enumerate(batches):
        features = run.source.read(batch)
        seed = run.recipe.seed + 1_000_003 * step + 8_191 * i + run.accelerator.process_index   # so random numbers need no saving
        found = [trainer.learn(features, scale, seed, last=i + 1 == len(batches)) for trainer in run.trainers]
        totals = [Sums(*(a + b for a, b in zip(*both, strict=True))) for both in zip(totals, found, strict=True)] if totals else found
    return totals


def _is_good(run: Run, trainer: DrafterTrainer, result: Result, step: int) -> bool:
    """Whether to take the step. Raises UserError if the run is not to go on."""
    if trainer.is_finite(result):
        return True
    what = f"the loss{_of(trainer)} is {result.loss:g} and the norm of its gradient {result.grad_norm:g} at step {step}"
    if trainer.recipe.train.non_finite == "stop":
        raise _diverged(run, trainer, what)
    if trainer.in_a_row + 1 >= SKIPPED_IN_A_ROW:
        raise _diverged(run, trainer, f"{what}, the last of {SKIPPED_IN_A_ROW} such steps in a row")
    return False


def _diverged(run: Run, trainer: DrafterTrainer, what: str) -> UserError:
    train = trainer.recipe.train
    skip = ", or train.non_finite=skip to pass over such steps" if train.non_finite == "stop" else ""
    return UserError(
        f"{what}; stopped, and {_kept(run)}. Try a lower train.lr (now {train.lr:g}), "
        f"a longer train.warmup_ratio ({train.warmup_ratio:g}), a smaller train.max_grad_norm ({train.max_grad_norm:g})"
        f"{'' if train.precision == 'no' else ' or train.precision=no'}{skip}"
    )


def _kept(run: Run) -> str:
    saved = sorted((run.folder / "state").glob("step-*"))
    return f"the last good checkpoint, {saved[-1]}, is kept" if saved else "no checkpoint had been saved yet (save.every)"


def _of(trainer: DrafterTrainer) -> str:
    return f" of {trainer.name}" if trainer.name else ""


def _skipped(run: Run) -> str:
    told = [f"{trainer.skipped}{_of(trainer)}" for trainer in run.trainers if trainer.skipped]
    return f"; steps skipped since their loss or gradient was not finite: {', '.join(told)}" if told else ""


def _report(run: Run) -> None:
    """The log's lines and the evaluation, where this step has them."""
    step, last = run.done, run.done == run.feed.steps
    run.log.advance()
    for trainer in run.trainers:
        if last or _due(step, run.recipe.log.every):
            rate = learning_rate(step, run.feed.steps, trainer.recipe.train)
            run.log.line(step, {**trainer.meter.record(), "lr": rate, "tokens": run.tokens}, trainer.name)
            trainer.meter = type(trainer.meter)()
        if run.prompts and (last or _due(step, run.recipe.eval.every)):
            with trainer.shown() as drafter:
                if run.accelerator.is_main_process or is_sharded(run.backbone):   # which runs in all processes or in none
                    measured = evaluate(run.backbone, drafter, run.prompts, run.recipe.eval, run.recipe.seed, run.tokenizer)
                    trainer.tau = measured["tau"]
                    run.log.line(step, measured, trainer.name)
            run.accelerator.wait_for_everyone()
    if run.prompts and _due(step, run.recipe.eval.every):   # at the end it is made when the log is closed
        run.log.report()


def save(run: Run) -> None:
    """The heads as they are, loadable, into ``save.dir``; and the state to resume from below it."""
    tensors = {name: tensor for trainer in run.trainers for name, tensor in trainer.pack().items()}
    notes = {"recipe": to_dict(run.recipe), "data": run.feed.digest, "tokens": run.tokens}
    notes["heads"] = {trainer.name: trainer.notes() for trainer in run.trainers}
    for trainer in run.trainers:
        if run.accelerator.is_main_process and not all_finite(tensors, f"{trainer.prefix}drafter/"):
            raise _diverged(run, trainer, f"the weights{_of(trainer)} are no longer finite after step {run.done}")
    try:
        for trainer in run.trainers:
            with trainer.shown() as drafter:
                if run.accelerator.is_main_process:
                    origin = {**run.origin, "recipe": to_dict(trainer.recipe), "steps": run.done, "tokens": run.tokens, "tau": trainer.tau}
                    for left in trainer.folder.glob(".saving-*"):   # by a run that was killed
                        shutil.rmtree(left)
                    drafter.save_pretrained(trainer.folder, extra=origin)
        if run.accelerator.is_main_process:
            write_state(run.folder, run.done, tensors, notes, run.recipe.save.keep)
    except (OSError, SafetensorError) as error:   # no room, no permission, a disk that went away
        raise UserError(
            f"step {run.done} could not be saved in {run.folder}: {error}; stopped, and {_kept(run)}. "
            "Make room there, and the same command goes on"
        ) from None
    run.accelerator.wait_for_everyone()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
