"""Times all products of a decoding step by compiled layers' kernels, for several numbers of rows, in bf16 or fp32, on random weights, and a
layer's attention to KEYS keys, microseconds.

python benchmarks/products.py --threads 2 [--dtype float32 | --four-bits] [--hidden 576 --intermediate 1536 --heads 9 --kv-heads 3
--layers 30 --vocab 49152] [--json FILE]

The sizes given here are SmolLM2-135M's. With --four-bits the layers, all but the readout, are codes, as those of a file in Q4_1 are. Rows
take turns; of each the median counts. GB/s are bytes of weights over seconds. Run it on an otherwise idle machine.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from headstart_cpu import kernels
from headstart_cpu.weights import side_by_side
from program import options, run

SIZES = {"hidden": 576, "intermediate": 1536, "heads": 9, "kv-heads": 3, "layers": 30, "vocab": 49152, "rounds": 12}
ROWS = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48)
KEYS = (128, 512, 2048)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    kernels.build()
    kernels.load()
    dtype, D, wide = getattr(torch, given.dtype), given.hidden, given.intermediate
    qkv = D + 2 * given.kv_heads * (D // given.heads)
    shapes = [(qkv, D), (D, D), (2 * wide, D), (D, wide)] * given.layers + [(given.vocab, D)]
    counts = [-(-outputs // kernels.OUTPUTS) * kernels.OUTPUTS * inputs for outputs, inputs in shapes]
    coded = [given.four_bits and outputs != given.vocab for outputs, _ in shapes]
    places = side_by_side([(count * 3 // 4, torch.uint8) if four else (count, dtype) for count, four in zip(counts, coded, strict=True)])
    for place, four in zip(places, coded, strict=True):
        (place.view(torch.float32) if four else place).normal_()
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(given.rounds + 1):
        for rows, times in seconds.items():
            inputs = {size: torch.randn(rows, size).to(dtype) for size in (D, wide)}
            start = time.perf_counter()
            for (outputs, size), place in zip(shapes, places, strict=True):
                torch.ops.headstart_cpu.product(inputs[size], place, None, outputs)
            times.append(time.perf_counter() - start)
    attention = {keys: {rows: _attention(given, dtype, rows, keys) for rows in (1, 2, 5, 8)} for keys in KEYS}
    medians = {rows: statistics.median(times[1:]) for rows, times in seconds.items()}  # the first round touches the memory
    size = sum(place.nbytes for place in places)
    return {
        "amx": dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported(), "threads": given.threads, "bytes": size,
        "ms": {rows: round(1e3 * median, 2) for rows, median in medians.items()},
        "GB/s": {rows: round(size / median / 1e9, 1) for rows, median in medians.items()}, "attention": attention,
    }  # fmt: skip


def _attention(given: argparse.Namespace, dtype: torch.dtype, rows: int, keys: int) -> float:
    """The microseconds of a layer's attention of some rows to so many keys, the last seven of which are masked."""
    width = given.hidden // given.heads
    query = torch.randn(1, rows, given.heads, width, dtype=dtype).transpose(1, 2)
    stored = [torch.randn(1, given.kv_heads, keys + 1, width, dtype=dtype)[:, :, :keys] for _ in range(2)]
    mask, times = torch.zeros(1, 1, rows, keys, dtype=dtype), list[float]()
    mask[..., -7:] = torch.finfo(dtype).min
    for _ in range(40 * given.rounds):
        start = time.perf_counter()
        torch.ops.headstart_cpu.attention(query, *stored, mask, width**-0.5)
        times.append(time.perf_counter() - start)
    return round(1e6 * statistics.median(times), 1)


if __name__ == "__main__":
    parser = options(__doc__)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default: {value})")
    parser.add_argument("--four-bits", action="store_true", help="weights of layers as codes of 4 bits (in bfloat16)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    run(parser, measured)
