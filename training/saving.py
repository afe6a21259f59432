"""Saving: the heads in ``save.dir`` and the state to resume from in its subfolder ``state``, each though the other may fail."""

from __future__ import annotations

from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError

from headstart.heads.checkpoint import add_provenance, read_metadata
from headstart.support.errors import UserError
from headstart.support.files import discard_unfinished
from headstart.training.recipe.recipe import to_dict
from headstart.training.run.checkpoint import add_results, write_state
from headstart.training.run.trainer import DrafterTrainer
from headstart.training.setup import Run


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
        raise UserError(
            f"step {run.done} could not be saved in {run.folder}: {fault}; stopped, and {_last_checkpoint(run)}. "
            "Make room there, and the same command goes on"
        ) from None
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
            if trainer.tau is not None or trainer.teacher_forced is not None:
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
    return UserError(
        f"{fault}; stopped, and {_last_checkpoint(run)}. Try a lower train.lr (now {train.peak_lr:g}), "
        f"a longer train.warmup_ratio ({train.warmup_ratio:g}), a smaller train.max_grad_norm ({train.max_grad_norm:g})"
        f"{'' if train.precision == 'no' else ' or train.precision=no'}{skip}"
    )


def _last_checkpoint(run: Run) -> str:
    saved = sorted((run.folder / "state").glob("step-*"))
    return f"the last good checkpoint, {saved[-1]}, is kept" if saved else "no checkpoint had been saved yet (save.every)"


def of(trainer: DrafterTrainer) -> str:
    """Name the trainer's drafter in a message, if there are several."""
    return f" of {trainer.name}" if trainer.name else ""
