"""What a report shows of the texts: sample outputs, and for its page some prompts recorded pass by pass.

Shape suffix: T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.inference.bench.systems import HeadstartSystem, SystemResult
from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.measure import Settings, continue_text
from headstart.inference.show import drawn_tree
from headstart.support.chat.prompts import Prompt
from headstart.support.page import as_html
from headstart.support.text import token_texts

SAMPLES, RECORDED = 6, 3
"""Maximum number of samples of each system and of prompts that are recorded, the first of each task."""
TOKENS = 300
"""Maximum number of tokens per sample."""
SHOWN = 300
"""Characters of the end of the prompt that are shown."""


def samples(
    results: Sequence[SystemResult], prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, temperature: float
) -> list[dict[str, Any]]:
    """One sample for each system and the first prompt of each task: the tokens of the first answer as text, and the accept lengths.

    The prefill writes the first token, decoding step n the next ``accept_lengths[n]`` tokens.
    """
    return [
        {
            "head": one.system.name,
            "temperature": temperature,
            "task": task,
            "prompt": _end(prompts[i], tokenizer),
            "tokens": token_texts(tokenizer, one.sequences[i][0].tolist()[:TOKENS]),
            "accept_lengths": one.accept_lengths[i],
        }
        for one in results
        for task, i in _first_of_tasks(prompts, SAMPLES)
    ]


def record(
    systems: Sequence[HeadstartSystem], prompts: Sequence[Prompt], settings: Settings, seed: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Decode the first prompt of some tasks once more with every system: when each pass ended, its tokens, and its tree as HTML.

    ``seed``: that of prompt 0. The systems should be warm: a pass that captures is as slow here as it was.
    """
    return [
        {
            "title": f"{task}, temperature {settings.temperature:g}",
            "prompt": _end(prompts[i], tokenizer),
            "runs": [_recorded(system, prompts[i].ids_T, settings, seed + i, tokenizer) for system in systems],
        }
        for task, i in _first_of_tasks(prompts, RECORDED)
    ]


def _first_of_tasks(prompts: Sequence[Prompt], most: int) -> list[tuple[str, int]]:
    first: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        first.setdefault(prompt.task, i)
    return list(islice(first.items(), most))


def _end(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(prompt.ids_T, skip_special_tokens=True))[-SHOWN:]


def _recorded(
    system: HeadstartSystem, prompt_T: Tensor, settings: Settings, seed: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    with Stopwatch() as watch:
        output = continue_text(system.heads, prompt_T, system.settings(settings), seed, timed=True)
    assert output.trees is not None and output.pass_seconds is not None and output.accept_lengths is not None
    texts = token_texts(tokenizer, output.sequences[0, len(prompt_T) :].tolist()[: 1 + sum(output.accept_lengths[0])])
    at = max(watch.seconds - sum(output.pass_seconds), 0.0)  # the prefill writes the first token
    passes: list[dict[str, Any]] = [{"at": at, "tokens": texts[:1], "tree": None}]
    place = 1
    for seconds, tree, written in zip(output.pass_seconds, output.trees[0], output.accept_lengths[0], strict=True):
        at, tokens = at + seconds, texts[place : place + written]
        passes.append({"at": at, "tokens": tokens, "tree": as_html(drawn_tree(tree, tokens, tokenizer)) if len(tree.tokens) > 1 else None})
        place += written
    return {"name": system.name, "passes": passes}
