"""Quantities of whole models and runs do not pass through fp32, which counts no further than 2^24: embeddings, vocabularies, tokens.

Tensors of 2^31 elements share the memory of a few thousand (stride 0).
"""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from accelerate import Accelerator
from families import tiny
from test_architecture import FOLDERS, sources
from torch import nn

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.layers.start_values import probe
from headstart.support.devices import spread
from headstart.training.data.data import LabelCounts
from headstart.training.inspect_recipe import percentiles
from headstart.training.loop import _sum_over_processes

LARGE = 2**24 + 1
ROWS, COLUMNS = 2**19, 2**12


def matrix(rows: int = ROWS, columns: int = COLUMNS) -> nn.Parameter:
    """A matrix whose elements are their columns, in the memory of a row."""
    return nn.Parameter(torch.arange(columns, dtype=torch.float32).expand(rows, columns), requires_grad=False)


def with_vocabulary(rows: int, columns: int) -> Backbone:
    on = Backbone(tiny("llama"))
    on.embed.weight, on.unembed.weight = matrix(rows, columns), matrix(rows, columns)
    return on


def test_the_fingerprint_of_a_large_vocabulary_reads_its_last_element_and_copies_nothing() -> None:
    on = with_vocabulary(ROWS, COLUMNS)
    on.unembed.weight = nn.Parameter(torch.arange(ROWS, dtype=torch.float32)[:, None].expand(ROWS, COLUMNS), requires_grad=False)
    places = [i * (ROWS * COLUMNS - 1) // 31 for i in range(32)]
    expected = [place % COLUMNS for place in places] + [float(f"{place // COLUMNS:.6g}") for place in places]
    assert on.fingerprint() == expected and expected[31] == COLUMNS - 1


def test_the_heads_that_ship_are_of_the_model_that_ships() -> None:
    from headstart.heads.checkpoint import read_metadata

    on = load_backbone("embedded", dtype="bf16", device="cpu")
    assert [on.match(read_metadata(heads)[1]["contract"]) for heads in ("embedded", "embedded-mlp")] == ["same", "same"]


def test_numbers_at_equal_distances_are_exact() -> None:
    assert spread(0, 2**40, 3) == [0, 2**39, 2**40] and spread(1, 60, 8) == [1, 9, 17, 26, 34, 43, 51, 60] and spread(0, 9, 1) == [0]
    assert probe(Backbone(tiny("llama"))).tokens_BT[0, [0, -1]].tolist() == [0, 60]


def test_nothing_takes_places_from_a_range_of_floating_point_numbers() -> None:
    calls = [
        f"{path.name}:{node.lineno}"
        for folder in FOLDERS
        for path in sources(folder)
        for node in ast.walk(ast.parse(Path(path).read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("linspace", "logspace", "quantile", "nanquantile", "histc")
    ]
    assert not calls, f"{calls}: support/spread.py has exact places; quantile takes at most 2^24 elements, histc counts in floating point"


def test_tokens_of_a_step_are_counted_exactly() -> None:
    accelerator = cast(Accelerator, SimpleNamespace(reduce=lambda tensor, how: 3 * tensor))
    tokens: Any = [torch.tensor([LARGE]), torch.tensor([1])]
    assert _sum_over_processes(accelerator, tokens, [])[0] == [[3 * LARGE], [3]]


def test_coverage_is_of_counts_beyond_fp32() -> None:
    counts_V = torch.tensor([2**40 - 2**10, 2**10])
    assert LabelCounts(counts_V, None).coverage(torch.tensor([0]))["training"] == 1 - 2**-30


def test_percentiles_of_more_rows_than_torch_takes() -> None:
    assert percentiles(torch.arange(2**24 + 2).to(torch.float64))["100"] == LARGE
    assert percentiles(torch.tensor([3.0, 1.0, 2.0, 9.0])) == {"0": 1, "10": 1, "50": 3, "90": 9, "99": 9, "100": 9}
