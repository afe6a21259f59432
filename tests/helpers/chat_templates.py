"""Chat templates in common styles, and tiny tokenizers that use them."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headstart.support.json_text import Row
from headstart.training.data import tokenise
from headstart.training.data.samples import Sample, Stats, find_column
from headstart.training.recipe.recipe import Data

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
    CHATML: "<|im_start|> <|im_end|>",
    QWEN3: "<|im_start|> <|im_end|>",
    OPENING: "<|im_start|> <|im_end|>",
    LLAMA3: "<|start_header_id|> <|end_header_id|> <|eot_id|>",
    GEMMA: "<start_of_turn> <end_of_turn>",
    PHI3: "<|user|> <|assistant|> <|end|>",
    VICUNA: "",
    PLAIN: "",
}
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
