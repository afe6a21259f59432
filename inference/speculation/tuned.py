"""Results of `headstart tune`, stored next to the checkpoint in a file with an entry for each machine, dtype and backbone.

For heads from the hub, the file is in the user's cache folder, since hub snapshots must not be modified.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.adaptive.calibration import Calibration
from headstart.inference.adaptive.latency import CostModel
from headstart.support.devices import processor
from headstart.support.errors import UserError
from headstart.support.files import cache_folder, write_json
from headstart.support.json_text import read_json

FILE = "tuned.json"
FORMAT = 3
AGAIN = "delete it, and run headstart tune again"
GREEDY, SAMPLED = "greedy", "sampled"


@dataclass(frozen=True)
class Tuned:
    """One entry: seconds of a forward pass by context, rows and nodes, and calibration tables."""

    curves: dict[str, Any]
    calibration: dict[str, dict[str, list[dict[str, Any]]]]
    """Tables by mode (greedy or sampled) and source name."""
    details: dict[str, Any]
    """Other results, for information only: drafting times, versions."""

    def cost_model(self) -> CostModel:
        return CostModel.from_json(self.curves)

    def calibration_of(self, source: str, sampled: bool) -> Calibration:
        """The calibration of a source; an empty one if it was not measured."""
        return Calibration.from_json(self.calibration[SAMPLED if sampled else GREEDY].get(source, []))


def key(backbone: Backbone) -> str:
    """The key of an entry: machine, precision, model and its adapter."""
    adapter = "" if backbone.adapter is None else f" | adapter {backbone.adapter_digest}"
    return f"{machine(backbone.device)} | {backbone.precision} | {backbone.name}{adapter}"


def machine(device: torch.device) -> str:
    """The name of a GPU, or that of the processor with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name, instructions = processor("model name") or platform.machine(), torch.backends.cpu.get_cpu_capability()
    return f"{device.type} {name} {instructions} {torch.get_num_threads()} threads"


def place(path: str | Path | None, backbone: Backbone) -> Path:
    """The path of the file for heads at ``path`` (None: a backbone without heads)."""
    if path is not None and Path(path).is_dir():
        return Path(path) / FILE
    name = str(path if path is not None else backbone.name or "backbone").strip("/").replace("/", "--")
    return cache_folder() / name / FILE


def read_tuned(path: str | Path | None, backbone: Backbone) -> Tuned | None:
    """Read the entry for this machine and backbone; None if there is none. Raises UserError if the file is damaged."""
    file = place(path, backbone)
    if not file.is_file():
        return None
    entry = read_entries(file).get(key(backbone))
    if entry is None:
        return None
    try:
        tuned = Tuned(entry["curves"], entry["calibration"], entry["details"])
        tuned.cost_model()
        for mode in (GREEDY, SAMPLED):
            for tables in tuned.calibration[mode].values():
                Calibration.from_json(tables)
        return tuned
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(file, error) from None


def write_tuned(path: str | Path | None, backbone: Backbone, tuned: Tuned) -> Path:
    """Add or replace the entry for this machine and backbone; the file is replaced atomically."""
    file = place(path, backbone)
    entries = read_entries(file) if file.is_file() else {}
    entries[key(backbone)] = vars(tuned)
    write_json(file, {"format": FORMAT, "entries": entries}, indent=1)
    return file


def read_entries(file: Path) -> dict[str, Any]:
    """Read the entries by machine. Raises UserError if the file is damaged."""
    try:
        content = read_json(file, AGAIN)
        if content["format"] != FORMAT:
            version = content["format"]
            raise UserError(f"{file} is of format {version}; this version reads format {FORMAT}: delete it, and run headstart tune again")
        return dict(content["entries"])
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> UserError:
    return UserError(f"{file} is damaged ({type(error).__name__}: {error}); {AGAIN}")
