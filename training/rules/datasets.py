"""Data presets: datasets that recipes begin with, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.support.errors import UserError
from headstart.training.plan.plan import Machine
from headstart.training.recipe.sections import Data
from headstart.training.rules.methods import Method, own_values, values_on_cpu
from headstart.training.rules.model import ModelFacts
from headstart.training.rules.propose import SERVER, _length_of_run, _micro_batch, _own_data, _takes_layers, _too_large, fits_one

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


Tree = dict[str, Any]


def _own(facts: ModelFacts, method_name: str, method: Method, preset: Preset, machine: Machine) -> Tree:
    values = own_values(method, facts)
    values["backbone"] = {"path": facts.path}
    if machine.accelerator:
        values["backbone"]["dtype"] = values["train"]["precision"] = "bf16"
    else:
        values["drafter"] |= values_on_cpu(method, facts)
    if preset.tokens is not None and facts.packable:
        values["data"]["packing"] = True
    if facts.refusal is not None or (_too_large(facts, machine) and not _takes_layers(method)):
        values["features"] = {"endpoint": SERVER}
    elif machine.processes > 1 and not method.trains_backbone and not fits_one(facts, machine.memory):
        values["backbone"]["shard"] = True
    values["train"] |= _length_of_run(preset, values["train"]["batch_size"])
    values["train"]["micro_batch"] = _micro_batch(method, values["train"]["batch_size"], values["data"]["max_length"], machine.processes)
    values["regenerate"] = {"temperature": 0.7, "max_new_tokens": values["data"]["max_length"] // 2}
    values["save"] = {"dir": f"out/{facts.name}/{method_name}"}
    return values
