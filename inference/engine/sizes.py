"""Tree sizes to choose from and to measure, and numbers of rows by octave; there are few, so that each occurs often."""

from __future__ import annotations

TREE_SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""Candidate tree sizes (nodes per row, the root included) that decoding chooses from."""
MIN_PADDED = 4
"""Where each size is captured apart, a tree has one node or a power of two of at least these; the same for positions."""
TUNED_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Tree sizes whose forward passes `headstart tune` measures."""
BEAM_WIDTH, CPU_GREEDY_WIDTH, CPU_SAMPLED_WIDTH = 8, 2, 4
"""Nodes kept and expanded at each draft level, unless a `TreeShape` sets another width: in general, and for a single row on a CPU."""


def padded_size(nodes: int) -> int:
    """The size that a tree is padded to, so that few shapes occur."""
    return next((size for size in TREE_SIZES if size >= nodes), -(-nodes // 16) * 16)


def graph_size(count: int) -> int:
    """The number of nodes or positions that so many are padded to where each is captured apart."""
    return 1 if count == 1 else max(MIN_PADDED, 1 << (count - 1).bit_length())


def octave(rows: int) -> int:
    """The number of rows as a power of two, rounded down: its exponent."""
    return rows.bit_length() - 1
