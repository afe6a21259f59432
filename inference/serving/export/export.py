"""Export heads: choose the layout, check them, write the folder, and say how engines start with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headstart import __version__
from headstart.heads.backbone.adapter import FOLDER as ADAPTER
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.checkpoint import recipe_section
from headstart.inference.serving.engines import ENGINES, METHODS, readers, require_engine
from headstart.inference.serving.export.adapter import BACKBONE, keep, merge, require_keepable
from headstart.inference.serving.formats.format import Format, find_format, formats, layouts_of, require_sound
from headstart.inference.serving.launch import Served, launch_line
from headstart.inference.serving.layout import new_folder, require_finite, require_new, write_files
from headstart.inference.serving.quantize import READ, How, quantize_notes, quantized, require_quantizable
from headstart.inference.serving.trained import Dtype, Trained, read_trained
from headstart.support.errors import UserError

PROVENANCE = "headstart_export.json"
"""File of an exported folder that says what was exported, for `headstart verify`."""
TEMPLATE = "chat_template.jinja"
"""File of a chat template that the recipe has set."""
FORMAT = 1


@dataclass(frozen=True)
class Request:
    """What ``headstart export`` was asked for."""

    heads: str
    to: str
    """An engine or a layout."""
    out: Path
    backbone: str | None = None
    """From where engines load the backbone (None: from where it was trained)."""
    dtype: Dtype = "auto"
    adapter: Literal["merge", "keep"] = "merge"
    quantize: How | None = None
    """Store the weights of linear layers in 8 bits."""


def export(request: Request) -> dict[str, Any]:
    """Write heads in the layout of an engine, into a new folder, and return a report: layout, changes, engines and launch lines.

    Raises UserError, before anything is written, for an unknown format, heads that it or the engine cannot hold, damaged heads, a folder
    that is not empty, or a backbone that is missing or another one.
    """
    if request.to not in (known := formats()) and request.to not in ENGINES:
        find_format(request.to)
    require_new(request.out)
    trained = read_trained(request.heads, request.backbone)
    layout, engine = _chosen(request.to, trained, known)
    rank = _rank(trained, request.adapter, engine)
    if request.quantize is not None:
        require_quantizable(request.quantize, trained.method, layout.name, engine)
    if trained.adapter is not None and request.adapter == "merge":
        trained = replace(trained, served=str(request.out.absolute() / BACKBONE))
    require_sound(trained)
    require_finite(trained.tensors)
    with new_folder(request.out) as folder:
        if request.quantize is None:
            layout.write(trained, request.dtype, folder)
        else:
            write_files(quantized(layout.lay_out(trained, request.dtype), request.quantize), folder)
        if trained.adapter is not None:
            (merge if request.adapter == "merge" else keep)(trained, folder)
        config = json.loads((folder / "config.json").read_text("utf-8"))
        served = _served(trained, request, config, rank)
        if (template := recipe_section(trained.card["provenance"], "data").get("chat_template")) is not None:
            (folder / TEMPLATE).write_text(template, encoding="utf-8")
        report = _report(trained, request, layout, served, engine)
        stated = {key: value for key, value in report.items() if key not in ("launch", "notes")}
        (folder / PROVENANCE).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    return report


def _chosen(to: str, trained: Trained, known: dict[str, Format]) -> tuple[Format, str | None]:
    """Return the layout and, if one was asked for, the engine. Raises UserError if either cannot hold the heads."""
    if to in ENGINES:
        layouts = layouts_of(trained.method)
        require_engine(to, trained.method, layouts)
        layout = next(known[name] for name in layouts if to in known[name].engines)
        if reason := layout.unread(trained).get(to):
            raise UserError(f"{ENGINES[to]} does not read {trained.path}: {reason}; --to {layout.name} writes the layout all the same")
        return layout, to
    known[to].require(trained)
    return known[to], None


def _rank(trained: Trained, how: str, engine: str | None) -> int:
    """Return the rank of an adapter that is kept; 0: none is."""
    if trained.adapter is None:
        if how == "keep":
            raise UserError(f"{trained.path} was trained without an adapter on the backbone; leave out --adapter keep")
        return 0
    return require_keepable(trained, engine) if how == "keep" else 0


def _served(trained: Trained, request: Request, config: dict[str, Any], rank: int) -> Served:
    out = str(request.out.absolute())
    adapter = f"{out}/{ADAPTER}" if rank else None
    return Served(trained.method, out, trained.served, trained.depth, config, adapter, rank)


def _report(trained: Trained, request: Request, layout: Format, served: Served, engine: str | None) -> dict[str, Any]:
    unread, asked = layout.unread(trained), layout.engines if engine is None else (engine,)
    if served.adapter is not None:
        asked = ("vllm",)
    reading = {name: entry for name, entry in readers(trained.method).items() if name in asked and name not in unread}
    same = "the checkpoint's own layout: names, shapes, values and layer numbers checked"
    notes = layout.notes(trained) or [same + (", nothing changed" if request.quantize is None else "")]
    notes += [f"not for {ENGINES[name]}: {reason}" for name, reason in unread.items() if name in asked]
    if find_gguf(trained.backbone) is not None:
        notes.append("the backbone is a GGUF file, which few engines load; the heads fit the model's safetensors too (--backbone)")
    if request.quantize is not None:
        reading = {name: entry for name, entry in reading.items() if (name, trained.method) in READ}
        notes += quantize_notes(request.quantize, trained.method)
    notes += _template_notes(trained)
    if request.dtype != "auto":
        notes.append(f"weights are written in {request.dtype}")
    return {
        "format": FORMAT,
        "layout": layout.name,
        "method": trained.method,
        "headstart": __version__,
        "heads": {
            "path": str(Path(trained.path).absolute()) if trained.folder == Path(trained.path).expanduser() else trained.path,
            "kind": trained.card["kind"],
            "sha256": trained.card["weights"]["sha256"],
        },
        "backbone": served.backbone,
        "engines": list(reading),
        "contract": trained.card["contract"],
        "dtype": request.dtype,
        "quantize": request.quantize,
        "depth": trained.depth,
        "adapter": None if trained.adapter is None else request.adapter,
        "notes": notes,
        "launch": {name: {"line": launch_line(name, served), "support": f"{ENGINES[name]}, {entry}"} for name, entry in reading.items()},
    }


def _template_notes(trained: Trained) -> list[str]:
    """Say what engines do not know of the chat template that the heads were trained with."""
    data = recipe_section(trained.card["provenance"], "data")
    own = f"trained with a chat template of the recipe's, written as {TEMPLATE}: let the engine ask with it (--chat-template)"
    given = f"trained with variables of the chat template: send them with requests (chat_template_kwargs {data.get('template_kwargs')})"
    return [own] * (data.get("chat_template") is not None) + [given] * bool(data.get("template_kwargs"))


def lines(report: dict[str, Any], out: Path) -> list[str]:
    """Return a report as text."""
    first = f"{METHODS[report['method']]}: {report['heads']['path']} written to {out}, layout {report['layout']}"
    notes = [f"  {note}" for note in report["notes"]]
    launch = [line for one in report["launch"].values() for line in ("", one["support"], f"  {one['line']}")]
    return [first, *notes, *launch]
