"""Recorded decoding for the replay of the report: when each forward pass ended, what it wrote, and the tree that it verified.

Shape suffix: T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.inference.bench.prompts import Prompt
from headstart.inference.bench.systems import HeadstartSystem
from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.engine.tree import VerifiedTree
from headstart.inference.measure import Settings, continue_text
from headstart.support.report.tree import DrawnTree
from headstart.support.token_text import token_texts

PROMPTS = 3
"""Maximum number of prompts that are recorded, the first of each task."""
SHOWN = 300
"""Characters of the end of the prompt that are shown."""


def record(
    systems: Sequence[HeadstartSystem], prompts: Sequence[Prompt], settings: Settings, seed: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Decode the first prompt of some tasks once more with every system, the autoregressive one first, and record the passes.

    ``seed``: that of prompt 0. The systems should be warm: a pass that captures is as slow here as it was.
    """
    first: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        first.setdefault(prompt.task, i)
    return [
        {
            "title": f"{task}, temperature {settings.temperature:g}",
            "prompt": tokenizer.decode(prompts[i].ids_T, skip_special_tokens=True)[-SHOWN:],
            "runs": [_recorded(system, prompts[i].ids_T, settings, seed + i, tokenizer) for system in systems],
        }
        for task, i in list(first.items())[:PROMPTS]
    ]


def _recorded(
    system: HeadstartSystem, prompt_T: Tensor, settings: Settings, seed: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    with Stopwatch() as watch:
        output = continue_text(system.heads, prompt_T, system.settings(settings), seed, timed=True)
    assert output.trees is not None and output.pass_seconds is not None and output.accept_lengths is not None
    tokens = output.sequences[0, len(prompt_T) :].tolist()[: 1 + sum(output.accept_lengths[0])]
    texts = token_texts(tokenizer, tokens)
    at = max(watch.seconds - sum(output.pass_seconds), 0.0)   # the prefill writes the first token
    passes: list[dict[str, Any]] = [{"at": round(at, 5), "tokens": texts[:1], "tree": None}]
    place = 1
    for seconds, tree, written in zip(output.pass_seconds, output.trees[0], output.accept_lengths[0], strict=True):
        at, end = at + seconds, place + written
        shown = _drawn(tree, written, texts[end - 1], tokenizer) if len(tree.tokens) > 1 else None
        passes.append({"at": round(at, 5), "tokens": texts[place:end], "tree": shown})
        place = end
    return {"name": system.name, "passes": passes}


def _drawn(tree: VerifiedTree, written: int, own: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The boxes of a tree; a path past the end of the text is cut, since its last token counts as the backbone's own."""
    drawn = DrawnTree([tokenizer.decode([token]) for token in tree.tokens], tree.parents, tree.path[:written], own)
    return {"labels": drawn.labels, "above": drawn.above, "rows": drawn.rows, "kinds": drawn.kinds}
