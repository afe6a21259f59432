"""How an answer ends: with the first token at which decoding stops, as a template's rendering has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from headstart.support.chat.messages import ASSISTANT, Message
from headstart.support.chat.template import PROBE, Template, TemplateRefusal
from headstart.support.chat.written import MARK

NEXT = "headstartnext"


@dataclass(frozen=True)
class Ending:
    ends: frozenset[int]
    """Tokens at which decoding stops."""
    closing: tuple[int, ...]
    """Tokens that follow an answer whose rendering has no end, the last one an end; empty where there is none to be found."""
    called: tuple[int, ...]
    """The same after calls of tools: the marker of their results; empty where that is no end."""
    after: str
    """What the template writes after the last answer of a conversation."""
    special: frozenset[int]
    warning: str
    """What is amiss between the model's end-of-sequence tokens and the template; empty if nothing is."""

    def length(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens up to and with the first end; None without one."""
        end = _first(tokens, self.ends)
        return None if end is None else end + 1

    def closed(self, tokens: Sequence[int], blank: Callable[[list[int]], bool]) -> int | None:
        """Return the number of tokens up to and with a special token that nothing but blanks follows; None without one."""
        last = next((i for i in range(len(tokens), 0, -1) if tokens[i - 1] in self.special), None)
        return last if last is not None and blank(list(tokens[last:])) else None


def find_ending(template: Template, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], encode: Callable[[str], list[int]]) -> Ending:
    """See what the template writes after an answer. ``ends``: the model's end-of-sequence tokens; ``encode``: tokens of text after text.

    An end may be the marker of the next role (GLM-4). Where no end follows an answer, a special token that closes it is what the model
    writes last of it: a label, but no end, as decoding by the model's own configuration runs on past it. It is one only without ``ends``.
    """
    own = frozenset(ends) or frozenset({tokenizer.eos_token_id} - {None})
    asked = [PROBE[0], {"role": ASSISTANT, "content": MARK}]
    after, following = (_after(template, [*asked, *more]) for more in ([], [PROBE[0] | {"content": NEXT}]))
    tokens, ahead, result = (encode(text) for text in (after, following, _result(template)))
    called = tuple(result[: end + 1]) if (end := _first(result, own)) is not None else ()
    added = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
    special = frozenset(added | set(tokenizer.all_special_ids))
    end = _first(tokens, own if ends else own | special)
    if end is not None and tokens[end] in own:
        return Ending(own, tuple(tokens[: end + 1]), called, after, special, "")
    names = ", ".join(f"{token} {tokenizer.decode([token])!r}" for token in sorted(own)) or "none"
    if (end := _first(tokens, special)) is not None:
        return Ending(own if ends else own | {tokens[end]}, tuple(tokens[: end + 1]), called, after, special, (
            f"the chat template closes an answer with token {tokens[end]} {tokenizer.decode([tokens[end]])!r}, at which decoding does not "
            f"stop: the model's end-of-sequence tokens are {names}; set eos_token_id in its generation_config.json"
        ))  # fmt: skip
    end = _first(ahead, own | special)
    if end is not None and ahead[end] in own:
        return Ending(own, tuple(ahead[: end + 1]), called, after, special, "")
    warning = f"the chat template writes no end-of-sequence token of the model ({names}) after an answer, so heads do not learn to end one"
    return Ending(own, (), called, after, special, warning if after or following else "")


def _first(tokens: Sequence[int], those: Set[int]) -> int | None:
    return next((i for i, token in enumerate(tokens) if token in those), None)


def _result(template: Template) -> str:
    """Return what the template writes between a call and its result; empty if it refuses."""
    result = {"role": "tool", "name": "a", "tool_call_id": "call00000", "content": NEXT}
    try:
        texts = [template.render([*PROBE, *more]).text for more in ([], [result])]
    except TemplateRefusal:
        return ""
    return texts[1][len(texts[0]) :].partition(NEXT)[0] if texts[1].startswith(texts[0]) and NEXT in texts[1] else ""


def _after(template: Template, messages: list[Message]) -> str:
    """Return what the template writes after the answer, up to the next question; empty if it refuses."""
    try:
        text = template.render(messages).text
    except TemplateRefusal:
        return ""
    return text[text.rfind(MARK) + len(MARK) :].partition(NEXT)[0] if MARK in text else ""
