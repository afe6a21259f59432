"""The evaluations of a run: bounded, shown while they last, and never the end of it.

All processes call these functions together. The main process decodes, or with a sharded backbone all of them, in step with each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch

from headstart.heads.base import Drafter
from headstart.support.errors import cause
from headstart.support.terminal import progress
from headstart.training.features.supplement import evaluated
from headstart.training.log.evaluate import backbone_losses, evaluate
from headstart.training.objective.acceptance import acceptance
from headstart.training.objective.fused import FusedLoss
from headstart.training.run.processes import StopSignal, any_of
from headstart.training.run.sharding import is_sharded
from headstart.training.run.trainer import DrafterTrainer
from headstart.training.saving import save_results
from headstart.training.setup import Run

STEP_SECONDS = 300.0
"""The longest that processes that decode together may be apart."""


def evaluate_all(run: Run, signal: StopSignal) -> bool:
    """Evaluate every trainer after this step and add the results to what was saved at it; returns True if a signal ended the evaluation.

    Any other failure is a warning, with its traceback in the log; `Run.pending` then stays True, and the step is evaluated when it is
    resumed.
    """
    run.pending = not all([_evaluate(run, trainer, signal) for trainer in run.trainers])
    _guarded(run, lambda: save_results(run))
    return any_of(run.accelerator, signal.received, run.control)


def _evaluate(run: Run, trainer: DrafterTrainer, signal: StopSignal) -> bool:
    """Return True if it was evaluated, to the end or to ``eval.max_seconds``."""
    done = False

    def measure() -> None:
        nonlocal done
        with trainer.eval_weights() as drafter:
            if run.accelerator.is_main_process or is_sharded(run.backbone):
                done = _measure(run, trainer, drafter, signal)

    _guarded(run, measure)
    return any_of(run.accelerator, done, run.control)  # all wait for the main process


def _guarded(run: Run, work: Callable[[], None]) -> None:
    """Do the work; an error becomes a warning."""
    try:
        work()
    except Exception as error:
        run.log.warn(run.done, f"the evaluation at step {run.done} failed ({type(error).__name__}: {cause(error)})", error)


def _measure(run: Run, trainer: DrafterTrainer, drafter: Drafter, signal: StopSignal) -> bool:
    """Decode the held-out prompts, and log the results unless a signal ended it."""
    if not run.backbone.whole:
        return _measure_stored(run, trainer, drafter)
    settings, prompts = run.recipe.eval, run.prompts
    run.log.say(
        f"step {run.done}/{run.feed.steps}: evaluating {trainer.name or 'the heads'} on {len(prompts)} prompts of up to "
        f"{settings.max_new_tokens} tokens, for at most {settings.max_seconds:g} s (eval.max_seconds)"
    )
    end, together = time.monotonic() + settings.max_seconds, is_sharded(run.backbone)
    with progress("evaluating", "token", len(prompts) * settings.max_new_tokens, run.accelerator.is_main_process) as bar:

        def over(tokens: int) -> bool:
            bar.update(tokens - bar.n)
            mine = signal.received or time.monotonic() > end
            return any_of(run.accelerator, mine, run.control) if together else mine

        scores = evaluate(drafter, prompts, settings, run.recipe.seed, run.tokenizer, over)
    stopped = any_of(run.accelerator, signal.received, run.control) if together else signal.received
    if "prompts" in scores and stopped:
        return False
    if run.backbone.trainable:
        scores |= backbone_losses(run.backbone, run.held_out, run.recipe.objective.chunk_size)
    trainer.tau, trainer.acceptance = scores["tau"], scores.pop("acceptance")
    run.log.line(run.done, scores, trainer.name)
    if "prompts" in scores:
        run.log.say(f"ended by eval.max_seconds={settings.max_seconds:g} after {scores['prompts'][0]} of {len(prompts)} prompts")
    return True


def _measure_stored(run: Run, trainer: DrafterTrainer, drafter: Drafter) -> bool:
    """Log the teacher-forced acceptance on the held-out rows' features: there are no layers here to decode with."""
    loss, sampled = FusedLoss(trainer.recipe.objective, run.source.teacher, drafter), run.recipe.eval.temperature > 0
    training = drafter.training
    drafter.eval()
    try:
        found = acceptance(loss, run.source.read_held_out(evaluated(run.held_out)), sampled, run.recipe.seed)
    finally:
        drafter.train(training)
    if found is None:
        run.log.say(f"step {run.done}: not evaluated, since the features of these held-out rows are not in the cache (headstart cache)")
        return True
    trainer.teacher_forced = found
    run.log.line(run.done, found, trainer.name)
    return True


def prepare_evaluations(run: Run) -> None:
    """Make the group by which the processes of a sharded backbone, which decode together, agree apart from their passes.

    Where an evaluation fails in one of them alone, that one ends after `STEP_SECONDS`, and so do the others.
    """
    if run.prompts and is_sharded(run.backbone):
        run.control = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=STEP_SECONDS))
