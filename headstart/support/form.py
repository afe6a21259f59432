"""The form of JSON that is read: what a file must hold, as a pydantic model; further keys are free."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Form(BaseModel):
    """Keys with values of exactly these types."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


def fault(form: type[Form], value: dict[str, Any]) -> str | None:
    """Name the first key that is missing or of another form; None if there is none."""
    try:
        form.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))} is {'missing' if first['type'] == 'missing' else 'of another form'}"
    return None
