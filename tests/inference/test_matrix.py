"""The rule that says which cells of a wide matrix are slow."""

import pytest
from matrix import mark_slow_cells

pytest_plugins = ["pytester"]
SOURCE = """
@pytest.mark.matrix{marker}
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind,arguments", [("medusa", {{}}), ("eagle3", {{}}), ("eagle3", {{"depth": 3}})], ids=["m", "e", "e3"])
@pytest.mark.parametrize("sample", [False, True])
def test_{number}(family, kind, arguments, sample):
    pass
"""
ALL = {f"{sample}-{kind}-{family}" for sample in ("False", "True") for kind in ("m", "e", "e3") for family in ("llama", "gpt2")}
FAST = {
    "": {"False-m-llama", "True-e-gpt2", "False-e3-llama"},
    "('kind', 'family')": {f"{sample}-{rest}" for sample in ("False", "True") for rest in ("m-llama", "e-gpt2", "e3-llama")},
    "('arguments', cells=2)": {name for name in ALL if "-e3-" not in name},
    "(cells=1)": {"False-m-llama"},
}
MISTAKEN = ("('no_such_axis')", "(rows=3)")


def test_the_diagonal_is_fast_and_a_mistaken_marker_an_error(pytester: pytest.Pytester) -> None:
    markers = [*FAST, *MISTAKEN]
    items = pytester.getitems("import pytest\n" + "".join(SOURCE.format(marker=one, number=i) for i, one in enumerate(markers)))
    for number, marker in enumerate(markers):
        cells = {item.name.partition("[")[2].removesuffix("]"): item for item in items if item.name.startswith(f"test_{number}[")}
        assert set(cells) == ALL
        if marker in MISTAKEN:
            with pytest.raises(AssertionError):
                mark_slow_cells([*cells.values()])
            continue
        mark_slow_cells([*cells.values()])
        assert {name for name, item in cells.items() if item.get_closest_marker("slow") is None} == FAST[marker], marker
