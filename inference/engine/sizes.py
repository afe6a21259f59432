"""Tree sizes that are chosen from and measured: few, so that each occurs often."""

from __future__ import annotations

TREE_SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""Candidate tree sizes (nodes per row, the root included) that decoding chooses from."""
TUNED_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sizes whose forward pass `headstart tune` times."""
CURVE_SIZES = tuple(size for size in TUNED_SIZES if size <= TREE_SIZES[-1])
"""Sizes of the cost curve in a benchmark report."""
BEAM_WIDTH = 8
"""Nodes of a draft level that are expanded, where no `TreeShape` says otherwise."""


def padded_size(nodes: int) -> int:
    """The next size that occurs often, for trees that are padded to few shapes."""
    return next((size for size in TREE_SIZES if size >= nodes), -(-nodes // 16) * 16)
