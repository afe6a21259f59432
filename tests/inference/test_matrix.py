"""The rule that says which cells of a wide matrix are slow."""

from __future__ import annotations

import pytest
from matrix import mark_slow_cells

pytest_plugins = ["pytester"]
SOURCE = """
import pytest

@pytest.mark.matrix{marker}
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind,arguments", [("medusa", {{}}), ("eagle3", {{}}), ("eagle3", {{"depth": 3}})], ids=["m", "e", "e3"])
@pytest.mark.parametrize("sample", [False, True])
def test_it(family, kind, arguments, sample):
    pass
"""
ALL = {f"{sample}-{kind}-{family}" for sample in ("False", "True") for kind in ("m", "e", "e3") for family in ("llama", "gpt2")}


@pytest.mark.parametrize(
    ("marker", "fast"),
    [
        ("", {"False-m-llama", "True-e-gpt2", "False-e3-llama"}),
        ("('kind', 'family')", {f"{sample}-{rest}" for sample in ("False", "True") for rest in ("m-llama", "e-gpt2", "e3-llama")}),
        ("('arguments', cells=2)", {name for name in ALL if "-e3-" not in name}),
        ("(cells=1)", {"False-m-llama"}),
    ],
)
def test_the_diagonal_is_fast(pytester: pytest.Pytester, marker: str, fast: set[str]) -> None:
    items = pytester.getitems(SOURCE.format(marker=marker))
    mark_slow_cells(items)
    cells = {item.name.removeprefix("test_it[").removesuffix("]"): item.get_closest_marker("slow") is None for item in items}
    assert set(cells) == ALL and {name for name, is_fast in cells.items() if is_fast} == fast


@pytest.mark.parametrize("marker", ["('no_such_axis')", "(rows=3)"])
def test_a_mistaken_marker_is_an_error(pytester: pytest.Pytester, marker: str) -> None:
    items = pytester.getitems(SOURCE.format(marker=marker))
    with pytest.raises(AssertionError):
        mark_slow_cells(items)
