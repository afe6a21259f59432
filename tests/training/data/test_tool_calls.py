"""Tool calls, nulls and generation blocks: text and labels are of one rendering, and calls are trained on as the model writes them."""

import json
from typing import Any

import pytest
from chat_templates import make_tokenizer
from test_written import ASK, ASKED, ROLES, expect, maker

from headstart.chat.conversation import Chat
from headstart.chat.messages import read_messages

CALLS = """{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' }}{{ c.function.arguments | tojson }}{{ '</call>' }}
{%- endfor %}"""
TOOLS = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') }}" + CALLS + "{{ '<|end|>\n' }}{% endfor %}" + ASK
ROME = {"city": "Rome", "days": [1, 2]}


def conversation(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    call = {"id": "c0", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        *ASKED, {"role": "assistant", "content": None, "tool_calls": [call], **fields},
        {"role": "tool", "content": "sunny", "tool_call_id": "c0"}, {"role": "assistant", "content": "It is sunny."},
    ]  # fmt: skip


@pytest.mark.parametrize(("arguments", "written"), [
    (ROME, json.dumps(ROME)), (json.dumps(ROME), json.dumps(ROME)), (json.dumps(ROME, separators=(",", ":")), json.dumps(ROME)),
    ('  {"city": "Röme"}\n', '{"city": "Röme"}'), ("{}", "{}"), ("", "{}"), ("[1, 2]", '"[1, 2]"'), ('"Rome"', '"\\"Rome\\""'),
    ('{"city": "Ro', '"{\\"city\\": \\"Ro"'),
], ids=["mapping", "text", "compact", "blanks", "empty mapping", "nothing", "array", "string", "broken"])  # fmt: skip
def test_arguments_that_are_json_text_of_a_mapping_are_the_mapping(arguments: Any, written: str) -> None:
    chat, messages = maker(TOOLS, ROLES, "<|end|>"), conversation(arguments)
    turns = chat.turns(messages)
    assert [chat.text(turn.answer) for turn in turns] == [f"<call>weather {written}</call><|end|>", "It is sunny.<|end|>"]
    assert len(chat.samples(messages)) == 1, "the second prompt holds the first call as it was written"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == arguments, "the row itself is left as it is"


def test_calls_of_other_forms_and_beside_text() -> None:
    template = TOOLS.replace("c.function.", "c.")
    call = {"name": "weather", "arguments": json.dumps(ROME)}
    chat = maker(template, ROLES, "<|end|>")
    messages = [*ASKED, {"role": "assistant", "content": "I look. ", "tool_calls": [call, call]}]
    assert chat.text(chat.answer(messages)) == "I look. " + 2 * f"<call>weather {json.dumps(ROME)}</call>" + "<|end|>"
    legacy = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or m.function_call.arguments.city) + '<|end|>\n' }}{% endfor %}"
    old = [*ASKED, {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}}]
    assert (chat := maker(legacy + ASK, ROLES, "<|end|>")).text(chat.answer(old)) == "Rome<|end|>"


@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_a_call_whose_template_leaves_content_out(opened: str) -> None:
    """Also where the generation prompt opens a thought that the history lacks."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}"
        "{{ m.content }}{% endif %}{{ '<|end|>\n' }}{% endfor %}" + ASK.replace("<|assistant|>\n", f"<|assistant|>\n{opened}")
    )
    chat = maker(template, ROLES, "<|end|>")
    call = '{"name": "weather", "arguments": {"city": "Rome", "days": [1, 2]}}'
    expect(chat, conversation(ROME), f"{call}<|end|>", "It is sunny.<|end|>")


BLOCKS = "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}" + CALLS + """
{{- '<|end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}{{ '<|end|>\n' }}{% endif %}{% endfor %}""" + ASK  # fmt: skip


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("role", ["assistant", "tool", "system"])
def test_generation_blocks_and_nulls(role: str, place: int) -> None:
    """Labels are those of transformers' own mask, wherever a message has null content, which transformers 5.20 writes as "None"."""
    tokenizer = make_tokenizer(BLOCKS, special=ROLES)
    messages = conversation(ROME, content="I look.")
    null = {"role": role, "content": None} | ({"tool_calls": messages[1]["tool_calls"]} if role == "assistant" else {})
    messages.insert(max(place, 1), null)
    (sample,) = Chat(tokenizer).samples(messages)
    end = max(i for i, one in enumerate(messages) if one["role"] == "assistant") + 1
    if "None" in tokenizer.apply_chat_template([{"role": "user", "content": None}], tokenize=False):
        messages = [message | {"content": message["content"] or ""} for message in messages]
    right = tokenizer.apply_chat_template(messages[:end], return_dict=True, return_assistant_tokens_mask=True)
    length = len(sample[0])
    assert sample[0] == right["input_ids"][:length]
    assert [int(label) for label in sample[1]] == right["assistant_masks"][:length] and not any(right["assistant_masks"][length:])


def block(inside: str, before: str = "", after: str = "") -> str:
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + before + "{% generation %}" + inside + "{% endgeneration %}" + after
        + "{% else %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}" + ASK
    )  # fmt: skip


HEADER, BODY, END = "{{ '<|assistant|>\n' }}", "{{ m.content }}", "{{ '<|end|>' }}"


@pytest.mark.parametrize(("template", "labels"), [
    (block(BODY + END, HEADER), ["It is sunny.", "<|end|>"]),
    (block(HEADER + BODY + END), ["It is sunny.", "<|end|>"]),
    (block(HEADER + BODY, "", END + "{{ '\n' }}"), ["It is sunny."]),
    (block("{{ m.content[:5] }}", HEADER, "{{ m.content[5:] }}" + END), ["It is"]),
    (block(END, HEADER + BODY), ["<|end|>"]),
], ids=["answer and end", "header too", "header and answer", "half of the answer", "end alone"])  # fmt: skip
def test_blocks_that_cover_more_or_less_than_the_answer(template: str, labels: list[str]) -> None:
    """What the model does not write is no label, marked or not; of what it writes, the blocks decide."""
    chat = maker(template, ROLES, "<|end|>")
    messages = [*ASKED, {"role": "assistant", "content": "It is sunny."}]
    (turn,) = chat.turns(messages)
    assert chat.text(turn.answer) == "It is sunny.<|end|>" and turn.prompt == chat.prompt(ASKED)
    assert chat.text([token for token, label in zip(turn.answer, turn.labels, strict=True) if label]) == "".join(labels)


def test_parts_of_text_are_joined_also_in_a_tools_result() -> None:
    parts = [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}]
    (system, tool, other) = read_messages(
        [{"role": "system", "content": parts}, {"role": "tool", "content": parts}, {"role": "tool", "content": {"sky": parts}}], "x"
    )
    assert system["content"] == tool["content"] == "sunny" and other["content"] == {"sky": parts}


def test_default_tools_and_named_templates() -> None:
    tokenizer = make_tokenizer(special=ROLES)
    tokenizer.chat_template = {"default": "plain" + ASK, "tool_use": "{{ tools | length }} tools" + ASK}
    chat = Chat(tokenizer)
    decoded = [tokenizer.decode(chat.prompt(ASKED, tools)) for tools in (None, [{"name": "a"}, {"name": "b"}])]
    assert decoded == ["plain<|assistant|>\n", "2 tools<|assistant|>\n"]
    default = chat.with_variables(tools=[{"name": "a"}])
    assert tokenizer.decode(default.prompt(ASKED)).startswith("1 tools") and tokenizer.decode(default.prompt(ASKED, [])).startswith("plain")
