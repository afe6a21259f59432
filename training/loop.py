"""The training loop on `accelerate`: optimiser steps, logging, evaluation and saving.

The loss is the sum over the global batch divided by its number of label tokens. These are counted before the first forward pass, over
all processes and micro-batches, so that every micro-batch has the same divisor. The loss is also multiplied by the number of processes,
since data parallelism averages gradients.
"""

import time

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import Tensor

from headstart.heads.checkpoint import add_provenance, read_metadata
from headstart.support.errors import UserError
from headstart.support.files import discard_unfinished
from headstart.training.data.batches import Batch
from headstart.training.evaluation import evaluate_trainer, guarded, prepare_evaluations
from headstart.training.features.cached import discard_kept
from headstart.training.features.served import FeaturesLost
from headstart.training.objective.loss_rows import count_label_tokens
from headstart.training.objective.objective import Sums
from headstart.training.recipe.recipe import to_dict
from headstart.training.run.checkpoint import add_results, write_state
from headstart.training.run.log import Meter, Result
from headstart.training.run.optimizer import learning_rate
from headstart.training.run.processes import StopSignal, any_of
from headstart.training.run.start import fit_shortlists
from headstart.training.run.trainer import DrafterTrainer
from headstart.training.setup import Run

MAX_CONSECUTIVE_SKIPS = 10
"""With ``train.non_finite=skip``, the run ends after this many non-finite steps in a row, since the weights are then broken."""


def train(run: Run) -> int:
    """Train to the last step or until a signal; returns the exit status."""
    steps = run.feed.steps
    _log(run)  # what an earlier run could not write
    prepare_evaluations(run)
    with StopSignal() as signal:
        if run.pending and _evaluate(run, signal):  # the run was ended before or during it
            return _stopped(run, signal)
        if run.done >= steps:
            save_missing_heads(run)
            discard_kept(run.recipe)
            run.log.say(f"{run.folder} is already at step {run.done} of {steps}; raise train.steps or train.epochs to go on")
            return 0
        for step in range(run.done + 1, steps + 1):
            start = time.perf_counter()
            try:
                tokens, stop, results = training_step(run, step, signal)
            except FeaturesLost:  # the weights are those of the last step
                if run.accelerator.num_processes == 1 and run.saved != run.done:
                    save(run)
                raise
            run.done, run.tokens, seconds = step, run.tokens + tokens, time.perf_counter() - start
            for trainer, result in zip(run.trainers, results, strict=True):
                trainer.meter.add(result, tokens, seconds)
            if _finish_step(run, stop, signal):
                return _stopped(run, signal)
    discard_kept(run.recipe)
    skipped = ", ".join(f"{trainer.skipped}{of(trainer)}" for trainer in run.trainers if trainer.skipped)
    said = f"; steps skipped since their loss or gradient was not finite: {skipped}" if skipped else ""
    run.log.say(f"done: the heads are in {', '.join(str(trainer.folder) for trainer in run.trainers)}{said}")
    return 0


def _stopped(run: Run, signal: StopSignal) -> int:
    left = " and its evaluation is left out" if run.pending else ""
    run.log.say(f"stopped by a signal after step {run.done} of {run.feed.steps}, all saved{left}; the same command goes on from there")
    return 128 + signal.number


def _finish_step(run: Run, stop: bool, signal: StopSignal) -> bool:
    """Log, save and evaluate, as far as is due, in this order: no evaluation costs a training. Returns True if the run is to stop."""
    last = run.done == run.feed.steps
    run.pending = bool(run.prompts) and (last or _due(run.done, run.recipe.eval.every))
    for trainer in run.trainers if run.pending else []:
        trainer.results = dict.fromkeys(trainer.results)  # those before were of other weights
    try:
        run.log.advance()
        _log(run)
    finally:  # a log that cannot be written costs no training either
        if stop or last or _due(run.done, run.recipe.save.every):
            save(run)
    if stop and (run.pending or not last):
        return True
    if not run.pending or not _evaluate(run, signal):
        return False
    if run.saved != run.done:
        save(run)
    return run.pending or not last


def _evaluate(run: Run, signal: StopSignal) -> bool:
    """Evaluate every trainer after this step and add the results to what was saved at it; returns True if a signal ended the evaluation.
    Another failure is a warning; `Run.pending` then stays True, and the step is evaluated when it is resumed.
    """
    run.pending = not all([evaluate_trainer(run, trainer, signal) for trainer in run.trainers])
    guarded(run, lambda: save_results(run))
    return any_of(run.accelerator, signal.received, run.control)


def _log(run: Run) -> None:
    for trainer in run.trainers:
        if trainer.meter.tokens and (run.done == run.feed.steps or _due(run.done, run.recipe.log.every)):
            rate = learning_rate(run.done, run.feed.steps, trainer.recipe.train)
            run.log.line(run.done, {**trainer.meter.record(), "lr": rate, "tokens": run.tokens}, trainer.name)
            trainer.meter = Meter()


def training_step(run: Run, step: int, signal: StopSignal) -> tuple[int, bool, list[Result | None]]:
    """Run one optimiser step of every trainer; returns over all processes the tokens, whether one has received a signal to stop, and each
    trainer's result (None: its step was skipped). Raises UserError, with weights unchanged, if a non-finite loss or gradient ends the run.
    """
    accelerator, batches = run.accelerator, list(run.feed.local_batches(step, run.accelerator.device))
    for later in range(step, min(step + run.source.ahead, run.feed.steps) + 1 if run.source.ahead else step):
        run.source.prefetch(run.feed.local_batches(later, torch.device("cpu")))
    for trainer in run.trainers:
        trainer.set_learning_rate(step, run.feed.steps)
    by_batch = [count_label_tokens(batch.loss_mask_BT, batch.document_BT) for batch in batches]
    label_tokens = accelerator.reduce(torch.stack(by_batch).sum(), "sum")
    sums = _accumulate_gradients(run, step, batches, accelerator.num_processes / label_tokens.clamp(min=1))
    norms = [trainer.clip_gradients() for trainer in run.trainers]
    tokens = torch.stack([(batch.document_BT >= 0).sum() for batch in batches]).sum()
    [[total_tokens], [stops]], totals = _sum_over_processes(accelerator, [tokens[None], tokens.new_tensor([signal.received])], sums)
    labels, both = max(label_tokens.item(), 1), zip(norms, totals, strict=True)
    results = [Result(loss / labels, norm, depths, lm / labels, kl / labels) for norm, ([loss], [lm], [kl], *depths) in both]
    good = [_is_finite(run, trainer, result, step) for trainer, result in zip(run.trainers, results, strict=True)]
    for trainer, finite in zip(run.trainers, good, strict=True):
        trainer.optimizer_step() if finite else trainer.skip_step()
    return int(total_tokens), stops > 0, [result if finite else None for result, finite in zip(results, good, strict=True)]


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
    losses = [(each.loss[None], each.lm_loss[None], each.lm_kl[None], each.count_K, each.correct_K, each.alpha_K) for each in sums]
    parts = counts + [part for of_trainer in losses for part in of_trainer]
    parts = [part.cpu() if part.device.type == "mps" else part for part in parts]  # which has no fp64, and one process
    reduced = accelerator.reduce(torch.cat([part.double() for part in parts]), "sum")
    values = [part.tolist() for part in reduced.split([len(part) for part in parts])]
    totals = values[len(counts) :]
    return values[: len(counts)], [totals[i : i + 6] for i in range(0, len(totals), 6)]


def _is_finite(run: Run, trainer: DrafterTrainer, result: Result, step: int) -> bool:
    """Return True if the weights should be updated. Raises UserError if the run must end."""
    if trainer.is_finite(result):
        return True
    fault = f"the loss{of(trainer)} is {result.loss:g} and the norm of its gradient {result.grad_norm:g} at step {step}"
    if trainer.recipe.train.non_finite == "stop":
        raise diverged(run, trainer, fault)
    if trainer.consecutive_skips + 1 >= MAX_CONSECUTIVE_SKIPS:
        raise diverged(run, trainer, f"{fault}, the last of {MAX_CONSECUTIVE_SKIPS} such steps in a row")
    return False


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def save(run: Run) -> None:
    """Save the heads and the state. Raises UserError if the weights are not finite or the disk fails."""
    for trainer in run.trainers:
        if not trainer.is_weight_finite():
            raise diverged(run, trainer, f"the weights{of(trainer)} are no longer finite after step {run.done}")
    fault = _save_heads(run)
    try:
        _save_state(run)
    except Exception as error:
        fault = fault or error
    if isinstance(fault, OSError | SafetensorError):  # no space, no permission, lost disk
        said = f"step {run.done} could not be saved in {run.folder}: {fault}; stopped, and {_last_checkpoint(run)}"
        raise UserError(f"{said}. Make room there, and the same command goes on") from None
    if fault is not None:
        raise fault
    run.saved = run.done
    run.accelerator.wait_for_everyone()


def _save_heads(run: Run) -> Exception | None:
    """Save the heads of all trainers; returns the first error, after which the state is saved all the same, so no training is lost."""
    fault: Exception | None = None
    for trainer in run.trainers:
        try:
            with trainer.eval_weights() as drafter:
                if run.accelerator.is_main_process:
                    recipe = to_dict(trainer.recipe)
                    provenance = {**run.provenance, "recipe": recipe, "steps": run.done, "tokens": run.tokens, **trainer.results}
                    provenance |= {"init": trainer.start, "draft_vocabulary": trainer.coverage}
                    discard_unfinished(trainer.folder / "*")  # from a killed run
                    if run.done == run.feed.steps and (lacking := fit_shortlists(drafter, run.feed.samples, run.source)):
                        run.log.say(lacking)
                    drafter.save_pretrained(trainer.folder, extra=provenance)
        except Exception as error:
            fault = fault or error
    return fault


def _save_state(run: Run) -> None:
    tensors = {name: tensor for trainer in run.trainers for name, tensor in trainer.pack().items()}
    progress = {"recipe": to_dict(run.recipe), "data": run.feed.samples_hash, "tokens": run.tokens, "evaluated": not run.pending}
    if run.log.wandb_id is not None:
        progress["wandb"] = run.log.wandb_id
    if not run.backbone.trainable:
        progress["adapter"] = run.backbone.adapter_digest
    progress["heads"] = {trainer.name: trainer.progress() for trainer in run.trainers}
    if run.accelerator.is_main_process:
        write_state(run.folder, run.done, tensors, progress, run.recipe.save.keep)


def save_results(run: Run) -> None:
    """Add the results of this step's evaluation to what was saved at this step, if it was."""
    if run.accelerator.is_main_process and run.saved == run.done:
        for trainer in run.trainers:
            if trainer.results["tau"] is not None or trainer.results["teacher_forced"] is not None:
                add_provenance(trainer.folder, trainer.results)
        add_results(run.folder, run.done, {trainer.name: trainer.results for trainer in run.trainers}, evaluated=not run.pending)


def save_missing_heads(run: Run) -> None:
    """Save the heads of a run that has ended, if they were not saved when it ended."""
    lacking = [run.accelerator.is_main_process and not all(_has_heads(run, trainer) for trainer in run.trainers)]
    if broadcast_object_list(lacking)[0]:
        run.log.say(f"the heads of step {run.done} were not saved; they are now")
        if (fault := _save_heads(run)) is not None:
            raise fault


def _has_heads(run: Run, trainer: DrafterTrainer) -> bool:
    try:
        return bool(read_metadata(trainer.folder)[1]["provenance"].get("steps") == run.done)
    except UserError:
        return False


def diverged(run: Run, trainer: DrafterTrainer, fault: str) -> UserError:
    """Return the error of a run that ends since its loss or weights are not finite."""
    train = trainer.recipe.train
    skip = ", or train.non_finite=skip to pass over such steps" if train.non_finite == "stop" else ""
    precision = "" if train.precision == "no" else " or train.precision=no"
    gentler = f"a longer train.warmup_ratio ({train.warmup_ratio:g}), a smaller train.max_grad_norm ({train.max_grad_norm:g})"
    remedies = f"a lower train.lr (now {train.peak_lr:g}), {gentler}{precision}{skip}"
    return UserError(f"{fault}; stopped, and {_last_checkpoint(run)}. Try {remedies}")


def _last_checkpoint(run: Run) -> str:
    saved = sorted((run.folder / "state").glob("step-*"))
    return f"the last good checkpoint, {saved[-1]}, is kept" if saved else "no checkpoint had been saved yet (save.every)"


def of(trainer: DrafterTrainer) -> str:
    """Name the trainer's drafter in a message, if there are several."""
    return f" of {trainer.name}" if trainer.name else ""
