"""How an answer ends: with the first token at which decoding stops, as a template's rendering has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from headstart.support.chat.messages import ASSISTANT
from headstart.support.chat.template import Template, TemplateRefusal
from headstart.support.chat.written import MARK

QUESTION, NEXT = "headstartquestion", "headstartnext"


@dataclass(frozen=True)
class Ending:
    ends: frozenset[int]
    """Tokens that end an answer."""
    closing: tuple[int, ...]
    """Tokens that follow an answer whose rendering has none of them, the last one an end; empty where there is none to be found."""
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

    An end may be the marker of the next role (GLM-4). Where no end follows an answer, the special token right after it counts as one:
    the model was taught to write it, though decoding by its own configuration runs on past it.
    """
    own = frozenset(ends) or frozenset({tokenizer.eos_token_id} - {None})
    question = {"role": "user", "content": QUESTION}
    asked = [question, {"role": ASSISTANT, "content": MARK}]
    after, following = (_after(template, [*asked, *more]) for more in ([], [question | {"content": NEXT}]))
    tokens, ahead = encode(after), encode(following)
    added = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
    special = frozenset(added | set(tokenizer.all_special_ids))
    end = _first(tokens, own if ends else own | special)
    if end is not None and tokens[end] in own:
        return Ending(own, tuple(tokens[: end + 1]), after, special, "")
    names = ", ".join(f"{token} {tokenizer.decode([token])!r}" for token in sorted(own)) or "none"
    if (end := _first(tokens, special)) is not None:
        return Ending(own | {tokens[end]}, tuple(tokens[: end + 1]), after, special, (
            f"the chat template closes an answer with token {tokens[end]} {tokenizer.decode([tokens[end]])!r}, at which decoding does not "
            f"stop: the model's end-of-sequence tokens are {names}; set eos_token_id in its generation_config.json"
        ))  # fmt: skip
    end = _first(ahead, own | special)
    if end is not None and ahead[end] in own:
        return Ending(own, tuple(ahead[: end + 1]), after, special, "")
    warning = f"the chat template writes no end-of-sequence token of the model ({names}) after an answer, so heads do not learn to end one"
    return Ending(own, (), after, special, warning if after or following else "")


def _first(tokens: Sequence[int], those: Set[int]) -> int | None:
    return next((i for i, token in enumerate(tokens) if token in those), None)


def _after(template: Template, messages: list[dict[str, str]]) -> str:
    """Return what the template writes after the answer, up to the next question; empty if it refuses."""
    try:
        text = template.render(messages).text
    except TemplateRefusal:
        return ""
    return text[text.rfind(MARK) + len(MARK) :].partition(NEXT)[0] if MARK in text else ""
