"""Strict config models: accepted values, and one line for each mistake."""

from typing import Annotated, Any, Literal, Self

import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen
from errors import refusal
from pydantic import AllowInfNan, ValidationError, model_validator

from headstart.support.config import RuleError, StrictModel, describe, dotted_keys, parse


class Inner(StrictModel):
    depth: Annotated[int, Ge(1)] = 4
    """Depth."""
    share: Annotated[float, Gt(0), Le(1)] | None = None
    """Share."""
    taps: tuple[int, ...] | Literal["auto"] = "auto"
    """Taps."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.95)
    """Betas."""
    weights: dict[str, Annotated[float, Ge(0)]] = {}
    """Weights."""
    clip: Annotated[float, Gt(0), AllowInfNan(True)] = 1.0
    """Clip."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.depth == 7:
            raise RuleError("depth", f"is not 7 with share={self.share}", self.depth)
        return self


class Outer(StrictModel):
    name: Annotated[str, MinLen(1)]
    """Name."""
    inner: Inner = Inner()
    """Inner."""
    kind: Literal["a", "b"] = "a"
    """Kind."""
    flag: bool = False
    """Flag."""


def test_whole_numbers_fill_floats_and_lists_fill_tuples() -> None:
    inner = parse(Inner, {"share": 1, "taps": [1, 2], "betas": [0, 0.5], "weights": {"x": 1}, "clip": float("inf")})
    assert (inner.share, inner.taps, inner.betas, inner.weights) == (1.0, (1, 2), (0.0, 0.5), {"x": 1.0})
    assert type(inner.share) is float and type(inner.betas[0]) is float
    with pytest.raises(ValidationError, match="frozen"):
        inner.depth = 3  # type: ignore[misc]


@pytest.mark.parametrize(("values", "message"), [
    ({"name": "x", 1: 2}, "unknown key 1; known: name, "),
    ({"name": ""}, "name is text that is not empty; got ''"),
    ({"name": "x", "kind": "c"}, "kind is one of 'a', 'b'; got 'c'"),
    ({"name": "x", "inner": {"depth": 0}}, "inner.depth is a whole number of at least 1; got 0"),
    ({"name": "x", "inner": {"depth": 2.0}}, "inner.depth is a whole number of at least 1; got 2.0"),
    ({"name": "x", "inner": {"depth": True}}, "inner.depth is a whole number of at least 1; got True"),
    ({"name": "x", "inner": {"share": 2}}, "inner.share is a number above 0 and at most 1, or null; got 2"),
    ({"name": "x", "inner": {"share": float("nan")}}, "inner.share is a number above 0 and at most 1, or null; got nan"),
    ({"name": "x", "inner": {"taps": [1, "x"]}}, "inner.taps is a list of whole numbers or 'auto'; got [1, 'x']"),
    ({"name": "x", "inner": {"betas": [0.9]}}, "inner.betas is a list of 2 numbers of at least 0 and below 1; got [0.9]"),
    ({"name": "x", "inner": {"betas": [0, 0, 0]}}, "inner.betas is a list of 2 numbers of at least 0 and below 1; got [0, 0, 0]"),
    ({"name": "x", "inner": {"betas": [0, 1]}}, "inner.betas[1] is a number of at least 0 and below 1; got 1"),
    ({"name": "x", "inner": {"weights": {"y": -1}}}, "inner.weights.y is a number of at least 0; got -1"),
    ({"name": "x", "inner": {"weights": {"y": float("inf")}}}, "inner.weights.y is a number of at least 0; got inf"),
    ({"name": "x", "inner": {"clip": 0}}, "inner.clip is a number above 0 (or .inf); got 0"),
    ({"name": "x", "inner": {"depth": 7}}, "inner.depth is not 7 with share=None; got 7"),
])  # fmt: skip
def test_a_mistake_is_one_line_with_its_key(values: dict[Any, Any], message: str) -> None:
    for where in ("", "heads.mine"):
        text = refusal(parse, Outer, values, where)
        assert len(text) < 200
        if where == "":
            assert text.startswith(message)
        elif not message.startswith(("unknown", "missing")):
            assert text.startswith(f"heads.mine.{message}")
        else:
            assert f"key heads.mine.{message.split()[2].rstrip(';')}" in text


def test_fields_in_words() -> None:
    assert describe(Inner.model_fields["share"].annotation) == "a number above 0 and at most 1, or null"
    assert list(dotted_keys(Outer))[:3] == ["name", "inner", "inner.depth"]
    assert Inner.model_fields["depth"].description == "Depth."
