"""Random calls of transformers' ``generate``, with most of its arguments and with objects of a user's own."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from arguments import tokenizer
from families import VOCAB, Noted, left_padded, texts
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import headstart
from headstart.inference.engine.tree import TreeShape

FAMILIES = ("llama", "gpt2", "gemma3")
TREES = ("auto", "auto", TreeShape(8, 3), TreeShape(24, 6), TreeShape(4, 1))
LONGEST = 18


class Shift(LogitsProcessor):
    """Moves the scores by the last token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + (torch.arange(VOCAB) * (input_ids[:, -1:] + 3) % 7 < 2) * 4.0


@headstart.stateless
class Declared(Shift):
    """The same, declared."""


class Counting(LogitsProcessor):
    """Keeps a state for all rows together: the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + torch.arange(VOCAB).roll(self.calls) % 5


class Undoable(LogitsProcessor):
    """Keeps a state for each row, which can be undone."""

    def __init__(self) -> None:
        self.rows: dict[int, Undoable] = {}
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if len(scores) > 1:
            pairs = enumerate(zip(input_ids.split(1), scores.split(1), strict=True))
            return torch.cat([self.of_row(row)(*pair) for row, pair in pairs])
        self.calls += 1
        return scores + torch.arange(VOCAB).roll(self.calls) % 5

    def rollback(self, n: int) -> None:
        self.calls -= n

    def of_row(self, row: int) -> Undoable:
        return self.rows.setdefault(row, Undoable())


class Sums(StoppingCriteria):
    """Ends a row where its ids add up to a multiple."""

    def __init__(self, of: int) -> None:
        self.of = of

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        return input_ids.sum(1) % self.of == 0


class Calls(StoppingCriteria):
    """Keeps something for each row, and ends every row at its ninth call."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        self.counts = self.counts or [0] * len(input_ids)
        self.counts = [self.counts[row] + 1 for row in range(len(input_ids))]
        return torch.tensor([count >= 9 for count in self.counts])


@dataclass
class Call:
    """A call of generate; ``objects`` are made anew for each time it is made."""

    family: str
    kind: str
    rows: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Callable[[], Any]] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def sampled(self) -> bool:
        return bool(self.options.get("do_sample"))

    def given(self) -> dict[str, Any]:
        return self.rows | self.options | {name: make() for name, make in self.objects.items()}


def tokens(rng: random.Random, count: int) -> list[int]:
    return rng.sample(range(1, VOCAB), count)


CONFIG: list[tuple[float, Callable[[random.Random], dict[str, Any]]]] = [
    (0.55, lambda rng: {"eos_token_id": tokens(rng, rng.choice([1, 2, 6])), "pad_token_id": rng.randrange(VOCAB)}),
    (0.1, lambda rng: {"min_new_tokens": rng.randint(1, 9)}),
    (0.08, lambda rng: {"min_length": rng.randint(3, 20)}),
    (0.12, lambda rng: {"repetition_penalty": rng.choice([0.8, 1.2, 1.7])}),
    (0.08, lambda rng: {"no_repeat_ngram_size": rng.choice([1, 2, 3])}),
    (0.06, lambda rng: {"encoder_repetition_penalty": rng.choice([0.7, 1.5])}),
    (0.06, lambda rng: {"encoder_no_repeat_ngram_size": rng.choice([1, 2])}),
    (0.1, lambda rng: {"bad_words_ids": [tokens(rng, rng.choice([1, 1, 2, 3])) for _ in range(rng.choice([1, 20]))]}),
    (0.08, lambda rng: {"sequence_bias": {tuple(tokens(rng, rng.choice([1, 2]))): rng.choice([-9.0, 6.0]) for _ in range(4)}}),
    (0.08, lambda rng: {"suppress_tokens": tokens(rng, rng.choice([1, 30]))}),
    (0.08, lambda rng: {"begin_suppress_tokens": tokens(rng, 30)}),
    (0.04, lambda rng: {"forced_bos_token_id": rng.randrange(VOCAB)}),
    (0.06, lambda rng: {"forced_eos_token_id": rng.randrange(VOCAB)}),
    (0.05, lambda rng: {"exponential_decay_length_penalty": (rng.randint(0, 6), rng.choice([1.1, 2.0]))}),
    (0.05, lambda _: {"remove_invalid_values": True}),
    (0.08, lambda _: {"renormalize_logits": True}),
    (0.03, lambda rng: {"guidance_scale": rng.choice([1.5, 3.0])}),
    (0.03, lambda rng: {"watermarking_config": transformers.WatermarkingConfig(bias=rng.choice([1.0, 9.0]))}),
    (0.02, lambda _: {"watermarking_config": transformers.SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)}),
    (0.3, lambda rng: {"return_dict_in_generate": True} | {f"output_{name}": rng.random() < 0.6 for name in ("scores", "logits")}),
    (0.05, lambda _: {"use_cache": False}),
    (0.04, lambda rng: {"cache_implementation": rng.choice(["static", "dynamic"])}),
    (0.01, lambda rng: {"cache_implementation": rng.choice(["offloaded", "quantized"])}),
    (0.01, lambda rng: {"return_dict_in_generate": True, rng.choice(["output_attentions", "output_hidden_states"]): True}),
    (0.01, lambda _: {"penalty_alpha": 0.6, "top_k": 4}),
    (0.01, lambda _: {"dola_layers": "low"}),
    (0.01, lambda _: {"prompt_lookup_num_tokens": 3}),
]
"""Arguments that are values, and how often they are given."""

SAMPLING: list[tuple[float, Callable[[random.Random], dict[str, Any]]]] = [
    (0.6, lambda rng: {"temperature": rng.choice([0.3, 0.8, 1.7])}), (0.4, lambda rng: {"top_k": rng.choice([0, 1, 3, 20])}),
    (0.3, lambda rng: {"top_p": rng.choice([0.3, 0.9])}), (0.15, lambda rng: {"min_p": rng.choice([0.05, 0.4])}),
    (0.1, lambda rng: {"typical_p": rng.choice([0.3, 0.9])}), (0.1, lambda _: {"epsilon_cutoff": 0.02}),
    (0.1, lambda _: {"eta_cutoff": 0.02}), (0.1, lambda _: {"top_h": 0.5}),
]  # fmt: skip

BEAMS: list[tuple[float, Callable[[random.Random], dict[str, Any]]]] = [
    (1.0, lambda rng: {"num_beams": rng.choice([2, 3, 5])}),
    (0.3, lambda rng: {"num_return_sequences": 2}),
    (0.4, lambda rng: {"early_stopping": rng.choice([True, False, "never"])}),
    (0.4, lambda rng: {"length_penalty": rng.choice([-2.0, 0.0, 0.7, 3.0])}),
]

PROCESSORS: list[Callable[[], LogitsProcessor]] = [Shift, Declared, Declared, Counting, Undoable]
CRITERIA: list[Callable[[], StoppingCriteria]] = [lambda: Sums(7), lambda: Sums(3), Calls]


def allowed(row: int, ids: Tensor) -> list[int]:
    return [(int(ids[-1]) * 5 + 7 * row + i) % VOCAB for i in range(4)]


def some(rng: random.Random, chances: list[tuple[float, Callable[[random.Random], dict[str, Any]]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for chance, make in chances:
        if rng.random() < chance:
            found |= make(rng)
    return found


def objects(rng: random.Random, beams: bool) -> dict[str, Callable[[], Any]]:
    """Objects of a user's own."""
    found: dict[str, Callable[[], Any]] = {}
    if rng.random() < 0.15:
        kinds = rng.sample(PROCESSORS, rng.choice([1, 1, 2]))
        found["logits_processor"] = lambda: LogitsProcessorList([kind() for kind in kinds])
    if rng.random() < 0.08:
        function = headstart.stateless(lambda row, ids: allowed(row, ids)) if rng.random() < 0.7 else allowed
        found["prefix_allowed_tokens_fn"] = lambda: function
    if rng.random() < 0.12:
        criteria = rng.choice(CRITERIA)
        found["stopping_criteria"] = lambda: StoppingCriteriaList([criteria()])
    if rng.random() < 0.08:
        stops = rng.sample(string.ascii_lowercase, rng.choice([1, 9]))
        found |= {"stop_strings": lambda: stops, "tokenizer": tokenizer}
    if not beams and rng.random() < 0.06:
        found["streamer"] = Noted
    if rng.random() < 0.1:
        found["past_key_values"] = transformers.DynamicCache
    return found


def draw(rng: random.Random) -> Call:
    count = rng.choice([1, 1, 2, 3, 4])
    length = rng.randint(1, 14)
    rows = left_padded([texts(1, rng.choice([length, rng.randint(1, 14)]), rng.randrange(1 << 20))[0] for _ in range(count)])
    if rng.random() < 0.1 and int(rows["attention_mask"].min()):
        del rows["attention_mask"]
    mode = rng.choices(["greedy", "sampled", "beams"], [5, 3, 3])[0]
    options: dict[str, Any] = {"do_sample": mode == "sampled"}
    limit = rng.randint(1, LONGEST)
    options |= {"max_new_tokens": limit} if rng.random() < 0.8 else {"max_length": rows["input_ids"].shape[1] + limit}
    options |= some(rng, CONFIG)
    if "exponential_decay_length_penalty" in options or "min_length" in options or "min_new_tokens" in options:
        options.setdefault("eos_token_id", tokens(rng, 2))
    options |= some(rng, {"greedy": [], "sampled": SAMPLING, "beams": BEAMS}[mode])
    own: dict[str, Any] = {"tree": rng.choice(TREES)}
    if count > 1 and rng.random() < 0.15:
        own["batch_size"] = rng.randint(1, count)
    if mode == "sampled":
        own["seed"] = rng.randrange(1000)
        if rng.random() < 0.1:
            options["num_return_sequences"] = 2
    kind = rng.choice(["nearly", "nearly", "eagle3", "medusa", "block"])
    return Call(rng.choice(FAMILIES), kind, rows, options, objects(rng, mode == "beams"), own)
