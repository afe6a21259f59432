"""Evaluate heads by decoding held-out prompts: the mean acceptance length (tau) and acceptance rates.

Shape suffix: T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import end_tokens
from headstart.heads.base import Drafter
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, Tally
from headstart.inference.stream import Prompt, Queue, stream
from headstart.support.terminal import progress
from headstart.support.text import token_texts
from headstart.training.data.packing import collate
from headstart.training.data.sample import Sample
from headstart.training.features.source import LiveFeatures
from headstart.training.objective.loss_rows import count_label_tokens, lm_loss
from headstart.training.recipe.recipe import Eval

ROWS = 8
"""Prompts decoded at once."""
EXAMPLES = 3
"""Number of prompts, the first ones, that are reported with their continuations."""
LONGEST = 300
"""Maximum tokens of an example, which ends with a whole decoding step."""
PROMPT_END = 300
"""Number of characters reported from the end of a prompt."""


def evaluate(
    drafter: Drafter,
    prompts: list[Tensor],
    settings: Eval,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    over: Callable[[int], bool] = lambda tokens: False,
) -> dict[str, Any]:
    """Return ``tau`` (bonus token included) and ``acceptance_per_depth`` over all prompts, ``acceptance`` by score (`Acceptance.to_json`),
    from which decoding with the heads starts, and with a tokenizer ``examples``. Restores the random state and the drafter's mode.

    ``prompts`` has at least one prompt, int64 [T]; prompt i is decoded with ``seed + i``. An example has ``prompt``, the end of the prompt
    as text; ``tokens``, the text of each; and ``accept_lengths``, the tokens of each decoding step after the first. ``over``: called after
    each step with the tokens written so far; True ends the evaluation, which then returns ``prompts``: how many ended, and of how many.
    """
    training, devices = drafter.training, [one for one in (drafter.backbone.device,) if one.type == "cuda"]
    how = Settings(settings.max_new_tokens, settings.temperature, tree=TreeShape(nodes=settings.nodes, width=settings.width))
    queued = (Prompt(prompt_T, seed + i, i) for i, prompt_T in enumerate(prompts))
    waiting = iter(sorted(queued, key=lambda one: len(one.ids_T)))  # a pass attends to as many positions as the longest has
    tally, texts, runs = Tally(accepted=[0] * drafter.depth), dict[int, list[int]](), [list[int]() for _ in prompts]
    drafter.eval()
    try:
        heads = SpeculativeModel(drafter.backbone, drafter, capture="off")  # captures would be made anew for every evaluation
        learned = heads.engine(True).speculation.sources[0].by_mode[how.temperature > 0]
        steps = stream(heads, lambda: next(waiting, None), Queue(how, ROWS, end_tokens(drafter.backbone.model.generation_config)))
        with torch.random.fork_rng(devices), closing(steps):
            for step in steps:
                for prompt, written in step.written:
                    runs[prompt.key].append(written)
                texts |= {ended.prompt.key: ended.tokens for ended in step.ended}
                if step.forward is not None:
                    tally.add_pass(step.forward)
                if over(tally.emitted):
                    break
    finally:
        drafter.train(training)
    examples = [_example(prompts[i], texts[i], runs[i], tokenizer) for i in range(EXAMPLES) if tokenizer is not None and i in texts]
    found = {"tau": tally.tau, "acceptance_per_depth": tally.acceptance_per_depth, **({"examples": examples} if examples else {})}
    cut = {"prompts": [len(texts), len(prompts)]} if len(texts) < len(prompts) else {}
    return found | cut | {"acceptance": {"sampled": how.temperature > 0, **learned.to_json()}}


def marked(example: dict[str, Any]) -> str:
    """Format an example with brackets around the tokens of one decoding step, as in ``[def fib][(n)]:``."""
    tokens, place = example["tokens"], 1
    text = "".join(tokens[:1])
    for length in example["accept_lengths"]:
        written = "".join(tokens[place : place + length])
        text += f"[{written}]" if length > 1 else written
        place += length
    return text


def _example(prompt_T: Tensor, written: list[int], runs: list[int], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    length = 1
    kept: list[int] = []
    for run in runs:
        if length + run > LONGEST:
            break
        length, kept = length + run, [*kept, run]
    prompt = tokenizer.decode(prompt_T, skip_special_tokens=True)[-PROMPT_END:]
    return {"prompt": prompt, "tokens": token_texts(tokenizer, written[:length]), "accept_lengths": kept}


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
