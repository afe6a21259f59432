"""The shapes of published chat templates (published/*.yaml), every situation of a conversation, and what is trained on in each."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from chat_templates import make_samples, make_tokenizer
from transformers import PreTrainedTokenizerFast

from headstart.chat.messages import read_messages
from headstart.training.recipe.recipe import Data

FOLDER = Path(__file__).parent / "published"
Message = dict[str, Any]
CALLS = {"add": {"a": 2}, "say": {"b": "x y"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object", "properties": {}}}}
    for name in CALLS
]
ASKED: Message = {"role": "user", "content": "Two and two?"}
AGAIN: Message = {"role": "user", "content": "And three?"}
FOUR: Message = {"role": "assistant", "content": "Four."}


@dataclass(frozen=True)
class Shape:
    name: str
    special: str
    ends: str
    template: Any
    answer: str
    thought: str = ""
    bare: str = ""
    later: str = ""
    """What is written for a thought after a tool's result, if it is another form."""
    inline: str = ""
    """As what a thought in the content is written: as ``content``, or as a ``thought`` (default: as one if the prompt opens it)."""
    nothing: str = ""
    """What is written for an answer without content, if it is another form."""
    call: str = ""
    two: str = ""
    refuses: tuple[str, ...] = ()
    ids: str = "call0000{number}"
    arguments: str = "mapping"
    """As what the template takes a call's arguments: a mapping, or JSON text."""
    variables: tuple[tuple[str, Any], ...] = ()

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return make_tokenizer(self.template, special=self.special)

    @property
    def end_ids(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.convert_tokens_to_ids(self.ends.split()))

    def conversation(self, situation: str) -> list[Message]:
        """The situation's messages, with calls and results of tools that have the family's ids."""
        return [self._message(message, situation) for message in SITUATIONS[situation]]

    def _message(self, message: Message, situation: str) -> Message:
        if message["role"] == "tool":
            names = list(CALLS)
            return message | {"tool_call_id": self.ids.format(name=message["name"], number=names.index(message["name"]))}
        if "calls" not in message:
            return message
        calls = []
        for number, name in enumerate(message["calls"]):
            function = {"name": name, "arguments": json.dumps(CALLS[name]) if situation == "text arguments" else CALLS[name]}
            calls.append({"id": self.ids.format(name=name, number=number), "type": "function", "function": function})
        return {key: value for key, value in message.items() if key != "calls"} | {"tool_calls": calls}

    def written(self, message: Message, previous: Message) -> str:
        thought = message.get("reasoning_content", "")
        form = self.later or self.thought if previous["role"] == "tool" else self.thought
        before = form.replace("{}", thought) if thought and form else self.bare
        content = message["content"]
        if isinstance(content, str) and content.startswith("<think>"):
            if self.inline == "thought" or not self.inline and self.thought.startswith("{}"):
                return self.thought.replace("{}", "I add.") + self.answer.replace("{}", content.split("\n\n")[-1])
            return self.answer.replace("{}", content)
        content = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
        if calls := message.get("tool_calls"):
            return before + (self.call if len(calls) == 1 else self.two).replace("{thought}", thought)
        return before + (self.nothing if not content and self.nothing else self.answer.replace("{}", content))


def said(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def result(name: str) -> Message:
    return {"role": "tool", "name": name, "content": "4"}


SITUATIONS: dict[str, list[Message]] = {
    "plain": [ASKED, FOUR],
    "system": [{"role": "system", "content": "Be brief."}, ASKED, FOUR],
    "turns": [ASKED, FOUR, AGAIN, said("Six.\n\nAnd so on."), ASKED, said("Four, as I said.")],
    "two questions": [ASKED, AGAIN, FOUR],
    "thought in the content": [ASKED, said("<think>\nI add.\n</think>\n\nFour."), AGAIN, said("<think>\nI add.\n</think>\n\nSix.")],
    "reasoning": [ASKED, said("Four.", reasoning_content="I add."), AGAIN, said("Six.", reasoning_content="Once more.")],
    "thought and call": [
        ASKED,
        said(None, reasoning_content="I add.", calls=["add"]),
        result("add"),
        said("Four.", reasoning_content="Done."),
    ],
    "tools": [ASKED, said(None, calls=["add"]), result("add"), FOUR],
    "two": [ASKED, said("", calls=["add", "say"]), result("add"), result("say"), FOUR, AGAIN, said("Six.")],
    "text arguments": [ASKED, said(None, calls=["add"]), result("add"), FOUR],
    "null": [ASKED, FOUR | {"tool_calls": None, "reasoning_content": None, "name": None}],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "Two "}, {"type": "text", "text": "and two?"}]},
        said([{"type": "text", "text": "Fo"}, {"type": "text", "text": "ur."}]),
    ],
    "nothing said": [ASKED, said("")],
    "blank": [ASKED, said(" Four.")],
    "line breaks": [ASKED, said("\n\nFour."), AGAIN, said("\nSix.")],
    "blanks after": [ASKED, said("Four. \n")],
}
"""Name -> messages; ``calls`` stands for the calls of an assistant's message."""


@functools.cache
def shapes() -> dict[str, Shape]:
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        for name, fields in yaml.safe_load(path.read_text()).items():
            fields = fields | {"refuses": tuple(fields.get("refuses", ())), "variables": tuple(fields.get("variables", {}).items())}
            found[name] = Shape(name, **fields)
    return found


def trained(shape: Shape, situation: str) -> list[tuple[list[int], list[bool]]]:
    """The samples that training makes. Raises UserError where the template refuses."""
    messages = shape.conversation(situation)
    row = {"messages": messages, "tools": tools_of(messages)}
    data = Data(train="x", template_kwargs=dict(shape.variables))
    samples, _ = make_samples([row], shape.tokenizer, data, source="x", ends=shape.end_ids)
    return [(sample.tokens.tolist(), sample.loss_mask.tolist()) for sample in samples]


def decoded(shape: Shape, situation: str) -> list[tuple[list[int], list[int]]]:
    """The prompts of decoding, by transformers, and what the model writes after each."""
    messages, tokenizer, pairs = read_messages(shape.conversation(situation), situation), shape.tokenizer, []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i:
            plain = [_plain(one, shape.arguments == "text") for one in messages[:i]]
            asked = tokenizer.apply_chat_template(
                plain, tools=tools_of(messages), add_generation_prompt=True, return_dict=False, **dict(shape.variables)
            )  # fmt: skip
            pairs.append((asked, tokenizer(shape.written(message, messages[i - 1]), add_special_tokens=False)["input_ids"]))
    return pairs


def _plain(message: Message, text: bool) -> Message:
    """The message as a server of the model passes it to the template."""
    calls = []
    for call in message.get("tool_calls") or []:
        arguments = json.dumps(CALLS[call["function"]["name"]]) if text else CALLS[call["function"]["name"]]
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return {key: value for key, value in message.items() if value is not None} | ({"tool_calls": calls} if calls else {})


def tools_of(messages: list[Message]) -> list[dict[str, Any]] | None:
    return TOOLS if any(message.get("tool_calls") or message["role"] == "tool" for message in messages) else None


def refused(shape: Shape) -> set[str]:
    """The situations that are not compared: refused, or with calls where the template writes none."""
    without = set() if shape.call else {name for name, messages in SITUATIONS.items() if any("calls" in one for one in messages)}
    return without | set(shape.refuses)


def wrong(shape: Shape, situation: str) -> list[str]:
    """The answers of a situation that are not trained on as they are written."""
    if situation in refused(shape):
        return []
    made, found = trained(shape, situation), []
    for asked, written in decoded(shape, situation):
        end = len(asked) + len(written)
        if not any(_holds(tokens[:end], labels, asked, written) for tokens, labels in made):
            found.append(shape.tokenizer.decode(written))
    return found


@functools.cache
def tally(name: str) -> tuple[int, int]:
    """How many answers of a shape are trained on as they are written, and how many there are."""
    shape = shapes()[name]
    counts = [sum(one["role"] == "assistant" for one in SITUATIONS[situation]) for situation in SITUATIONS.keys() - refused(shape)]
    return sum(counts) - sum(len(wrong(shape, situation)) for situation in SITUATIONS), sum(counts)


def _holds(tokens: list[int], labels: list[bool], asked: list[int], written: list[int]) -> bool:
    first, end = len(asked), len(asked) + len(written)
    around = [*labels[first - 1 : first], *labels[end : end + 1]]
    return tokens == [*asked, *written] and all(labels[first:end]) and not any(around)


NONE = ("gpt2", "pythia-1b", "Phi-2", "StarCoder2", "OPT", "Falcon-7B")
"""Models without a chat template."""
UNTRIED = ("glm-4.7-flash", "granite-4.1-3b", "kimi-k2.5", "mistral-small-3.2-24b-instruct-2506", "qwen3-vl-8b-instruct")
"""Models whose template has no shape here."""
TEMPLATES: dict[str, tuple[str, ...]] = {
    "qwen2.5": ("qwen2.5",), "qwen3": ("qwen3",), "qwen3.5": ("qwen3.5",), "qwen3.6": ("qwen3.5",), "qwen3-coder": ("qwen3-coder",),
    "qwen3-next": ("qwen2.5",), "qwen3-235b": ("qwen2.5",), "qwen3-30b-a3b-instruct": ("qwen2.5",), "qwen3-4b-instruct": ("qwen2.5",),
    "qwen3-4b-thinking": ("qwen3 opened",), "deepseek-v3": ("deepseek-v3.1",), "gemma-4": ("gemma-4",), "ministral-3": ("ministral-3",),
    "deepseek-r1-distill": ("deepseek-r1",), "gpt-oss": ("gpt-oss",), "llama-2": ("llama-2",), "vicuna": ("vicuna",),
    "llama-3.1": ("llama-3.1",), "llama-3.2": ("llama-3.2",), "llama-3.3": ("llama-3.1",), "gemma-2": ("gemma-2",),
    "gemma-3": ("gemma-3",), "mistral-7b": ("mistral-7b-v0.3",), "mixtral": ("mistral-7b-v0.3",), "mistral-small": ("mistral-small-3",),
    "phi-4": ("phi-4",), "granite-3": ("granite-3.3",), "Granite-3": ("granite-3.3",), "smollm2": ("smollm2",), "smollm3": ("smollm3",),
    "olmo-2": ("olmo-2",), "olmo-3": ("olmo-3",), "OLMo-": ("olmo-3",), "falcon3": ("falcon-3",),
    "GLM-4 ": ("glm-4",), "glm-4.5": ("glm-4.5",), "Command-R7B": ("command-r7b",), "Command-R": ("command-r",),
    "EXAONE-4": ("exaone-4",), "ERNIE-4.5": ("ernie-4.5",), "minimax-m2": ("minimax-m2",), "lfm2": ("lfm2",),
}  # fmt: skip
"""Beginning of a model's name in docs/families.md -> the shapes of its template; the longest beginning counts."""


def templates_of(model: str) -> tuple[str, ...]:
    """The shapes of a model's chat template; none where it has none, or none here."""
    return () if model in NONE + UNTRIED else TEMPLATES[max((start for start in TEMPLATES if model.startswith(start)), key=len)]
