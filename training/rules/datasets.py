"""Data presets: datasets that recipes begin with, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.support.errors import UserError
from headstart.training.data.rows import names_file, read_rows
from headstart.training.recipe.sections import Data

HELD: int = Data.model_fields["eval_rows"].default
"""Rows that are held out where there are plenty."""


@dataclass(frozen=True)
class Preset:
    data: dict[str, Any]
    """Values of the section ``data``."""
    rows: int | None
    """Rows that are trained on; None if only the user knows."""
    about: str
    """Origin, size and licence, for headers."""
    tokens: int | None = None
    """About how many tokens a packed preset has."""

    @property
    def own(self) -> bool:
        """Whether it is the user's own data."""
        return self.rows is None and self.tokens is None


ULTRACHAT = "HuggingFaceH4/ultrachat_200k"
PERFECT_BLEND = "mlabonne/open-perfectblend"


PRESETS: Mapping[str, Preset] = {
    "ultrachat": Preset(
        {"train": ULTRACHAT, "split": "train_sft", "eval": ULTRACHAT, "eval_split": "test_sft"}, 207_865,
        "UltraChat (MIT), 207,865 conversations of several turns",
    ),
    "sharegpt": Preset(
        {"train": "Aeala/ShareGPT_Vicuna_unfiltered", "format": "conversations", "limit": 68_000}, 68_000,
        "ShareGPT (licence unclear, for research), 68,000 conversations; 64 are held out to evaluate on",
    ),
    "perfectblend": Preset(
        {"train": PERFECT_BLEND, "format": "conversations", "limit": 500_000}, 500_000,
        "Open-PerfectBlend (Apache-2.0), 500,000 conversations of chat, mathematics, code and instructions; 64 are held out",
    ),
    "mix": Preset(
        {"train": [
            {"path": ULTRACHAT, "weight": 2, "split": "train_sft"},
            {"path": PERFECT_BLEND, "weight": 3, "format": "conversations", "limit": 300_000},
         ]}, 507_865,
        "UltraChat (MIT) and Open-PerfectBlend (Apache-2.0), two samples of the one to three of the other; 64 are held out",
    ),
    "text": Preset(
        {"train": "Salesforce/wikitext", "subset": "wikitext-103-raw-v1", "format": "text", "column": "text", "loss_on": "all",
         "eval": "Salesforce/wikitext", "eval_split": "validation", "eval_rows": 400}, None,
        "Wikitext-103 (CC BY-SA), about 118 million tokens, packed, for a model without a chat template", 118_000_000,
    ),
}  # fmt: skip


def find_preset(name: str) -> Preset:
    """Return a preset, or one for a file or dataset of the user's own. Raises UserError for empty text, or a file that cannot be read."""
    if not name.strip():
        raise UserError(f"--data is one of {', '.join(PRESETS)}, a file of rows, or the name of a dataset; got {name!r}")
    return PRESETS.get(name) or _own_data(name)


def _own_data(name: str) -> Preset:
    """Return a preset for the user's data; of a file with few rows every tenth is held out."""
    count = len(read_rows(name, limit=10 * HELD)) if names_file(name) else 10 * HELD
    held = min(HELD, max(1, count // 10))
    fewer = {"eval_rows": held} if held < HELD else {}
    return Preset({"train": name} | fewer, None, f"{name}, of which {held} row{'s are' if held > 1 else ' is'} held out to evaluate on")
