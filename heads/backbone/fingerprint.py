"""The fingerprint of a backbone's weights: 32 values each of the embedding and the output layer, stored with heads and feature caches.

Their places are at equal distances. Up to 2^24 elements they are those of `torch.linspace` in fp32, rounded as hardware with fused
multiply-add does. Beyond, fp32 cannot tell one element from the next, and they are exact.

A file may hold weights in few bits, with a scale for each block of them. How far rounding to nearest moves a weight is bounded by the
largest of its block, and how far it moves many of them is known: this tells a model in another precision from another model, or from
one that was trained further by more than the rounding hides.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.support.devices import spread
from headstart.support.files import value_hash

VERSION = 2
COUNT = 32
EXACT_IN_FP32 = 2**24
BLOCK = 32
"""Weights that share a scale; in GGUF's K and I types with others, whose scales share one in turn."""
Match = Literal["same", "rounded", "other"]
Places = list[list[int]]
"""Indices into each matrix, flattened."""
TEXTS = (
    "Buy these:\n\n1. Bread, 12 eggs\n2.  Tea\n\nIt's 1984.", "|  a | 10 |\n|----|---:|\n", "def f(x):\n    return x[0]  # 1\n\n\n\tpass",
    "  Ünïcode, café, ½ ²", "你好，世界。こんにちは 한국어", "🙂 I'LL SEE\r\n   ",
)  # fmt: skip
"""Texts that vocabularies split in different ways."""


def fingerprint(matrices: Sequence[Tensor]) -> list[float]:
    """Return the values of the matrices ``[V, D]``, in their dtype; quantized ones are left out."""
    return _values(matrices, _places(matrices))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the token ids of TEXTS, alone and behind the token that ends a text."""
    texts = [f"{end}{text}" for text in TEXTS for end in ("", tokenizer.eos_token or "")]
    return value_hash([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])


def same_weights(ours: Any, theirs: Any) -> bool:
    """Compare two fingerprints, allowing for rounding to different dtypes."""
    if not isinstance(ours, list) or not isinstance(theirs, list) or len(ours) != len(theirs):
        return False
    return all(abs(a - b) <= limit for a, b, limit in zip(ours, theirs, _dtype_errors(ours), strict=True))


def match(matrices: Sequence[Tensor], types: list[str] | None, contract: Mapping[str, Any]) -> Match:
    """Compare the matrices with the fingerprint that a checkpoint states.

    ``types``: how the file stores each matrix, if in blocks. "rounded": the values differ as the same weights do that are stored otherwise,
    each by at most the error of rounding, with room for scales that are rounded too, and all together by at most 1.5 to 2 times the usual.
    """
    recorded, theirs = contract.get("weights"), contract.get("stored")
    places = _places(matrices)
    ours = _values(matrices, places)
    if same_weights(recorded, ours):
        return "same"
    stored = [[text for text in pair if text] for pair in zip(types or ["", ""], theirs or ["", ""], strict=False)]
    if types == theirs or not isinstance(recorded, list) or len(recorded) != len(ours):
        return "other"
    errors = [error for each in zip(matrices, places, stored, strict=True) for error in _rounding_errors(*each)]
    apart, rounding, exact = np.abs(np.subtract(ours, recorded)), np.array(errors), np.array(_dtype_errors(ours))
    usual = np.square(apart).mean() <= np.square(0.45 * rounding).mean() + np.square(exact).mean()  # 0.15 to 0.3, of Q2_K to Q8_0
    return "rounded" if usual and (apart <= 1.4 * rounding + exact).all() else "other"


def bits_of(stored: str) -> int | None:
    """Return the bits of a GGUF type with a scale for each block, such as Q4_1, IQ3_XXS or MXFP4; None for other types."""
    found = re.match(r"([IT]?Q|MXFP|NVFP)(\d)", stored)
    return max(2, int(found[2]) - ("FP" in found[1])) if found else None  # of floats, whose scales are powers of two, one less counts


def _dtype_errors(values: Sequence[float]) -> list[float]:
    scale = max(map(abs, values), default=0.0)
    return [0.01 * abs(value) + 1e-4 * scale for value in values]


def _rounding_errors(matrix: Tensor, places: Sequence[int], types: Sequence[str]) -> list[float]:
    """Return the largest error of rounding to these types at each place: a share of the largest magnitude in its block."""
    share = sum(2.0 ** (1 - bits) for stored in types if (bits := bits_of(stored)) is not None)
    if not share:
        return [0.0] * len(places)
    starts = [(row, column // BLOCK * BLOCK) for row, column in (divmod(place, matrix.shape[1]) for place in places)]
    return [share * float(matrix[row, start : start + BLOCK].detach().abs().max()) for row, start in starts]


def _values(matrices: Sequence[Tensor], places: Places) -> list[float]:
    values: list[float] = []
    for matrix, each in zip(matrices, places, strict=True):
        if matrix.dtype.is_floating_point:
            rows, columns = zip(*(divmod(place, matrix.shape[1]) for place in each), strict=True)
            values += matrix.detach()[list(rows), list(columns)].float().tolist()  # by row and column: a view is not copied
    return [float(f"{value:.6g}") for value in values]


def _places(matrices: Sequence[Tensor]) -> Places:
    counts = [matrix.numel() for matrix in matrices]
    return [_in_fp32(count) if count <= EXACT_IN_FP32 else spread(0, count - 1, COUNT) for count in counts]


def _in_fp32(count: int) -> list[int]:
    """Return the places of `torch.linspace` in fp32, which computes the second half from the end."""
    last = np.float32(count - 1)
    steps = np.arange(COUNT // 2) * np.float64(last / np.float32(COUNT - 1))  # exact: 24 bits times 5
    backwards = np.float64(last) - steps
    return [min(int(place), count - 1) for place in (*steps.astype(np.float32), *backwards[::-1].astype(np.float32))]
