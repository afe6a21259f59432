"""What is trained on is the prompt of decoding and then the tokens written, for the shapes of published templates in every situation."""

from dataclasses import replace
from typing import Any

import pytest
from errors import refuses
from published import ASKED, CALLS, SITUATIONS, Shape, refused, shapes, tally, tools_of, trained, wrong

from headstart.chat.conversation import Chat
from headstart.chat.messages import read_messages
from headstart.chat.template import ChatSettings, TemplateRefusal
from headstart.training.data.kept import compare
from headstart.training.data.samples import Column
from headstart.training.recipe.recipe import Data


@pytest.mark.parametrize("shape", shapes().values(), ids=shapes())
def test_what_is_trained_on_is_what_decoding_writes(shape: Shape) -> None:
    """Each turn is transformers' own prompt, without a label, and then exactly what the model writes, with its first end last."""
    assert {situation: found for situation in SITUATIONS if (found := wrong(shape, situation))} == {}


@pytest.mark.parametrize("shape", shapes().values(), ids=shapes())
def test_what_a_template_refuses_is_refused_in_one_line(shape: Shape) -> None:
    assert "plain" not in refused(shape)
    for situation in shape.refuses:
        refuses("1 rows refused by the chat template", trained, shape, situation)


@pytest.mark.parametrize("shape", shapes().values(), ids=shapes())
def test_the_check_before_training_finds_nothing_amiss(shape: Shape) -> None:
    """As `inspect` and the start of `train` say it."""
    conversations = [shape.conversation(situation) for situation in SITUATIONS if situation not in refused(shape)]
    rows = [{"messages": messages, "tools": tools_of(messages)} for messages in conversations]
    chat = Chat(shape.tokenizer, ChatSettings(variables=dict(shape.variables), ends=shape.end_ids))
    check = compare(rows, "x", Column("messages", "chat", Data(train="x")), chat, exact=False)
    assert (check.same, check.warning) == (check.answers, ""), check.first
    assert check.answers == tally(shape.name)[1]


def test_a_wrong_expectation_is_found() -> None:
    """The comparison itself: another end, a blank more, or a label in the prompt would be seen."""
    shape = shapes()["qwen3"]
    for changes in ({"answer": "{}"}, {"answer": " {}<|im_end|>"}, {"bare": ""}, {"answer": "{}<|im_end|>\n"}):
        assert wrong(replace(shape, **changes), "plain")


IN_PYTHON = ("gemma-4", "olmo-3", "lfm2")
"""Templates that write arguments with quotes around text alone, which a mark cannot tell: their calls stay text."""


@pytest.mark.parametrize("shape", shapes().values(), ids=shapes())
def test_an_answer_is_read_back_as_a_message_with_its_calls_and_thoughts(shape: Shape) -> None:
    """The reading of in-process `regenerate`: what it keeps has the tokens that were written."""
    chat = Chat(shape.tokenizer, ChatSettings(variables=dict(shape.variables), ends=shape.end_ids))
    for situation in {"system", "reasoning", "thought and call", "two", "line breaks", "nothing said"} - refused(shape):
        messages = read_messages(shape.conversation(situation), situation)
        tools = tools_of(messages)
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            answer = chat.answer(messages[: i + 1], tools)
            found = chat.message(messages[:i], answer, tools)
            calls = [one["function"] for one in found.get("tool_calls", [])]
            if shape.name in IN_PYTHON and message.get("tool_calls"):
                assert not calls and found["content"] and chat.text(answer[:-1]).endswith(found["content"])
                continue
            assert chat.answer([*messages[:i], found], tools) == answer
            assert [(one["name"], one["arguments"]) for one in calls] == [
                (one["function"]["name"], CALLS[one["function"]["name"]]) for one in message.get("tool_calls") or []
            ]  # fmt: skip
            if message.get("reasoning_content") and shape.thought:
                assert found["reasoning_content"] == message["reasoning_content"]


def test_a_template_that_ends_an_answer_before_its_calls_is_refused() -> None:
    """Nemotron Nano 2 writes text and calls of a last message as two answers; the calls would be lost."""
    shape = shapes()["nemotron-nano-2"]
    (_, message, *_) = shape.conversation("tools")
    chat = Chat(shape.tokenizer, ChatSettings(ends=shape.end_ids))
    with pytest.raises(TemplateRefusal, match="it ends the answer before its calls"):
        chat.turns([ASKED, message | {"content": "I look."}])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml(name: str, **arguments: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(("shape", "text", "content", "calls"), [
    ("qwen2.5", "\n".join([call("add", '{"a": 2}')] * 3), "", [("add", {"a": 2})] * 3),
    ("qwen2.5", call("add", "{}"), "", [("add", {})]),
    ("qwen2.5", f"I look.\n{call('add', '{}')}", "I look.", [("add", {})]),
    ("qwen2.5", call("say", '{"b": "</tool_call>\\n<tool_call>"}'), "", [("say", {"b": "</tool_call>\n<tool_call>"})]),
    ("qwen2.5", call("add", '{"a":2}'), None, []),
    ("qwen2.5", call("add", '{"a": 2'), None, []),
    ("qwen2.5", call("add", "[2]"), None, []),
    ("qwen2.5", call("no name", "{}"), None, []),
    ("qwen2.5", call("add", "{}") + "\nSo I said.", None, []),
    ("qwen2.5", call("add", "{}")[:-1], None, []),
    ("qwen3-coder", xml("say", b="x\ny", c="[1, 2]"), "", [("say", {"b": "x\ny", "c": [1, 2]})]),
    ("qwen3-coder", xml("say", b="true"), "", [("say", {"b": "true"})]),
    ("qwen3-coder", xml("add", a="2"), "", [("add", {"a": "2"})]),
    (
        "qwen3-coder", xml("add", a="2", b="3") + "\n" + xml("say", b="</parameter>"), "",
        [("add", {"a": "2", "b": 3}), ("say", {"b": "</parameter>"})],
    ),
    ("qwen3-coder", xml("add"), None, []),
    ("qwen3-coder", xml("add", a="2").replace("=a", "= a"), None, []),
    ("qwen3-coder", f"I look.\n\n{xml('say', b='x')}", "I look.", [("say", {"b": "x"})]),
])  # fmt: skip
def test_calls_are_read_where_the_template_writes_them_back(shape: str, text: str, content: str | None, calls: list[Any]) -> None:
    """A value is what it looks like unless the tool says that it is text; what would not be written back stays content."""
    of = shapes()[shape]
    chat = Chat(of.tokenizer, ChatSettings(ends=of.end_ids))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "string"}}}}}]
    answer = [*chat.continued([text])[0], of.end_ids[0]]
    found = chat.message([ASKED], answer, tools)
    said = [(one["function"]["name"], one["function"]["arguments"]) for one in found.get("tool_calls", [])]
    assert (found["content"], said) == (text if content is None else content, calls)
    assert chat.answer([ASKED, found], tools) == answer
