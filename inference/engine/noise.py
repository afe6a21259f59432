"""Shared noise: Gumbel noise for each token position, a function of the row's seed and the position only.

``argmax_v (log p(v) + g(v))`` is an exact sample of p (Gumbel-max). Keyed by (seed, position), it makes the token at a
position a function of the tokens before it and the seed: the same for any tree, any drafter, any batch, or none.

The generator is counter-based: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) over the vocabulary, from a
start that hashes the seed and the position. Shape suffixes: B rows, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
BLOCK_POSITIONS = 16
"""Positions for which noise is made at once."""
MAX_BLOCK_VALUES = 1 << 19
"""Values made at once, at most: beyond that the arithmetic takes the time, not the calls."""


def _signed(x: int) -> int:
    """The int64 with the bits of a uint64."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical (unsigned) right shift; torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of int64 that leaves no trace of its input."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def gumbel(seeds_B: Tensor, positions_BP: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise ``[B, P, V]`` (float32) for the tokens at those positions of rows with those seeds (int64)."""
    key_BP = mix(mix(seeds_B)[:, None] + positions_BP * _signed(GOLDEN))
    counter_V = torch.arange(vocab, device=seeds_B.device) * _signed(GOLDEN)
    bits = _shifted(mix(key_BP[..., None] + counter_V), 12)
    uniform = (bits.double() + 0.5) * 2.0**-52  # exact, and never 0 or 1
    return -torch.log(-torch.log(uniform)).float()


class NoiseBuffer:
    """Noise of the next positions of some rows, made by ``make(seeds_B, positions_BP)`` in blocks, which take little longer than one."""

    def __init__(self, make: Callable[[Tensor, Tensor], Tensor], vocab: int, seeds_B: Tensor) -> None:
        self.make, self.vocab, self.seeds_B = make, vocab, seeds_B
        self.rows: list[int] = []
        """The rows whose noise the block holds."""
        self.starts: list[int] = []
        """Each row's first position in it."""
        self.block_BPV: Tensor | None = None

    def of(self, rows: list[int], positions: list[int], count: int) -> Tensor:
        """``[B, count, V]``: the noise of ``count`` positions, starting at each row's own."""
        device = self.seeds_B.device
        offsets = [at - start for at, start in zip(positions, self.starts, strict=True)] if rows == self.rows else []
        if not offsets or min(offsets) < 0 or self.block_BPV is None or max(offsets) + count > self.block_BPV.shape[1]:
            many = max(count, min(BLOCK_POSITIONS, MAX_BLOCK_VALUES // (len(rows) * self.vocab)))
            starts_B = torch.tensor(positions, device=device)
            self.block_BPV = self.make(self.seeds_B[rows], starts_B[:, None] + torch.arange(many, device=device))
            self.rows, self.starts, offsets = list(rows), list(positions), [0] * len(rows)
        if len(set(offsets)) == 1:
            return self.block_BPV[:, offsets[0] : offsets[0] + count]
        index_BP = torch.tensor(offsets, device=device)[:, None] + torch.arange(count, device=device)
        return self.block_BPV[torch.arange(len(rows), device=device)[:, None], index_BP]


def row_seeds(seed: int | list[int] | None, rows: int, device: torch.device) -> Tensor:
    """int64 [B]: a seed a row. Row i of an int seed has ``seed + i``; None draws from torch's default generator.

    Raises ValueError when a list has another length than the batch.
    """
    if isinstance(seed, list):
        if len(seed) != rows:
            raise ValueError(f"seed has {len(seed)} entries for {rows} rows; give one a row, or one int for all")
        return torch.tensor([_signed(s & (1 << 64) - 1) for s in seed], device=device)
    if seed is None:
        return torch.randint(-(1 << 63), (1 << 63) - 1, (rows,)).to(device)
    return torch.tensor([_signed(seed + i & (1 << 64) - 1) for i in range(rows)], device=device)
