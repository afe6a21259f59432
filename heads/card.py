"""The form of a checkpoint's metadata (``headstart.json``), for what is read of it; further keys are free."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class Weights(_Part):
    file: str
    """Name of the weights file, in the checkpoint's folder."""
    sha256: str
    adapter: str | None = None
    """Hash of the drafter's own adapter, if any."""


class Contract(_Part):
    weights: list[FiniteFloat] | None = None
    """Fingerprint of the backbone's weights."""
    adapter: str | None = None


class Vocabulary(_Part):
    size: int
    vocab_size: int
    training: FiniteFloat
    held_out: FiniteFloat | None


class File(_Part):
    file: str
    sha256: str


class Start(_Part):
    path: str
    weights: File


class Provenance(_Part):
    steps: int | None = None
    tokens: int | None = None
    tau: FiniteFloat | None = None
    command: str | None = None
    versions: dict[str, Any] | None = None
    chat_template: str | None = None
    init: Start | None = None
    draft_vocabulary: Vocabulary | None = None


class Card(_Part):
    kind: str
    arguments: dict[str, Any]
    backbone: str
    contract: Contract
    weights: Weights
    provenance: Provenance


def fault(card: dict[str, Any]) -> str | None:
    """Name the first key that is missing or of another form; None if there is none."""
    try:
        Card.model_validate(card)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))} is {'missing' if first['type'] == 'missing' else 'of another form'}"
    return None
