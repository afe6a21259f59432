"""``headstart inspect`` for a recipe or a checkpoint.

Of a checkpoint, without loading it or its backbone: metadata, and tensor shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from safetensors import SafetensorError, safe_open

from headstart.heads.card import METADATA
from headstart.heads.checkpoint import read_metadata
from headstart.support.errors import UserError
from headstart.support.files import file_hash, settle
from headstart.support.hub import local_or_shipped
from headstart.support.terminal import labelled
from headstart.support.text import gigabytes
from headstart.training.data.data import describe_coverage
from headstart.training.inspect_recipe import inspect_recipe
from headstart.training.recipe.recipe import load_recipe
from headstart.training.recipe.yaml_text import read_extended

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
FLOATS = ("F64", "F32", "F16", "BF16")
PROVENANCE = ("steps", "tokens", "tau", "command", "commit", "versions", "chat_template", "init", "draft_vocabulary")


def inspect_checkpoint(path: str) -> tuple[dict[str, Any], list[RenderableType]]:
    """Return the report on a folder or hub id, and the output to print. Raises UserError for missing or damaged heads."""
    folder, metadata = read_metadata(path)
    file = folder / metadata["weights"]["file"]
    if not file.is_file():
        raise UserError(f"{path} lacks its weights {file.name}; train or fetch the heads again")
    matches = file_hash(file) == metadata["weights"]["sha256"]
    tensors = _tensors(file)
    steps = [path.name.removeprefix("step-") for path in (folder / "state").glob("step-*")]
    report = {
        **{key: metadata[key] for key in ("kind", "arguments", "backbone")},
        "contract": {key: value for key, value in metadata["contract"].items() if key != "weights"},
        "tensors": tensors,
        "parameters": sum(tensor["elements"] for tensor in tensors if tensor["dtype"] in FLOATS),
        "file": file.name,
        "bytes": file.stat().st_size,
        "weights_match_hash": matches,
        "provenance": {key: metadata["provenance"].get(key) for key in PROVENANCE},
        "resumable_steps": sorted(int(step) for step in steps if step.isdecimal()),
    }
    return report, _screen(path, report)


def _tensors(file: Path) -> list[dict[str, Any]]:
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a mapping)
            shapes = {name: (tensor.get_shape(), tensor.get_dtype()) for name, tensor in slices.items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is damaged ({error}); train or fetch the heads again") from None
    return [
        {
            "name": name, "shape": list(shape), "dtype": dtype, "elements": math.prod(shape),
            "bytes": math.prod(shape) * BITS.get(dtype, 8) // 8,
        }
        for name, (shape, dtype) in shapes.items()
    ]  # fmt: skip


def _screen(path: str, report: dict[str, Any]) -> list[RenderableType]:
    provenance, contract = report["provenance"], report["contract"]
    start = provenance["init"]
    arguments = ", ".join(f"{name}={value}" for name, value in report["arguments"].items())
    versions = ", ".join(f"{name} {number}" for name, number in (provenance["versions"] or {}).items())
    trained = [f"{provenance[key]:,} {key}" for key in ("steps", "tokens") if provenance[key] is not None]
    trained += [f"mean acceptance length (tau) {provenance['tau']:.3f}"] if provenance["tau"] is not None else []
    state = "match their hash" if report["weights_match_hash"] else "do NOT match their hash: train or fetch them again"
    tensors = Table.grid(padding=(0, 2), pad_edge=True)
    for tensor in report["tensors"]:
        tensors.add_row(tensor["name"], tensor["dtype"], " x ".join(map(str, tensor["shape"])) or "1")
    rows = [
        ("backbone", f"{report['backbone'] or 'not named'}: {', '.join(f'{key} {value}' for key, value in contract.items())}"),
        ("template", provenance["chat_template"] or "none"),
        ("trained", ", ".join(trained) or "unknown"),
        *([("started", f"from {start['path']}, {start['weights']['file']} {start['weights']['sha256'][:16]}")] if start else []),
        *([("drafted", describe_coverage(provenance["draft_vocabulary"]))] if provenance["draft_vocabulary"] else []),
        *([("command", provenance["command"])] if provenance["command"] else []),
        *([("versions", versions)] if versions else []),
        *([("resumes", f"from step {', '.join(map(str, report['resumable_steps']))}")] if report["resumable_steps"] else []),
    ]
    return [
        labelled([
            ("heads", f"{path}: {report['kind']} ({arguments})"),
            ("size", f"{report['parameters']:,} parameters, {gigabytes(report['bytes'])} in {report['file']}; the weights {state}"),
        ]),
        tensors,
        labelled(rows),
    ]  # fmt: skip


def inspect(target: str, overrides: Sequence[str], row: int, marks: bool) -> tuple[dict[str, Any], list[RenderableType]]:
    """Return the report and the output to print; ``marks``: label tokens in brackets, not in colours. Raises UserError."""
    path = local_or_shipped(target)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        report, screen = inspect_recipe(load_recipe(target, overrides), row, marks)
        extended = [str(file) for file in read_extended(local_or_shipped(path))[1]]
        shown: list[RenderableType] = [labelled([("extends", ", ".join(extended))]), ""] if extended else []
        return {"extends": extended, **report}, [*shown, *screen]
    settle(path)
    if path.is_dir() and not (path / METADATA).is_file():
        wanted = "give a recipe (.yaml), or a folder that training has saved heads in (save.dir)"
        raise UserError(f"{target} is a folder without {METADATA}: neither a recipe nor trained heads; {wanted}")
    if overrides:
        raise UserError(f"{target} is taken for trained heads, which take no overrides ({overrides[0]}); a recipe ends in .yaml")
    return inspect_checkpoint(target)
