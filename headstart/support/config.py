"""Configuration as frozen pydantic models, and errors in one line: the key, what was found, what is allowed, the nearest name.

    class Config(StrictModel):
        depth: Annotated[int, Ge(1)] = 4
        """Tokens drafted beyond the root."""

    config = parse(Config, {"depth": 3}, where="drafter")
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from headstart.support.errors import UserError

T = TypeVar("T", bound="StrictModel")


class StrictModel(BaseModel):
    """No unknown keys, no conversion between types, no change after construction; docstrings of fields are their descriptions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=True)


def parse(model: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """The model of those values; ``where`` is the dotted place they stand at. Raises UserError naming the first fault."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([*([where] if where else []), *map(str, first["loc"])])
        if first["type"] == "extra_forbidden":
            known = list(model.model_fields)
            near = difflib.get_close_matches(str(first["loc"][-1]), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"unknown key {key}{hint} (known: {', '.join(known)})") from None
        raise UserError(f"{key}: {first['msg']}; got {first['input']!r}") from None
