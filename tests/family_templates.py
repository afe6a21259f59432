"""Chat templates shaped like those of published families, written anew and as short as the shape allows.

Each follows its family in the tokens that open and close turns, in where a thought, a tool call and a tool's result stand, and in
what it rewrites of earlier turns.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A template, its special tokens, and what is learned of the two conversations of test_family_templates.py."""

    template: str
    special: str
    plain: tuple[str, ...]
    """Label tokens of two questions with answers."""
    tools: tuple[tuple[str, ...], ...] = ()
    """Label tokens of each sample of a conversation with a thought, a tool call, its result and an answer; none without tools."""


LLAMA_31 = Shape(
    """{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% set c = m.tool_calls[0].function %}
{{- {'name': c.name, 'parameters': c.arguments} | tojson }}{{ '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
{{- m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "<|start_header_id|> <|end_header_id|> <|eot_id|>",
    ("It is four.<|eot_id|>", "Six.<|eot_id|>"),
    (('{"name": "add", "parameters": {"a": 2}}<|eot_id|>', "Four.<|eot_id|>"),),
)
MISTRAL = Shape(
    """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content + '}[/TOOL_RESULTS]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}""",
    "[INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
    (" It is four.</s>", " Six.</s>"),
    (('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}]</s>', " Four.</s>"),),
)
QWEN_CALLS = """{% if m.tool_calls %}{% for c in m.tool_calls %}{{ '\n<tool_call>\n' }}{{ c.function | tojson }}{{ '\n</tool_call>' }}
{%- endfor %}{% endif %}"""
QWEN_25 = Shape(
    """{% for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}""" + QWEN_CALLS + """{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "<|im_start|> <|im_end|>",
    ("It is four.<|im_end|>", "Six.<|im_end|>"),
    (('\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>', "Four.<|im_end|>"),),
)
QWEN_3 = Shape(
    """{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.index0 > ns.last %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content or '' }}""" + QWEN_CALLS + """{% endif %}
{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "<|im_start|> <|im_end|>",
    ("<think>\n\n</think>\n\nIt is four.<|im_end|>", "<think>\n\n</think>\n\nSix.<|im_end|>"),
    ((
        '<think>\nI add.\n</think>\n\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>',
        "<think>\nDone.\n</think>\n\nFour.<|im_end|>",
    ),),
)
"""Writes thoughts after the last question alone."""
DEEPSEEK_R1 = Shape(
    """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}""",
    "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>",
    ("It is four.<｜end▁of▁sentence｜>", "Six.<｜end▁of▁sentence｜>"),
)
"""Removes thoughts from all answers, also from the last."""
HARMONY = Shape(
    """{% for m in messages %}{% set last = loop.last %}{% if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}{{ '<|start|>functions.add to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- elif m.tool_calls %}{% set c = m.tool_calls[0].function %}
{%- if m.reasoning_content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>commentary to=functions.' + c.name + ' <|constrain|>json<|message|>' }}
{{- c.arguments | tojson }}{{ '<|call|>' }}
{%- else %}{% if last and m.reasoning_content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if last else '<|end|>') }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
    "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|> <|return|>",
    ("<|channel|>final<|message|>It is four.<|return|>", "<|channel|>final<|message|>Six.<|return|>"),
    ((
        '<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>'
        '{"a": 2}<|call|>',
        "<|channel|>analysis<|message|>Done.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
    ),),
)
"""gpt-oss: thoughts and calls on channels; the last answer ends in another token than earlier ones."""
PHI_4 = Shape(
    """{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
    "<|im_start|> <|im_sep|> <|im_end|>",
    ("It is four.<|im_end|>", "Six.<|im_end|>"),
)
GRANITE = Shape(
    """{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' }}
{%- if m.tool_calls %}{{ '<|tool_call|>' }}{{ m.tool_calls | map(attribute='function') | list | tojson }}
{%- else %}{{ m.content }}{% endif %}{{ '<|end_of_text|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}""",
    "<|start_of_role|> <|end_of_role|> <|end_of_text|> <|tool_call|>",
    ("It is four.<|end_of_text|>", "Six.<|end_of_text|>"),
    (('<|tool_call|>[{"name": "add", "arguments": {"a": 2}}]<|end_of_text|>', "Four.<|end_of_text|>"),),
)
SMOLLM3 = Shape(
    """{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}
{{- (m.content or '') }}""" + QWEN_CALLS + """{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "<|im_start|> <|im_end|>",
    ("It is four.<|im_end|>", "Six.<|im_end|>"),
    (('\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>', "Four.<|im_end|>"),),
)
"""Marks what the model writes by generation blocks."""
OLMO_2 = Shape(
    """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + eos_token }}
{%- if not loop.last %}{{ '\n' }}{% endif %}{% else %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}""",
    "",
    ("It is four.</s>", "Six.</s>"),
)
"""Writes a line break after an answer unless it is the last."""
SHAPES: dict[str, Shape] = {
    "llama-3.1": LLAMA_31, "mistral": MISTRAL, "qwen2.5": QWEN_25, "qwen3": QWEN_3, "deepseek-r1": DEEPSEEK_R1, "gpt-oss": HARMONY,
    "phi-4": PHI_4, "granite-3": GRANITE, "smollm3": SMOLLM3, "olmo-2, falcon3": OLMO_2,
}  # fmt: skip
