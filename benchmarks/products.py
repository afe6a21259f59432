"""Times all products of a decoding step by compiled layers' kernels, for several numbers of rows, in bf16 or fp32, on random weights, and a
layer's attention to KEYS keys, microseconds.

python benchmarks/products.py --threads 2 [--dtype float32] [--bits 4 8] [--hidden 576 --intermediate 1536 --heads 9 --kv-heads 3
--layers 30 --vocab 49152] [--json FILE]

The sizes given here are SmolLM2-135M's. With --bits the layers and the readout are codes, as those of a file in Q4_1 and Q8_0 are. Rows
take turns; of each the median counts. GB/s are bytes of weights over seconds. Run it on an otherwise idle machine.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from headstart_cpu import kernels
from headstart_cpu.program import Packed
from headstart_cpu.weights import packed_weights, side_by_side
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
    made = {shape: _packed(*shape, dtype, given.bits and given.bits[shape == shapes[-1]]) for shape in {*shapes}}
    places = side_by_side([(made[shape].numel(), made[shape].dtype) for shape in shapes])
    for place, shape in zip(places, shapes, strict=True):
        place.copy_(made[shape])
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


def _packed(outputs: int, inputs: int, dtype: torch.dtype, bits: int | None) -> torch.Tensor:
    """A packed random weight; its numbers are multiples of a scale for every 32 inputs where it is of so many bits."""
    weight = torch.randn(outputs, inputs // 32, 32)
    if bits:
        scale = (weight.abs().amax(2, keepdim=True) / 2 ** (bits - 1)).bfloat16().float()
        weight = (weight / scale).round().clamp(1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) * scale
    return packed_weights({"": Packed(("it",), (outputs,))}, {"it": weight.flatten(1).to(dtype)})[""]


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
    parser.add_argument("--bits", type=int, nargs=2, metavar=("LAYERS", "READOUT"), help="weights as codes of 4 or 8 bits")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    run(parser, measured)
