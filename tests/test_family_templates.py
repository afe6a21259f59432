"""The exact label tokens under the shapes of published chat templates: thoughts, tool calls, results of tools, generation blocks."""
from __future__ import annotations

from typing import Any

import pytest
from chat_templates import chat, make_tokenizer
from family_templates import HARMONY, QWEN_3, SHAPES, SMOLLM3, Shape
from test_conversation import learned, samples_of
from transformers import PreTrainedTokenizerFast

QUESTIONS = [("user", "What is two?"), ("assistant", "It is four."), ("user", "And three?"), ("assistant", "Six.")]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
WITH_TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four.", "reasoning_content": "Done."},
]
TOOLED = [name for name, shape in SHAPES.items() if shape.tools]


def tokenizer_of(shape: Shape) -> PreTrainedTokenizerFast:
    return make_tokenizer(shape.template, special=shape.special)


@pytest.mark.parametrize("name", SHAPES)
def test_answers_are_learned_and_nothing_else(name: str) -> None:
    tokenizer = tokenizer_of(SHAPES[name])
    samples = samples_of(tokenizer, chat(*QUESTIONS))
    assert tuple(run for sample in samples for run in learned(tokenizer, sample)) == SHAPES[name].plain


@pytest.mark.parametrize("name", TOOLED)
def test_calls_and_thoughts_are_learned_and_results_are_not(name: str) -> None:
    tokenizer = tokenizer_of(SHAPES[name])
    samples = samples_of(tokenizer, WITH_TOOLS)
    assert tuple(tuple(learned(tokenizer, sample)) for sample in samples) == SHAPES[name].tools


@pytest.mark.parametrize("shape", [QWEN_3, HARMONY], ids=["qwen3", "gpt-oss"])
def test_each_answer_is_learned_after_the_prompt_of_decoding(shape: Shape) -> None:
    """Templates that rewrite earlier turns: one sample a turn, each as the model meets it."""
    tokenizer = tokenizer_of(shape)
    samples = samples_of(tokenizer, chat(*QUESTIONS))
    for sample, turns in zip(samples, (QUESTIONS[:2], QUESTIONS), strict=True):
        asked = tokenizer.apply_chat_template(chat(*turns[:-1]), add_generation_prompt=True, return_dict=False)
        assert sample.tokens[: len(asked)].tolist() == asked and not sample.loss_mask[: len(asked)].any() and sample.loss_mask[len(asked)]


def test_generation_blocks_are_what_is_learned() -> None:
    tokenizer = tokenizer_of(SMOLLM3)
    (sample,) = samples_of(tokenizer, WITH_TOOLS)
    expected = tokenizer.apply_chat_template(WITH_TOOLS, return_dict=True, return_assistant_tokens_mask=True)
    assert sample.loss_mask.int().tolist() == expected["assistant_masks"][: len(sample.tokens)]
