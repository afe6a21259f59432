"""Which cells of parametrized tests are slow: the rule of the marker ``matrix``.

    @pytest.mark.matrix                        the diagonal of all axes is fast: every value of every axis once
    @pytest.mark.matrix("family", "kind")      the diagonal of these two, for every value of the others
    @pytest.mark.matrix(cells=3)               its first three cells only

An axis is one ``parametrize``, named by any of its arguments. Cells off the diagonal are marked ``slow``: `make test` leaves them
out, `make test-all` runs them.
"""

from collections import defaultdict
from collections.abc import Hashable

import pytest


def mark_slow_cells(items: list[pytest.Item]) -> None:
    """Mark the cells of every test marked ``matrix`` that lie off its diagonal."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("matrix"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cells in tests.values():
        marker = cells[0].get_closest_marker("matrix")
        assert marker is not None and set(marker.kwargs) <= {"cells"}, marker
        places = [place_of_each(cells, axis) for axis in axes_of(cells[0], marker.args)]
        sizes = [max(one) + 1 for one in places]
        steps = min(max(sizes), marker.kwargs.get("cells", max(sizes)))
        diagonal = {tuple(step % size for size in sizes) for step in range(steps)}
        for cell, place in zip(cells, zip(*places, strict=True), strict=True):
            if place not in diagonal:
                cell.add_marker(pytest.mark.slow)


def axes_of(cell: pytest.Function, named: tuple[str, ...]) -> list[list[str]]:
    """The arguments of each ``parametrize`` of the test that is named; of all when none is."""
    axes = []
    for parametrize in cell.iter_markers("parametrize"):
        names = parametrize.args[0]
        axes.append([name.strip() for name in (names.split(",") if isinstance(names, str) else names)])
    assert set(named) <= {name for axis in axes for name in axis}, f"{cell.nodeid} has no axes {named}"
    return [axis for axis in axes if not named or set(named) & set(axis)]


def place_of_each(cells: list[pytest.Function], axis: list[str]) -> list[int]:
    """The place of each cell's values along the axis."""
    places: dict[tuple[Hashable, ...], int] = {}
    for cell in cells:
        places.setdefault(key(cell, axis), len(places))
    return [places[key(cell, axis)] for cell in cells]


def key(cell: pytest.Function, axis: list[str]) -> tuple[Hashable, ...]:
    values = (cell.callspec.params[name] for name in axis)
    return tuple(value if isinstance(value, str | int | float | None) else id(value) for value in values)
