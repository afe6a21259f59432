"""Samples of what was written, cut at the tokens, with the runs that wrote them: for looking at.

Shape suffix: T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from headstart.inference.bench.prompts import Prompt
from headstart.inference.bench.systems import SystemResult
from headstart.support.token_text import cut

SAMPLES = 6
"""At most so many a system, the first of each task."""
TOKENS = 300
"""At most so many of each."""


def samples(
    ours: Sequence[SystemResult], prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, temperature: float
) -> list[dict[str, Any]]:
    """For each of the heads and the first prompt of each task: the first answer in pieces, a token each, and the runs.

    The pass over the prompt writes the first token; the n-th run, the next ``runs[n]``.
    """
    first: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        first.setdefault(prompt.task, i)
    return [
        {
            "head": one.system.name,
            "temperature": temperature,
            "task": task,
            "prompt": tokenizer.decode(prompts[i].ids_T, skip_special_tokens=True)[-300:],
            "pieces": cut(tokenizer, one.texts[i][0].tolist()[:TOKENS]),
            "runs": one.runs[i],
        }
        for one in ours
        for task, i in list(first.items())[:SAMPLES]
    ]
