"""Evaluate heads by decoding held-out prompts: the mean acceptance length (tau) and acceptance rates.

Shape suffix: T positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.sharding import is_sharded
from headstart.heads.base import Drafter
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import GenerateOutput, SpeculativeModel
from headstart.inference.measure import Settings, Tally, continue_text
from headstart.support.token_text import token_texts
from headstart.training.recipe.recipe import Eval

EXAMPLES = 3
"""Number of prompts, the first ones, that are reported with their continuations."""
LONGEST = 300
"""Maximum tokens of an example, which ends with a whole decoding step."""
PROMPT_END = 300
"""Number of characters reported from the end of a prompt."""


def evaluate(
    backbone: Backbone, drafter: Drafter, prompts: list[Tensor], settings: Eval, seed: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> dict[str, Any]:
    """Return ``tau`` (bonus token included) and ``acceptance_per_depth`` over all prompts; with a tokenizer also ``examples``.

    ``prompts`` has at least one prompt, int64 [T]; prompt i is decoded with ``seed + i``. An example has ``prompt``, the end of the
    prompt as text; ``tokens``, the text of each generated token; and ``accept_lengths``, the number of tokens of each decoding step after
    the first token. Restores the random state and the drafter's mode.
    """
    training, tally, examples = drafter.training, Tally(), []
    devices = [backbone.device] if backbone.device.type == "cuda" else []
    how = Settings(settings.max_new_tokens, settings.temperature, tree=TreeShape(nodes=settings.nodes, width=settings.width))
    drafter.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            heads = SpeculativeModel(backbone, drafter, capture="off" if is_sharded(backbone) else "auto")
            for i, prompt_T in enumerate(prompts):
                output = continue_text(heads, prompt_T, how, seed + i)
                tally.add(output)
                if tokenizer is not None and i < EXAMPLES:
                    examples.append(_example(prompt_T, output, tokenizer))
    finally:
        drafter.train(training)
    found: dict[str, Any] = {"tau": tally.tau, "acceptance_per_depth": tally.acceptance_per_depth}
    return found | ({"examples": examples} if examples else {})


def marked(example: dict[str, Any]) -> str:
    """Format an example with brackets around the tokens of one decoding step, as in ``[def fib][(n)]:``."""
    tokens, place = example["tokens"], 1
    text = "".join(tokens[:1])
    for length in example["accept_lengths"]:
        written = "".join(tokens[place : place + length])
        text += f"[{written}]" if length > 1 else written
        place += length
    return text


def _example(prompt_T: Tensor, output: GenerateOutput, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    assert output.accept_lengths is not None
    length = 1
    runs: list[int] = []
    for run in output.accept_lengths[0]:
        if length + run > LONGEST:
            break
        length, runs = length + run, [*runs, run]
    written = output.sequences[0, len(prompt_T) :].tolist()[:length]
    prompt = tokenizer.decode(prompt_T, skip_special_tokens=True)[-PROMPT_END:]
    return {"prompt": prompt, "tokens": token_texts(tokenizer, written), "accept_lengths": runs}
