"""Text of a JSON schema or a regular expression: a logits processor that allows the tokens of a grammar, by the library llguidance.

It follows the contract of `forked`, so that trees are constrained node by node, and names the tokens that the grammar forces.

    schema = headstart.grammar(tokenizer, json_schema={"type": "object", ...})
    model.generate(**inputs, custom_generate=heads.generate, logits_processor=[schema])

Shape suffixes: B batch, T positions, V vocabulary, W words of a mask.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from headstart.inference.engine.processing import common_prefix
from headstart.support.errors import UserError

_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""llguidance's tokenizers by size and end tokens: making one takes about a second."""


def grammar(
    tokenizer: PreTrainedTokenizerBase,
    *,
    json_schema: str | bool | Mapping[str, Any] | None = None,
    regex: str | None = None,
    end_tokens: int | Sequence[int] | None = None,
) -> Grammar:
    """Return a logits processor for one call of ``generate``, of one or several rows: what is written after the prompt is what the grammar
    allows, and an end token follows where it is complete. The tokens are those of decoding without drafts.

    ``json_schema``: a schema, or its JSON text. ``regex``: a pattern that the whole text matches (Rust's syntax). ``end_tokens``: those
    that end a text in the call (default: the tokenizer's). Needs ``pip install 'headstart[grammar]'``.
    Raises UserError unless one of both is given and llguidance can use it, or for a tokenizer that is not a fast one or has no end token.
    """
    if (json_schema is None) == (regex is None):
        raise UserError(f"a grammar is a json_schema or a regex; got {'neither' if regex is None else 'both'}: give one of them")
    matcher = _matcher_class()
    made = _tokenizer(tokenizer, tokenizer.eos_token_id if end_tokens is None else end_tokens)
    if regex is not None:
        kind, text = f"the regular expression {regex!r}", matcher.grammar_from_regex(regex)
    else:
        try:
            schema = json.dumps(json.loads(json_schema) if isinstance(json_schema, str) else json_schema)
        except (ValueError, TypeError) as error:
            raise UserError(f"the JSON schema is not JSON ({_one_line(str(error))}); give a schema, or its text") from None
        kind, text = "the JSON schema", matcher.grammar_from_json_schema(schema)
    failed, messages = matcher.validate_grammar_with_warnings(text, made)
    if failed:
        raise UserError(f"{kind} cannot be used ({_one_line(messages[0])}); see docs/decode.md for what is allowed")
    return Grammar(made, text)


class Grammar(LogitsProcessor):
    """See `grammar`. A call with other prompts than the last begins anew."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        self._rows: list[GrammarRow] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Processed scores ``[B, V]`` after ids ``[B, T]``."""
        pairs = zip(input_ids.split(1), scores.split(1), strict=True)
        return torch.cat([self.of_row(row)(*pair) for row, pair in enumerate(pairs)])

    def of_row(self, row: int) -> GrammarRow:
        while len(self._rows) <= row:
            self._rows.append(GrammarRow(self.tokenizer, self.text))
        return self._rows[row]

    def rollback(self, n: int) -> None:
        """Undo the last ``n`` calls about a single row."""
        self.of_row(0).rollback(n)

    def forced(self, input_ids: Tensor) -> list[int]:
        """The tokens that must follow these ids ``[1, T]`` of a single row."""
        return self.of_row(0).forced(input_ids)


class GrammarRow:
    """The processor of one row. Its state is the tokens written after the prompt; the matcher follows when it is asked."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer, self.text, self.ends = tokenizer, text, frozenset(tokenizer.eos_tokens)
        self.matcher = _matcher_class()(tokenizer, text, log_level=0)
        self.prompt: list[int] | None = None
        self.length = 0
        """Tokens that the last call was about, the prompt included."""
        self.consumed: list[int] = []
        """What the matcher has read."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Processed scores ``[1, V]`` after ids ``[1, T]``: one more than in the last call, or a new prompt."""
        if self.matcher.is_error():
            self.matcher, self.consumed = _matcher_class()(self.tokenizer, self.text, log_level=0), []
        ids = input_ids[0].tolist()
        if self.prompt is None or len(ids) != self.length + 1 or ids[: len(self.prompt)] != self.prompt:
            self.prompt = ids
        self.length = len(ids)
        written = ids[len(self.prompt) :]
        if not self.ends.isdisjoint(written):  # the text has ended
            return scores
        allowed_V = torch.zeros(scores.shape[-1], dtype=torch.bool)
        if self._read(written):  # else nothing may follow: a beam without a chance, say
            self._allow(allowed_V)
        return scores.masked_fill(~allowed_V.to(scores.device), -math.inf)

    def rollback(self, n: int) -> None:
        """Undo the last ``n`` calls."""
        self.length -= n
        if self.prompt is not None and self.length < len(self.prompt):
            self.prompt = None

    def forced(self, input_ids: Tensor) -> list[int]:
        """The tokens that must follow these ids ``[1, T]``, as the tokenizer writes them."""
        ids = input_ids[0].tolist()
        written = [] if self.prompt is None else ids[len(self.prompt) :]
        if self.prompt is None or not self.ends.isdisjoint(written) or not self._read(written):
            return []
        tokens: list[int] = self.matcher.compute_ff_tokens()
        return tokens or sorted(self.ends)[:1] if self.matcher.is_stopped() else tokens

    def _read(self, written: list[int]) -> bool:
        """Bring the matcher to the state after these tokens; returns False if it does not allow them. Raises UserError if it gives up."""
        common = common_prefix(self.consumed, written)
        if common < len(self.consumed):
            self.matcher.rollback(len(self.consumed) - common)
        read = common + self.matcher.try_consume_tokens(written[common:])
        self.consumed = written[:read]
        if self.matcher.is_error():
            raise UserError(f"the grammar cannot be followed further: {_one_line(self.matcher.get_error())}")
        return read == len(written)

    def _allow(self, allowed_V: Tensor) -> None:
        """Mark the tokens that may follow in a mask on the host."""
        if self.matcher.is_stopped():
            allowed_V[sorted(self.ends)] = True
            return
        size = self.tokenizer.vocab_size
        words_W = np.zeros((size + 31) // 32, np.uint32)
        self.matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
        bits = torch.from_numpy(np.unpackbits(words_W.view(np.uint8), bitorder="little")[: min(size, len(allowed_V))])
        allowed_V[: len(bits)] = bits.bool()


def _matcher_class() -> Any:
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise UserError("grammars need the package llguidance, which is not installed; run: pip install 'headstart[grammar]'") from None
    return LLMatcher


def _tokenizer(tokenizer: PreTrainedTokenizerBase, end_tokens: int | Sequence[int] | None) -> Any:
    from llguidance.hf import from_tokenizer

    ends = (end_tokens,) if isinstance(end_tokens, int) else tuple(end_tokens or ())
    if not ends:
        raise UserError(f"the tokenizer of {tokenizer.name_or_path} has no end token, by which a grammar ends a text; give end_tokens")
    made, key = _tokenizers.setdefault(tokenizer, {}), (len(tokenizer), *ends)
    if key not in made:
        try:
            made[key] = from_tokenizer(tokenizer, eos_token=list(ends))
        except ValueError as error:
            raise UserError(f"grammars cannot read the tokenizer {type(tokenizer).__name__} ({_one_line(str(error))})") from None
    return made[key]


def _one_line(message: str) -> str:
    """The first line of llguidance's messages, or, of an error in a pattern, the one that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0] if lines else "no reason given")
