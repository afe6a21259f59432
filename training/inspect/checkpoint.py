"""What trained heads are, without loading them or their backbone: the card, the tensors' shapes, what was measured for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headstart.heads.checkpoint import read_metadata
from headstart.inference.speculation.tuned import FILE as TUNED
from headstart.support.errors import UserError
from headstart.support.files import file_hash
from headstart.support.units import gigabytes

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}


def describe(what: str) -> tuple[dict[str, Any], list[str]]:
    """Of a folder or hub id, as JSON holds it and as lines. Raises UserError for heads that are not there or are damaged."""
    folder, card = read_metadata(what)
    file = folder / card["weights"]["file"]
    if not file.is_file():
        raise UserError(f"{what} lacks its weights {file.name}; train or fetch the heads again")
    intact = file_hash(file) == card["weights"]["sha256"]
    tensors = _tensors(file)
    trained = card["provenance"]
    found = {
        "kind": card["kind"],
        "arguments": card["arguments"],
        "backbone": card["backbone"],
        "contract": {key: value for key, value in card["contract"].items() if key != "weights"},
        "tensors": tensors,
        "parameters": sum(tensor["count"] for tensor in tensors if tensor["dtype"] in ("F64", "F32", "F16", "BF16")),
        "file": file.name,
        "bytes": file.stat().st_size,
        "intact": intact,
        "provenance": {key: trained.get(key) for key in ("steps", "tokens", "tau", "command", "commit", "versions", "chat_template")},
        "resumable": sorted(int(path.name.removeprefix("step-")) for path in (folder / "state").glob("step-*")),
        "tuned": _tuned(folder / TUNED),
    }
    return found, _lines(what, found)


def _tensors(file: Path) -> list[dict[str, Any]]:
    try:
        with safe_open(file, "pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (a file is no mapping)
            shapes = {name: (part.get_shape(), part.get_dtype()) for name, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is damaged ({error}); train or fetch the heads again") from None
    found = []
    for name, (shape, dtype) in shapes.items():
        count = 1
        for side in shape:
            count *= side
        found.append({"name": name, "shape": list(shape), "dtype": dtype, "count": count, "bytes": count * BITS.get(dtype, 8) // 8})
    return found


def _tuned(file: Path) -> list[str]:
    """The machines that `headstart tune` has measured."""
    if not file.is_file():
        return []
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))["entries"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}: {error}); delete it, and run headstart tune again") from None


def _lines(what: str, found: dict[str, Any]) -> list[str]:
    made, contract = found["provenance"], found["contract"]
    said = ", ".join(f"{name}={value}" for name, value in found["arguments"].items())
    width = max((len(tensor["name"]) for tensor in found["tensors"]), default=0)
    rows = [f"  {one['name']:<{width}}  {one['dtype']:<4}  {' x '.join(map(str, one['shape'])) or '1'}" for one in found["tensors"]]
    trained = [f"{made[key]:,} {key}" for key in ("steps", "tokens") if made[key] is not None]
    trained += [f"tau {made['tau']:.3f}"] if made["tau"] is not None else []
    state = f"weights {'are those of the card' if found['intact'] else 'are NOT those of the card: train or fetch the heads again'}"
    return [
        f"heads     {what}: {found['kind']} ({said})",
        f"size      {found['parameters']:,} parameters, {gigabytes(found['bytes'])} in {found['file']}; {state}",
        *rows,
        f"backbone  {found['backbone'] or 'not named'}: {', '.join(f'{key} {value}' for key, value in contract.items())}",
        f"template  {made['chat_template'] or 'none'}",
        f"trained   {', '.join(trained) or 'not said'}",
        *([f"command   {made['command']}"] if made["command"] else []),
        *([f"versions  {', '.join(f'{name} {number}' for name, number in made['versions'].items())}"] if made["versions"] else []),
        *([f"resumes   from step {', '.join(map(str, found['resumable']))}"] if found["resumable"] else []),
        *(f"tuned     {machine}" for machine in found["tuned"]),
    ]
