"""Sample outputs for the report: the text of each token, and how many tokens each decoding step wrote.

Shape suffix: T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from headstart.inference.bench.prompts import Prompt
from headstart.inference.bench.systems import SystemResult
from headstart.support.token_text import token_texts

SAMPLES = 6
"""Maximum number of samples per system, the first prompt of each task."""
TOKENS = 300
"""Maximum number of tokens per sample."""


def samples(
    results: Sequence[SystemResult], prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, temperature: float
) -> list[dict[str, Any]]:
    """One sample for each system and the first prompt of each task: the tokens of the first answer as text, and the accept lengths.

    The prefill writes the first token, decoding step n the next ``accept_lengths[n]`` tokens.
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
            "tokens": token_texts(tokenizer, one.sequences[i][0].tolist()[:TOKENS]),
            "accept_lengths": one.accept_lengths[i],
        }
        for one in results
        for task, i in list(first.items())[:SAMPLES]
    ]
