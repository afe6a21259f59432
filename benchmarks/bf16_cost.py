"""Measures what passes in bf16 on a CPU are made of, and counts the numbers that depend on other rows.

    python benchmarks/bf16_cost.py [--threads 1] [--json FILE]

Prints JSON. ``products``: microseconds of packed weights times 1 to 24 rows in fp32 and bf16, and how many numbers of the first row
differ from those of that row alone. ``attention``: microseconds of one layer with torch's kernel and with sums in fp64, for one query and
for 12, and how many numbers of the 12 differ from those of each query alone among the keys that it sees. ``keys``: microseconds of
writing 12 entries of 8 rows to a KV cache and of moving 4 of each, by the functions in use and by `scatter_`. Least of many, in turns; with
one thread, times of the thread's own CPU, so that other programs affect them little.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from program import options, run
from torch import Tensor

from headstart.heads.backbone.tree_attention import attend, attend_exactly
from headstart.heads.layers.ragged import move, put
from headstart.inference.capture.onednn import DTYPES
from headstart.inference.capture.packed import multiply, pack
from headstart.support.dtypes import dtype_name

WEIGHTS = ((64, 64), (2048, 384), (4096, 384), (2048, 1024), (1024, 4096))
ROWS = (1, 4, 12, 24)
SHAPES = ((6, 2, 64), (32, 8, 128))
"""Of attention: query heads, key heads, width of a head."""
KEYS, NODES = (128, 500, 2000, 8000), 12
TURNS = 30


def least_us(ways: dict[Any, Callable[[], object]], threads: int) -> dict[Any, float]:
    """The least microseconds of each, in turns."""
    clock, least = time.thread_time if threads == 1 else time.perf_counter, dict.fromkeys(ways, math.inf)
    for _ in range(TURNS):
        for name, way in ways.items():
            start = clock()
            way()
            least[name] = min(least[name], clock() - start)
    return {name: round(1e6 * seconds, 1) for name, seconds in least.items()}


def products(threads: int) -> list[dict[str, Any]]:
    rows = []
    for outputs, inputs in WEIGHTS:
        for dtype in DTYPES:
            weight = pack([torch.randn(outputs, inputs).to(dtype)], [None])
            x_RK = torch.randn(max(ROWS), inputs).to(dtype)
            alone, first = multiply(x_RK[:1], weight), {n: multiply(x_RK[:n], weight)[:1] for n in ROWS}
            ways = {n: partial(multiply, x_RK[:n], weight) for n in ROWS}
            measured = {"us": least_us(ways, threads), "differing": {n: int((one != alone).sum()) for n, one in first.items()}}
            rows.append({"weight": [outputs, inputs], "dtype": dtype_name(dtype), **measured})
    return rows


def attention(threads: int) -> list[dict[str, Any]]:
    rows = []
    for heads, groups, width in SHAPES:
        for keys in KEYS:
            tree = [one.bfloat16() for one in (torch.randn(1, n, s, width) for n, s in ((heads, NODES), (groups, keys), (groups, keys)))]
            mask = chain_mask(keys)
            parts = [(tree[0][:, :, n : n + 1], *(one[:, :, : keys - NODES + n + 1] for one in tree[1:])) for n in range(NODES)]
            found: dict[str, Any] = {"heads": [heads, groups, width], "keys": keys}
            timed: dict[str, Callable[[], object]] = {}
            for name, way in (("kernel", attend), ("fp64", attend_exactly)):
                alone = [way(*part, plain_mask(part[1].shape[2])) for part in parts]
                found[f"{name}_differing"] = int((torch.cat(alone, 2) != way(*tree, mask)).sum())
                timed |= {f"{name}_us_1": partial(way, *parts[-1], plain_mask(keys)), f"{name}_us_{NODES}": partial(way, *tree, mask)}
            rows.append(found | least_us(timed, threads))
    return rows


def keys(threads: int) -> list[dict[str, Any]]:
    rows, slots = 8, 512
    write_BN, from_BP, to_BP = (torch.arange(start, start + n).expand(rows, n) for start, n in ((100, NODES), (200, 4), (120, 4)))
    found = []
    for heads, width in ((2, 64), (8, 128)):
        for dtype in (torch.float32, torch.bfloat16):
            store, new = (torch.randn(rows, heads, n, width).to(dtype) for n in (slots, NODES))
            stores = store.expand(24, *store.shape).clone()
            index, source, target = (one[:, None, :, None].expand(-1, heads, -1, width) for one in (write_BN, from_BP, to_BP))
            sources, targets = (one.expand(24, *one.shape) for one in (source, target))
            ways = {
                "write": partial(put, store, new, write_BN), "write, scatter_": partial(store.scatter_, 2, index, new),
                "move": partial(move, stores, from_BP, to_BP),
                "move, scatter_": lambda s=stores, a=sources, b=targets: s.scatter_(3, b, s.gather(3, a)),
            }  # fmt: skip
            found.append({"heads": [heads, width], "dtype": dtype_name(dtype), "us": least_us(ways, threads)})
    return found


def plain_mask(keys: int) -> Tensor:
    """The additive mask of a query that sees all keys."""
    return torch.zeros(1, 1, 1, keys).bfloat16()


def chain_mask(keys: int) -> Tensor:
    """The additive mask of a chain of nodes, the last of the keys."""
    seen = torch.ones(NODES, keys, dtype=torch.bool).tril(keys - NODES)
    return torch.zeros(1, 1, NODES, keys).masked_fill(~seen, torch.finfo(torch.bfloat16).min).bfloat16()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.no_grad():
        parts = {"products": products, "attention": attention, "keys": keys}
        return {"threads": args.threads, **{name: part(args.threads) for name, part in parts.items()}}


if __name__ == "__main__":
    run(options(__doc__), measure)
