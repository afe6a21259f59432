"""Data: the exact text that is learned under templates of every style, every way rows can be wrong, batches, order, prompts."""
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from headstart.heads.errors import UserError
from headstart.training.conversation import Chat, as_messages, encode
from headstart.training.data import Sample, collate, load_data, order, prompts, tokenise, vocabulary_by_frequency
from headstart.training.recipe import Data, Eval
from headstart.training.rows import read_rows

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA3 = """{{ bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>' }}
{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
VICUNA = """A chat.{{ ' ' }}{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}
{%- elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
QWEN3 = """{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- text + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
PHI3 = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
PLAIN = """{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
OPENING = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""

SPECIAL = {
    CHATML: "<|im_start|> <|im_end|>", QWEN3: "<|im_start|> <|im_end|>", OPENING: "<|im_start|> <|im_end|>",
    LLAMA3: "<|start_header_id|> <|end_header_id|> <|eot_id|>", GEMMA: "<start_of_turn> <end_of_turn>",
    PHI3: "<|user|> <|assistant|> <|end|>", VICUNA: "", PLAIN: "",
}
CORPUS = ["What is two and two? It is four.", "And three? Six, I think.", "USER: Hi ASSISTANT: Hello there", "user assistant model system"] * 3
TURNS = [("user", "What is two?"), ("assistant", "It is four."), ("user", "And three?"), ("assistant", "Six, ünder one condition.")]


def make_tokenizer(template: str | None = None, trim_offsets: bool = False, add_bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE that writes <s> before plain text, with the special tokens of the template."""
    special = ["<s>", "</s>", *SPECIAL.get(template or "", "").split()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False))
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if add_bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]))
    bpe.post_processor = processors.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", extra_special_tokens=special[2:])
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": text} for role, text in turns]


def learned(tokenizer, sample: Sample) -> list[str]:
    """The runs of learned tokens, decoded."""
    edges = [0, *(i for i in range(1, len(sample.learn)) if sample.learn[i] != sample.learn[i - 1]), len(sample.learn)]
    runs = [sample.tokens[a:b] for a, b in zip(edges, edges[1:], strict=False) if sample.learn[a]]
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


def samples_of(tokenizer, *conversations: list[dict], **data) -> list[Sample]:
    return tokenise([{"messages": turns} for turns in conversations], tokenizer, Data(train="x", **data), source="x.jsonl")[0]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("template", "runs"),
    [
        (CHATML, ["It is four.<|im_end|>", "Six, ünder one condition.<|im_end|>"]),
        (LLAMA3, ["It is four.<|eot_id|>", "Six, ünder one condition.<|eot_id|>"]),
        (VICUNA, [" It is four.</s>", " Six, ünder one condition.</s>"]),
        (GEMMA, ["It is four.<end_of_turn>", "Six, ünder one condition.<end_of_turn>"]),
        (PHI3, ["It is four.<|end|>", "Six, ünder one condition.<|end|>\n</s>"]),
        (PLAIN, ["It is four.\n", "Six, ünder one condition.\n"]),
    ],
    ids=["chatml", "llama3", "vicuna", "gemma", "phi3", "plain"],
)
def test_the_assistants_turns_and_their_ends_are_learned(template, runs, trim_offsets):
    tokenizer = make_tokenizer(template, trim_offsets)
    (sample,) = samples_of(tokenizer, chat(*TURNS))
    if template == PLAIN:   # "assistant: " ends in a space, which stands in the token of the first word: it begins outside
        runs = [run.partition(" ")[2].join([" ", ""]) for run in runs] if not trim_offsets else [f" {run}" for run in runs]
    assert learned(tokenizer, sample) == runs
    assert sample.tokens.tolist() == tokenizer.apply_chat_template(chat(*TURNS), return_dict=False)   # whole, with one <s> at most
