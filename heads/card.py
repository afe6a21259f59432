"""The form of a checkpoint's metadata (``headstart.json``), for what is read of it; further keys are free."""

from __future__ import annotations

from typing import Any

from pydantic import FiniteFloat

from headstart.support.json_text import Form


class Weights(Form):
    file: str
    """Name of the weights file, in the checkpoint's folder."""
    sha256: str


class Contract(Form):
    weights: list[FiniteFloat] | None = None
    """Fingerprint of the backbone's weights."""
    fingerprint: int | None = None
    """Version of the fingerprint."""
    precision: str | None = None
    """Dtype of the backbone, and how its weights are quantized."""
    stored: list[str] | None = None
    """How a GGUF file stores the embedding and the output layer, if in blocks."""
    adapter: str | None = None
    tokenizer: str | None = None
    """Digest of the tokenizer's ids of fixed texts."""


class Vocabulary(Form):
    size: int
    vocab_size: int
    training: FiniteFloat
    held_out: FiniteFloat | None


class File(Form):
    file: str
    sha256: str


class Start(Form):
    path: str
    weights: File


class Chat(Form):
    """How conversations become tokens (`ChatSettings.to_card`)."""

    template: str | dict[str, str] | None
    template_kwargs: dict[str, Any]
    eos_token_id: list[int]


class Provenance(Form):
    steps: int | None = None
    tokens: int | None = None
    tau: FiniteFloat | None = None
    acceptance: dict[str, Any] | None = None
    """What drafts were worth in the last evaluation, by score and depth; decoding starts from it."""
    command: str | None = None
    versions: dict[str, Any] | None = None
    chat_template: str | None = None
    """Hash of the chat template."""
    chat: Chat | None = None
    init: Start | None = None
    draft_vocabulary: Vocabulary | None = None


class Card(Form):
    kind: str
    arguments: dict[str, Any]
    backbone: str
    contract: Contract
    weights: Weights
    provenance: Provenance
