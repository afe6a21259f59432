"""The caches of models whose states cannot branch along a tree (Mamba-2, short convolutions, chunked attention): candidates form a chain.

Each row has transformers' own cache. Before a pass it is copied, which is cheap: keys and values are extended by new tensors, so the copy
shares the old ones, and states, which are written in place, have a fixed size. If all candidates are accepted, the cache after the pass
stands. Otherwise the copy does, and the accepted tokens are *pending*: the next pass reads them again in front of its candidates, since
more tokens in a pass cost less than another pass. A cache of keys and values alone is cut instead. Shape suffix: B batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from headstart.heads.backbone.hooks import is_foreign
from headstart.heads.backbone.model_config import STATE
from headstart.support.errors import cause

MOST_PENDING = 8
"""Pending tokens beyond which they are read in a pass of their own."""
SHORT = 4
"""Tokens of a pass whose results `chain_fault` compares with those of passes of one."""


def copied(cache: DynamicCache) -> DynamicCache:
    """Return a copy that passes over the other leave as it is."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    for part in (other, *other.layers):
        vars(part).update({name: _states(value) for name, value in vars(part).items() if isinstance(value, (dict, list))})
    return other


def _states(value: Any) -> Any:
    """States of a layer, which passes write in place, or names and flags of them."""
    if isinstance(value, dict):
        return {key: _states(part) for key, part in value.items()}
    return [_states(part) for part in value] if isinstance(value, list) else value.clone() if isinstance(value, Tensor) else value


def mixers_of(model: nn.Module) -> list[Any]:
    """Return the model's layers of Mamba-2."""
    return [module for module in model.modules() if {"chunk_size", "time_step_limit"} <= vars(module).keys()]


@contextmanager
def as_steps(mixers: Sequence[Any], positions: int) -> Iterator[None]:
    """Let layers of Mamba-2 compute a pass of so many tokens as passes of one token.

    Some, as in Nemotron-H and Zamba2, have a smallest time step in passes of several tokens only. On a CPU, without Mamba-2's kernels,
    they compute whole chunks, 256 positions for a pass of a few.
    """
    before = [(mixer.chunk_size, mixer.time_step_limit) for mixer in mixers]
    most = positions if mixers and mixers[0].A_log.device.type == "cpu" else math.inf
    try:
        for mixer, (size, _) in zip(mixers, before, strict=True):
            mixer.chunk_size, mixer.time_step_limit = min(most, size), (0.0, math.inf)
        yield
    finally:
        for mixer, (size, limit) in zip(mixers, before, strict=True):
            mixer.chunk_size, mixer.time_step_limit = size, limit


@torch.no_grad()
def chain_fault(model: PreTrainedModel, read: Callable[..., Any], tokens_1N: Tensor) -> str | None:
    """Return why a model cannot verify chains; None if it can. ``read`` is `Backbone.read`.

    A pass of several tokens after others must compute what passes of one do, within rounding, a copied cache must stay as it was, and
    positions must count from 0, as they do where none are given.
    """
    N, output = tokens_1N.shape[1], model.get_output_embeddings()
    shown = output if is_foreign(output) else nn.Identity()  # of which logits may differ where states do not
    place_1N, start = torch.arange(N, device=tokens_1N.device)[None], N - SHORT

    def of(at: int, end: int, cache: DynamicCache) -> Tensor:
        with as_steps(mixers, end - at) if at else nullcontext():
            return shown(read(tokens_1N[:, at:end], cache, place_1N[:, at:end]).hidden_BTD)

    try:
        cache, mixers = DynamicCache(config=model.config.get_text_config()), mixers_of(model)
        own, given = shown(read(tokens_1N[:, :start]).hidden_BTD), of(0, start, cache)
        copies = [copied(cache) for _ in range(3)]
        many, again = of(start, N, cache), of(start, N, copies[0])
        single, two = (torch.cat([of(at, at + n, copies[n]) for at in range(start, N, n)], 1) for n in (1, 2))
    except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError, IndexError) as error:
        return f"nor does it go on from a copied cache ({cause(error)})"
    size, eps = single.abs().max().item(), torch.finfo(single.dtype).eps
    if not (own - given).abs().max().item() <= max(1e-3, 8 * eps) * size:
        return "and positions that count from 0 are not those that it takes where none are given"
    rounding, stale, apart = ((many - other).abs().max().item() for other in (two, again, single))
    if not max(rounding, stale) <= max(1e-3, 8 * eps) * size:
        return "and a pass of several tokens does not go on from the state before it"
    passes = apart <= max(4 * rounding, max(1e-4, 4 * eps) * size)
    return None if passes else "and a pass of one token computes otherwise than a pass of several"


class ChainRow:
    """The cache of one row, of which it owns all but the tokens that are pending."""

    def __init__(self, cache: DynamicCache, length: int, offset: int = 0) -> None:
        """``offset``: the position of the next token, less the length."""
        self.cache, self.length, self.offset = cache, length, offset
        self.pending: list[int] = []
        self._before: DynamicCache | None = None
        self._chain: list[int] = []

    def read(self, chain: list[int], run: Callable[[list[int], int, DynamicCache], Any]) -> Any:
        """Read what is pending, the root and its candidates: ``run(tokens, their first position, cache)``, whose result is returned."""
        if len(self.pending) > MOST_PENDING:
            run(self.pending, self.length - len(self.pending), self.cache)
            self.pending = []
        self._before, self._chain = copied(self.cache) if len(chain) > 1 else None, chain
        return run([*self.pending, *chain], self.length - len(self.pending), self.cache)

    def keep(self, count: int) -> None:
        """Keep the first ``count`` tokens of the chain that was read."""
        self.length += count
        if count == len(self._chain):
            self.pending = []
        elif all(type(layer) is DynamicLayer for layer in self.cache.layers) and not hasattr(self.cache, STATE):
            self.pending = []
            for layer in self.cache.layers:
                if layer.keys is None:  # of Mllama's layers for images, which keep nothing of a text
                    continue
                layer.keys, layer.values = layer.keys[..., : self.length, :], layer.values[..., : self.length, :]
        else:
            assert self._before is not None
            self.cache, self.pending = self._before, self.pending + self._chain[:count]
        self._before = None


class ChainCache:
    """The rows of a batch, as `RaggedCache` has them."""

    memory = None

    def __init__(self, rows: list[ChainRow], device: torch.device) -> None:
        self.rows, self.device = rows, device

    @property
    def lengths_B(self) -> Tensor:
        return torch.tensor([row.length for row in self.rows], device=self.device)

    @property
    def longest(self) -> int:
        return max(row.length for row in self.rows)

    def keep(self, paths: list[list[int]], added: None = None) -> None:
        for row, path in zip(self.rows, paths, strict=True):
            row.keep(len(path))

    def join(self, other: ChainCache) -> None:
        self.rows = self.rows + other.rows

    def replace(self, rows: list[int], other: ChainCache) -> None:
        new = dict(zip(rows, other.rows, strict=True))
        self.rows = [new.get(number, row) for number, row in enumerate(self.rows)]

    def select(self, rows: list[int]) -> None:
        self.rows = [self.rows[number] for number in rows]
