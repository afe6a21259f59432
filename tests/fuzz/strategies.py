# ruff: noqa: E501
"""What inputs are made of: awkward values, and documents with a part replaced, removed or cut."""

import copy
import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""Inputs of each test in a longer run (`make fuzz`); 0: a few, the same ones each time."""


def profile(few: int) -> settings:
    """Settings of a test: ``few`` inputs in `make test`."""
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(max_examples=EXAMPLES or few, derandomize=not EXAMPLES, deadline=None, database=None, suppress_health_check=quiet)


TEXTS = st.one_of(
    st.text(max_size=8),
    st.text(st.characters(categories=["Cs", "Cc", "Lu", "So"]), max_size=6),
    st.sampled_from(["", "../../etc", "a.b", "~x", "null", "[", "{", "*a", "!!int x", "1e999", "x" * 5000, "/dev/zero", ".", "..", "/proc/x", "auto", "\ud800"]),
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**32, 2**63, -(2**63) - 1, 10**30, 10**400]),
    st.floats(),
    st.sampled_from([1e308, -1e308, 1e-320, 5e-324]),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)


def nested(value: Any, depth: int, mapping: bool) -> Any:
    """A value inside ``depth`` lists or mappings."""
    for _ in range(depth):
        value = {"a": value} if mapping else [value]
    return value


VALUES = st.one_of(
    LEAVES,
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6),
    st.builds(nested, LEAVES, st.sampled_from([50, 99, 120, 600]), st.booleans()),
)


def paths(tree: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of a document, the whole first."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [prefix, *(place for key, child in children for place in paths(child, (*prefix, key)))]


def replaced(tree: Any, place: tuple[Any, ...], value: Any, remove: bool) -> Any:
    """A copy of a document with ``value`` at a place, or with nothing there."""
    if not place:
        return value
    tree = copy.deepcopy(tree)
    node = tree
    for step in place[:-1]:
        node = node[step]
    if remove:
        del node[place[-1]]
    else:
        node[place[-1]] = value
    return tree


@st.composite
def changed(draw: st.DrawFn, tree: Any, most: int = 2) -> Any:
    """A document with up to ``most`` places changed, often one that JSON cannot hold."""
    for _ in range(draw(st.integers(1, most))):
        place = draw(st.sampled_from(paths(tree)))
        added = isinstance(tree, dict) and not place and draw(st.booleans())
        tree = {**tree, draw(TEXTS): draw(VALUES)} if added else replaced(tree, place, draw(VALUES), bool(place) and draw(st.booleans()))
    return tree


def as_json(value: Any) -> bytes:
    """JSON with escapes for what UTF-8 cannot hold."""
    return json.dumps(value).encode()


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file cut off, with some bytes replaced, or with some put in."""
    start = draw(st.integers(0, len(content)))
    end = draw(st.integers(start, min(len(content), start + 20)))
    odd = [b"[" * 3000, b"9" * 5000, b'"\\ud800"', b"\0", b"{}", b"[]", b"-1", b"NaN", b"null", b"\xef\xbb\xbf"]
    middle = draw(st.one_of(st.binary(max_size=6), st.sampled_from(odd)))
    return content[:start] + middle + (content[end:] if draw(st.booleans()) else b"")


def documents(tree: Any) -> st.SearchStrategy[bytes]:
    """A JSON document with places changed, or damaged as a file."""
    return st.one_of(changed(tree).map(as_json), changed(tree).map(as_json), damaged(as_json(tree)))
