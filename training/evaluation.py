"""The evaluations of a run: bounded, shown while they last, and never the end of it.

All processes call these functions together. The main process decodes, or with a sharded backbone all of them, in step with each other.

Held-out prompts are decoded, for the mean acceptance length (tau) and acceptance rates; of stored features chains are teacher-forced.

Shape suffix: T positions.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import end_tokens
from headstart.heads.base import Drafter
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Prompt, Queue, Settings, stream
from headstart.inference.steps import Tally
from headstart.support.errors import cause
from headstart.support.terminal import progress
from headstart.support.text import token_texts
from headstart.training.data.batches import collate
from headstart.training.data.samples import Sample
from headstart.training.features.cached import evaluated
from headstart.training.features.source import LiveFeatures
from headstart.training.objective.fused import FusedLoss, acceptance
from headstart.training.objective.loss_rows import count_label_tokens, lm_loss
from headstart.training.recipe.recipe import Eval
from headstart.training.run.processes import StopSignal, any_of, is_sharded
from headstart.training.run.trainer import DrafterTrainer
from headstart.training.setup import Run

T = TypeVar("T")
STEP_SECONDS = 300.0
"""The longest that processes that decode together may be apart."""
ROWS = 8
"""Prompts decoded at once."""
EXAMPLES = 3
"""Number of prompts, the first ones, that are reported with their continuations."""
LONGEST = 300
"""Maximum tokens of an example, which ends with a whole decoding step."""
PROMPT_END = 300
"""Number of characters reported from the end of a prompt."""


def evaluate_trainer(run: Run, trainer: DrafterTrainer, signal: StopSignal) -> bool:
    """Return True if it was evaluated, to the end or to ``eval.max_seconds``."""

    def measure() -> bool:
        with trainer.eval_weights() as drafter:
            return (run.accelerator.is_main_process or is_sharded(run.backbone)) and _measure(run, trainer, drafter, signal)

    return any_of(run.accelerator, bool(guarded(run, measure)), run.control)  # all wait for the main process


def guarded(run: Run, work: Callable[[], T]) -> T | None:
    """Return what the work returns; an error becomes a warning, and None."""
    try:
        return work()
    except Exception as error:
        run.log.warn(run.done, f"the evaluation at step {run.done} failed ({type(error).__name__}: {cause(error)})", error)
        return None


def _measure(run: Run, trainer: DrafterTrainer, drafter: Drafter, signal: StopSignal) -> bool:
    """Decode the held-out prompts, and log the results unless a signal ended it."""
    if not run.backbone.whole or run.backbone.refusal is not None or run.backbone.dependence is not None:
        return _measure_stored(run, trainer, drafter)
    settings, prompts = run.recipe.eval, run.prompts
    limits = f"of up to {settings.max_new_tokens} tokens, for at most {settings.max_seconds:g} s (eval.max_seconds)"
    run.log.say(f"step {run.done}/{run.feed.steps}: evaluating {trainer.name or 'the heads'} on {len(prompts)} prompts {limits}")
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
    trainer.results |= {"tau": scores["tau"], "acceptance": scores.pop("acceptance")}
    held_out = f"{len(prompts)} held-out prompts of {run.recipe.data.eval or 'data.train'}"
    scores["measured_on"] = f"{held_out}, temperature {settings.temperature:g}"
    run.log.line(run.done, scores, trainer.name)
    if "prompts" in scores:
        run.log.say(f"ended by eval.max_seconds={settings.max_seconds:g} after {scores['prompts'][0]} of {len(prompts)} prompts")
    return True


def _measure_stored(run: Run, trainer: DrafterTrainer, drafter: Drafter) -> bool:
    """Log the teacher-forced acceptance on the held-out rows' features: it cannot decode here."""
    loss, sampled = FusedLoss(trainer.recipe.objective, drafter), run.recipe.eval.temperature > 0
    training = drafter.training
    drafter.eval()
    try:
        found = acceptance(loss, run.source.read_held_out(evaluated(run.held_out)), sampled, run.recipe.seed)
    finally:
        drafter.train(training)
    if found is None:
        run.log.say(f"step {run.done}: not evaluated, since the features of these held-out rows are not in the cache (headstart cache)")
        return True
    trainer.results["teacher_forced"] = found
    run.log.line(run.done, found, trainer.name)
    return True


def prepare_evaluations(run: Run) -> None:
    """Make the group by which processes that decode together agree; where one fails alone, all end after `STEP_SECONDS`."""
    if run.prompts and is_sharded(run.backbone):
        run.control = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=STEP_SECONDS))


def evaluate(
    drafter: Drafter,
    prompts: Sequence[Sample],
    settings: Eval,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    over: Callable[[int], bool] = lambda tokens: False,
) -> dict[str, Any]:
    """Return ``tau`` (bonus token included) and ``acceptance_per_depth`` over all prompts, ``acceptance`` by score (`Acceptance.to_json`),
    from which decoding with the heads starts, and with a tokenizer ``examples``. Restores the random state and the drafter's mode.

    ``prompts`` has at least one prompt; prompt i is decoded with ``seed + i``. An example has ``prompt``, the end of the prompt
    as text; ``tokens``, the text of each; and ``accept_lengths``, the tokens of each decoding step after the first. ``over``: called after
    each step with the tokens written so far; True ends the evaluation, which then returns ``prompts``: how many ended, and of how many.
    """
    training, devices = drafter.training, [device for device in (drafter.backbone.device,) if device.type == "cuda"]
    how = Settings(settings.max_new_tokens, settings.temperature, tree=TreeShape(nodes=settings.nodes, width=settings.width))
    order = sorted(enumerate(prompts), key=lambda entry: len(entry[1].tokens))  # a pass attends to as many positions as the longest has
    waiting = (Prompt(row.tokens, seed + i, i, LiveFeatures(drafter.backbone, ()).images(row.tokens, row.images)) for i, row in order)
    tally, texts, runs = Tally(accepted=[0] * drafter.depth), dict[int, list[int]](), [list[int]() for _ in prompts]
    drafter.eval()
    try:
        heads = SpeculativeModel(drafter.backbone, drafter, capture="off")  # captures would be made anew for every evaluation
        learned = heads.engine(True).policy.sources[0].by_mode[how.temperature > 0]
        steps = stream(heads, lambda: next(waiting, None), Queue(how, ROWS, end_tokens(drafter.backbone.model.generation_config)))
        with torch.random.fork_rng(devices), closing(steps):
            for step in steps:
                for prompt, written in step.written:
                    runs[prompt.key].append(written)
                texts |= {ended.prompt.key: ended.tokens for ended in step.ended}
                if step.forward is not None:
                    tally.add(step.forward)
                if over(tally.emitted):
                    break
    finally:
        drafter.train(training)
    examples = [_example(prompts[i].tokens, texts[i], runs[i], tokenizer) for i in range(EXAMPLES) if tokenizer is not None and i in texts]
    found = {"tau": tally.tau, "acceptance_per_depth": tally.acceptance_per_depth, **({"examples": examples} if examples else {})}
    cut = {"prompts": [len(texts), len(prompts)]} if len(texts) < len(prompts) else {}
    return found | cut | {"acceptance": {"sampled": how.temperature > 0, **learned.to_json()}}


def _example(prompt_T: Tensor, written: list[int], runs: list[int], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    ends = accumulate(runs, initial=1)
    next(ends)  # before the first step, which follows one token
    kept = [run for run, end in zip(runs, ends, strict=True) if end <= LONGEST]
    prompt = tokenizer.decode(prompt_T, skip_special_tokens=True)[-PROMPT_END:]
    return {"prompt": prompt, "tokens": token_texts(tokenizer, written[: 1 + sum(kept)]), "accept_lengths": kept}


def backbone_losses(backbone: Backbone, rows: Sequence[Sample], chunk: int) -> dict[str, float]:
    """Return the mean next-token cross-entropy over the rows' label tokens, ``backbone_loss``, and without the adapter
    ``backbone_loss_before``."""
    with progress("measuring the backbone's loss", "row", 2 * len(rows)) as bar:
        now = _mean(backbone, rows, chunk, bar)
        with backbone.without_adapter():
            return {"backbone_loss": now, "backbone_loss_before": _mean(backbone, rows, chunk, bar)}


@torch.no_grad()
def _mean(backbone: Backbone, rows: Sequence[Sample], chunk: int, bar: tqdm) -> float:
    source, total, count = LiveFeatures(backbone, ()), 0.0, 0
    for i in range(len(rows)):
        batch = collate(rows, [[i]]).to(backbone.device)
        total += lm_loss(backbone, source.read(batch), chunk).cross_entropy.item()
        count += int(count_label_tokens(batch.loss_mask_BT, batch.document_BT))
        bar.update()
    return total / max(count, 1)
