"""Shared noise: Gumbel noise for each token position, a function of the row's seed and the position only.

``argmax_v (log p(v) + g(v))`` is an exact sample of p (Gumbel-max). With noise keyed by (seed, position), the token at a position is a
function of the preceding tokens and the seed: the same for any tree, drafter and batch, and without drafts.

The generator is counter-based: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) applied to a counter over the vocabulary
that starts from a hash of seed and position. Shape suffixes: B rows, P positions, V vocabulary.
"""

from operator import index

import torch
from torch import Tensor

from headstart.support.errors import UserError

GOLDEN = 0x9E3779B97F4A7C15
BLOCK_POSITIONS = 16
"""Positions for which noise is generated at once."""
MAX_BLOCK_VALUES = 1 << 19
"""Maximum number of values generated at once: beyond it, arithmetic rather than call overhead dominates."""
CACHED_VALUES = 1 << 16
"""Values that stay in a processor's caches while they are computed."""


def _signed(x: int) -> int:
    """The int64 with the same bits as this uint64."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical (unsigned) right shift; torch's ``>>`` copies the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix_(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place: a bijection of int64 that mixes all bits."""
    x.bitwise_xor_(_shifted(x, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    x.bitwise_xor_(_shifted(x, 27)).mul_(_signed(0x94D049BB133111EB))
    return x.bitwise_xor_(_shifted(x, 31))


def gumbel(seeds_B: Tensor, positions_BP: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise ``[B, P, V]`` (float32) for the tokens at those positions of rows with those seeds (int64).

    In place and, on a CPU, a few positions at a time: some MB are mapped anew at every operation, and leave its caches.
    """
    key_BP = mix_(mix_(seeds_B.clone())[:, None] + positions_BP * _signed(GOLDEN))
    counter_V = torch.arange(vocab, device=seeds_B.device) * _signed(GOLDEN)
    noise_NV = torch.empty(key_BP.numel(), vocab, device=seeds_B.device)
    at_once = max(1, CACHED_VALUES // vocab if noise_NV.device.type == "cpu" else len(noise_NV))
    for key_N, out_NV in zip(key_BP.flatten().split(at_once), noise_NV.split(at_once), strict=True):
        bits = _shifted(mix_(key_N[:, None] + counter_V), 12)
        uniform = bits.double().add_(0.5).mul_(2.0**-52)  # exact, and never 0 or 1
        out_NV.copy_(uniform.log_().neg_().log_().neg_())
    return noise_NV.view(*key_BP.shape, vocab)


class NoiseBuffer:
    """Noise for the next positions of some rows, generated in blocks to save call overhead."""

    def __init__(self, vocab: int, seeds_B: Tensor) -> None:
        self.vocab, self.seeds_B = vocab, seeds_B
        self.rows: list[int] = []
        """The rows whose noise the block holds."""
        self.starts: list[int] = []
        """The first position of each row in the block."""
        self.block_BPV: Tensor | None = None

    def put(self, row: int, seed: int) -> None:
        """Give a row, whose sequence has ended, the seed of another one."""
        self.seeds_B[row] = _signed(seed & (1 << 64) - 1)
        self.rows = []

    def of(self, rows: list[int], positions: list[int], count: int) -> Tensor:
        """The noise ``[B, count, V]`` of ``count`` positions of these rows, from ``positions[b]`` on."""
        device = self.seeds_B.device
        offsets = [at - start for at, start in zip(positions, self.starts, strict=True)] if rows == self.rows else []
        if not offsets or min(offsets) < 0 or self.block_BPV is None or max(offsets) + count > self.block_BPV.shape[1]:
            many = max(count, min(BLOCK_POSITIONS, MAX_BLOCK_VALUES // (len(rows) * self.vocab)))
            starts_B = torch.tensor(positions, device=device)
            self.block_BPV = gumbel(self.seeds_B[rows], starts_B[:, None] + torch.arange(many, device=device), self.vocab)
            self.rows, self.starts, offsets = list(rows), list(positions), [0] * len(rows)
        if len(set(offsets)) == 1:
            return self.block_BPV[:, offsets[0] : offsets[0] + count]
        index_BP = torch.tensor(offsets, device=device)[:, None] + torch.arange(count, device=device)
        return self.block_BPV[torch.arange(len(rows), device=device)[:, None], index_BP]


def row_seeds(seed: int | list[int] | None, rows: int, device: torch.device) -> Tensor:
    """One int64 seed per row ``[B]``: ``seed + i`` for row i of an int seed; None draws from torch's default generator.

    Raises UserError (a ValueError) for other kinds of seeds, and if a list does not have one entry per row.
    """
    if seed is None:
        return torch.randint(-(1 << 63), (1 << 63) - 1, (rows,)).to(device)
    try:
        seeds = [index(one) for one in seed] if isinstance(seed, list) else [index(seed) + i for i in range(rows)]
    except TypeError:
        raise UserError(f"seed is a whole number, or a list of one a row; got {seed!r}") from None
    if len(seeds) != rows:
        raise UserError(f"seed has {len(seeds)} entries for {rows} rows; give one a row, or one int for all")
    return torch.tensor([_signed(one & (1 << 64) - 1) for one in seeds], device=device)
