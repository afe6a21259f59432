"""Chat templates in common styles, tiny tokenizers that use them, and a chat model on disk with a recipe for its conversations."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from families import build, random_drafter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headstart import Backbone, SpeculativeModel
from headstart.chat.prompts import Prompter
from headstart.support.json_text import Row
from headstart.training.data import tokenise
from headstart.training.data.samples import Sample, Stats, find_column
from headstart.training.recipe.recipe import Data
from headstart.training.recipe.yaml_text import dump_yaml

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
QWEN3 = """{% set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- text + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Writes thoughts only in turns after the last user message."""
PHI3 = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
"""Writes one more special token at the very end."""
PLAIN = """{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
"""Ends turns without a special token."""
OPENING = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
"""Opens every generated answer with a thought, although past answers need not contain one."""

SPECIAL = {
    CHATML: "<|im_start|> <|im_end|>", QWEN3: "<|im_start|> <|im_end|>", OPENING: "<|im_start|> <|im_end|>",
    LLAMA3: "<|start_header_id|> <|end_header_id|> <|eot_id|>", GEMMA: "<start_of_turn> <end_of_turn>",
    PHI3: "<|user|> <|assistant|> <|end|>", VICUNA: "", PLAIN: "",
}  # fmt: skip
CORPUS = 3 * [
    "What is two and two? It is four.",
    "And three? Six, I think.",
    "USER: Hi ASSISTANT: Hello there",
    "user assistant model system",
]
TURNS = [("user", "What is two?"), ("assistant", "It is four."), ("user", "And three?"), ("assistant", "Six, ünder one condition.")]


def make_tokenizer(
    template: str | None = None, trim_offsets: bool = False, add_bos: bool = True, special: str | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that writes <s> before plain text, with the template's special tokens, or those named in ``special``."""
    named = ["<s>", "</s>", *(SPECIAL.get(template or "", "") if special is None else special).split()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=named, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(CORPUS, trainer)
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if add_bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]))
    bpe.post_processor = processors.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", extra_special_tokens=named[2:])
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": text} for role, text in turns]


# The samples of rows, as a recipe's data makes them.


def make_samples(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, data: Data, *, source: str, ends: Sequence[int] = ()
) -> tuple[list[Sample], Stats]:
    """See `tokenise.make_samples`."""
    read = tokenise.reader_of(find_column(rows, data, source), tokenizer, ends)
    return tokenise.make_samples(rows, read, data, source=source)


# A chat model on disk.

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "max_position_embeddings": 256}
MANY_ENDS = list(range(100, 140))
"""Tokens that end an answer too, so that a random model ends one after about ten tokens."""


def make_chat_model(
    folder: Path, template: str | None = CHATML, special: str = SPECIAL[CHATML], ends: list[int] | None = None, **sizes: int
) -> Path:
    """Write a random model whose decoding stops at ``<|im_end|>`` (or ``ends``), with a tokenizer of this template."""
    tokenizer = make_tokenizer(special=special)
    tokenizer.chat_template = template
    model = build("Llama", SIZES | {"vocab_size": len(tokenizer)} | sizes)
    stops = [tokenizer.convert_tokens_to_ids(special.split()[-1]), *MANY_ENDS] if ends is None else ends
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversations(count: int = 8) -> list[dict[str, Any]]:
    """Rows of one question and answer, or two."""
    turns = [{"role": "user", "content": "What is two?"}, {"role": "assistant", "content": "It is four."}]
    return [{"messages": [{"role": "user", "content": f"Hi {i}"}, turns[1], *turns * (i % 2)]} for i in range(count)]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def make_chat_recipe(folder: Path, model: Path, rows: list[dict[str, Any]] | None = None, **data: Any) -> Path:
    """Write rows and ``recipe.yaml`` into ``folder``; the run goes to ``folder/out``, answers to ``folder/answers.jsonl``."""
    train = str(write_rows(folder / "rows.jsonl", conversations() if rows is None else rows))
    recipe = {
        "backbone": {"path": str(model), "dtype": "fp32"},
        "drafter": {"kind": "medusa", "depth": 2},
        "data": {"train": train, "eval_rows": 0, "max_length": 128, **data},
        "train": {"steps": 2, "batch_size": 4, "lr": 1e-3},
        "eval": {"every": 0},
        "save": {"dir": str(folder / "out")},
        "regenerate": {"out": str(folder / "answers.jsonl"), "max_new_tokens": 40, "temperature": 1},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    return folder / "recipe.yaml"


# A tiny backbone with random heads, a chat template and a context of 96.


@functools.cache
def talker() -> tuple[SpeculativeModel, Prompter]:
    """The session's shared heads and prompter; tests must not modify them."""
    tokenizer = make_tokenizer(CHATML)
    on = Backbone(build("Llama", SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 96}))
    return SpeculativeModel(on, random_drafter("medusa", on, depth=3)), Prompter(tokenizer)
