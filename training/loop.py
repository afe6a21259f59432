"""The training loop on `accelerate`: optimiser steps, logging, evaluation and saving.

The loss is the sum over the global batch divided by its number of label tokens. These are counted before the first forward pass, over
all processes and micro-batches, so that every micro-batch has the same divisor. The loss is also multiplied by the number of processes,
since data parallelism averages gradients.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor

from headstart.heads.backbone.sharding import is_sharded
from headstart.support.errors import UserError
from headstart.support.files import discard_unfinished
from headstart.training.data.packing import Batch
from headstart.training.log.backbone_loss import backbone_losses
from headstart.training.log.evaluate import evaluate
from headstart.training.log.log import Meter, Result
from headstart.training.objective.loss_rows import count_label_tokens
from headstart.training.objective.objective import Sums
from headstart.training.recipe.recipe import to_dict
from headstart.training.run.checkpoint import write_state
from headstart.training.run.schedule import learning_rate
from headstart.training.run.sharding import all_finite
from headstart.training.run.signals import StopSignal
from headstart.training.run.trainer import DrafterTrainer
from headstart.training.setup import Run

MAX_CONSECUTIVE_SKIPS = 10
"""With ``train.non_finite=skip``, the run ends after this many non-finite steps in a row, since the weights are then broken."""


@dataclass(frozen=True)
class Outcome:
    """Result of an optimiser step, over all processes."""

    tokens: int
    stop: bool
    """True if a process has received a signal to stop."""
    results: list[Result | None]
    """One per trainer; None if its step was skipped."""


def train(run: Run) -> int:
    """Train to the last step or until a signal; returns the exit status."""
    steps = run.feed.steps
    if run.done >= steps:
        run.log.say(f"{run.folder} is already at step {run.done} of {steps}; raise train.steps or train.epochs to go on")
        return 0
    with StopSignal() as signal:
        for step in range(run.done + 1, steps + 1):
            start = time.perf_counter()
            outcome = training_step(run, step, signal)
            run.done, run.tokens, seconds = step, run.tokens + outcome.tokens, time.perf_counter() - start
            for trainer, result in zip(run.trainers, outcome.results, strict=True):
                trainer.meter.add(result, outcome.tokens, seconds)
            _log_and_evaluate(run)
            if outcome.stop or step == steps or _due(step, run.recipe.save.every):
                save(run)
            if outcome.stop and step < steps:
                run.log.say(f"stopped by a signal after step {step} of {steps}, all saved; the same command goes on from there")
                return 128 + signal.number
    run.log.say(f"done: the heads are in {', '.join(str(trainer.folder) for trainer in run.trainers)}{_skipped_steps(run)}")
    return 0


def training_step(run: Run, step: int, signal: StopSignal) -> Outcome:
    """Run one optimiser step of every trainer. Raises UserError, with weights unchanged, if a non-finite loss or gradient ends the run."""
    accelerator, batches = run.accelerator, list(run.feed.local_batches(step, run.accelerator.device))
    for trainer in run.trainers:
        trainer.set_learning_rate(step, run.feed.steps)
    by_batch = [count_label_tokens(batch.loss_mask_BT, batch.document_BT) for batch in batches]
    label_tokens = accelerator.reduce(torch.stack(by_batch).sum(), "sum")
    sums = _accumulate_gradients(run, step, batches, accelerator.num_processes / label_tokens.clamp(min=1))
    norms = [trainer.clip_gradients() for trainer in run.trainers]
    tokens = torch.stack([(batch.document_BT >= 0).sum() for batch in batches]).sum()
    [[total_tokens], [stops]], totals = _sum_over_processes(accelerator, [tokens[None], tokens.new_tensor([signal.received])], sums)
    results = []
    labels = max(label_tokens.item(), 1)
    for norm, ([loss], [lm_loss], [lm_kl], *depths) in zip(norms, totals, strict=True):
        results.append(Result(loss / labels, norm, depths, lm_loss / labels, lm_kl / labels))
    good = [_is_finite(run, trainer, result, step) for trainer, result in zip(run.trainers, results, strict=True)]
    for trainer, finite in zip(run.trainers, good, strict=True):
        trainer.optimizer_step() if finite else trainer.skip_step()
    return Outcome(int(total_tokens), stops > 0, [result if finite else None for result, finite in zip(results, good, strict=True)])


def _accumulate_gradients(run: Run, step: int, batches: list[Batch], scale: Tensor) -> list[Sums]:
    """Run forward and backward of all micro-batches. A frozen backbone's features are computed once for all trainers."""
    totals: list[Sums] = []
    for i, batch in enumerate(batches):
        inputs = batch if run.backbone.trainable else run.source.read(batch)
        seed = micro_batch_seed(run.recipe.seed, step, i, run.accelerator.process_index)
        sums = [trainer.backward(inputs, scale, seed, last=i + 1 == len(batches)) for trainer in run.trainers]
        totals = [Sums(*(a + b for a, b in zip(*pair, strict=True))) for pair in zip(totals, sums, strict=True)] if totals else sums
    return totals


def micro_batch_seed(seed: int, step: int, number: int, process: int) -> int:
    """Seed of a micro-batch's random numbers, in 32 bits as NumPy takes it. They follow from it, so that no random state is saved."""
    return (seed + 1_000_003 * step + 8_191 * number + process) % 2**32


def _sum_over_processes(
    accelerator: Accelerator, counts: list[Tensor], sums: list[Sums]
) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Sum the counts and each trainer's sums over all processes in one all-reduce, in fp64, which counts beyond 2^24."""
    parts = counts + [part for each in sums for part in (each.loss[None], each.lm_loss[None], each.lm_kl[None], *each.per_depth)]
    parts = [part.cpu() if part.device.type == "mps" else part for part in parts]   # which has no fp64, and one process
    reduced = accelerator.reduce(torch.cat([part.double() for part in parts]), "sum")
    values = [part.tolist() for part in reduced.split([len(part) for part in parts])]
    totals = values[len(counts) :]
    return values[: len(counts)], [totals[i : i + 6] for i in range(0, len(totals), 6)]


def _is_finite(run: Run, trainer: DrafterTrainer, result: Result, step: int) -> bool:
    """Return True if the weights should be updated. Raises UserError if the run must end."""
    if trainer.is_finite(result):
        return True
    fault = f"the loss{_of(trainer)} is {result.loss:g} and the norm of its gradient {result.grad_norm:g} at step {step}"
    if trainer.recipe.train.non_finite == "stop":
        raise _diverged(run, trainer, fault)
    if trainer.consecutive_skips + 1 >= MAX_CONSECUTIVE_SKIPS:
        raise _diverged(run, trainer, f"{fault}, the last of {MAX_CONSECUTIVE_SKIPS} such steps in a row")
    return False


def _diverged(run: Run, trainer: DrafterTrainer, fault: str) -> UserError:
    train = trainer.recipe.train
    skip = ", or train.non_finite=skip to pass over such steps" if train.non_finite == "stop" else ""
    return UserError(
        f"{fault}; stopped, and {_last_checkpoint(run)}. Try a lower train.lr (now {train.peak_lr:g}), "
        f"a longer train.warmup_ratio ({train.warmup_ratio:g}), a smaller train.max_grad_norm ({train.max_grad_norm:g})"
        f"{'' if train.precision == 'no' else ' or train.precision=no'}{skip}"
    )


def _last_checkpoint(run: Run) -> str:
    saved = sorted((run.folder / "state").glob("step-*"))
    return f"the last good checkpoint, {saved[-1]}, is kept" if saved else "no checkpoint had been saved yet (save.every)"


def _of(trainer: DrafterTrainer) -> str:
    return f" of {trainer.name}" if trainer.name else ""


def _skipped_steps(run: Run) -> str:
    counts = [f"{trainer.skipped}{_of(trainer)}" for trainer in run.trainers if trainer.skipped]
    return f"; steps skipped since their loss or gradient was not finite: {', '.join(counts)}" if counts else ""


def _log_and_evaluate(run: Run) -> None:
    """Write log lines and evaluate, if due at this step."""
    step, last = run.done, run.done == run.feed.steps
    run.log.advance()
    for trainer in run.trainers:
        if last or _due(step, run.recipe.log.every):
            rate = learning_rate(step, run.feed.steps, trainer.recipe.train)
            run.log.line(step, {**trainer.meter.record(), "lr": rate, "tokens": run.tokens}, trainer.name)
            trainer.meter = Meter()
        if run.prompts and (last or _due(step, run.recipe.eval.every)):
            _evaluate(run, trainer)
    if run.prompts and _due(step, run.recipe.eval.every):   # after the last step, closing the log writes the report
        run.log.report()


def _evaluate(run: Run, trainer: DrafterTrainer) -> None:
    """Decode the held-out prompts in the main process, or in all processes if the backbone is sharded."""
    with trainer.eval_weights() as drafter:
        if run.accelerator.is_main_process or is_sharded(run.backbone):
            scores = evaluate(run.backbone, drafter, run.prompts, run.recipe.eval, run.recipe.seed, run.tokenizer)
            trainer.tau = scores["tau"]
            if run.backbone.trainable:
                scores |= backbone_losses(run.backbone, run.held_out, run.recipe.objective.chunk_size)
            run.log.line(run.done, scores, trainer.name)
    run.accelerator.wait_for_everyone()


def save(run: Run) -> None:
    """Save the heads in ``save.dir`` and the state to resume from in its subfolder ``state``."""
    tensors = {name: tensor for trainer in run.trainers for name, tensor in trainer.pack().items()}
    progress = {"recipe": to_dict(run.recipe), "data": run.feed.samples_hash, "tokens": run.tokens}
    if not run.backbone.trainable:
        progress["adapter"] = run.backbone.adapter_digest
    progress["heads"] = {trainer.name: trainer.progress() for trainer in run.trainers}
    for trainer in run.trainers:
        finite = all(all_finite(tensors, f"{trainer.prefix}{part}/") for part in ("drafter", "lora", "adapter"))
        if run.accelerator.is_main_process and not finite:
            raise _diverged(run, trainer, f"the weights{_of(trainer)} are no longer finite after step {run.done}")
    try:
        for trainer in run.trainers:
            _save_heads(run, trainer)
        if run.accelerator.is_main_process:
            write_state(run.folder, run.done, tensors, progress, run.recipe.save.keep)
    except (OSError, SafetensorError) as error:   # no space, no permission, lost disk
        raise UserError(
            f"step {run.done} could not be saved in {run.folder}: {error}; stopped, and {_last_checkpoint(run)}. "
            "Make room there, and the same command goes on"
        ) from None
    run.accelerator.wait_for_everyone()


def _save_heads(run: Run, trainer: DrafterTrainer) -> None:
    with trainer.eval_weights(merge=trainer.merges) as drafter:
        if run.accelerator.is_main_process:
            recipe = to_dict(trainer.recipe)
            provenance = {**run.provenance, "recipe": recipe, "steps": run.done, "tokens": run.tokens, "tau": trainer.tau}
            provenance |= {"init": trainer.start, "draft_vocabulary": trainer.coverage}
            discard_unfinished(trainer.folder / "*")   # from a killed run
            drafter.save_pretrained(trainer.folder, extra=provenance)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
