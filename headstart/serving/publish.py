"""Publish heads: a folder with a model card, without paths of this machine, written to disk or uploaded to the hub.

What is published are heads as Headstart saved or exported them, complete and unchanged since.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id

from headstart.heads.backbone.adapter import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS
from headstart.heads.card import METADATA
from headstart.heads.checkpoint import read_metadata
from headstart.serving.engines import readers
from headstart.serving.layouts.files import PROVENANCE as EXPORTED
from headstart.serving.layouts.files import new_folder, write_folder
from headstart.serving.layouts.layout import Dtype, read_checkpoint
from headstart.serving.model_card import Heads, bench_figures, model_card, scrubbed, training_figures
from headstart.serving.reading import layouts_of
from headstart.support.errors import UserError, cause
from headstart.support.files import file_hash, settle, write_json
from headstart.support.hub import inside, is_hub_id, resolve, upload
from headstart.support.json_text import read_json

SAVED = (
    METADATA, "config.json", "generation_config.json", "*.safetensors", "*.pt", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", f"{ADAPTER}/*", "custom_generate/*.py",
    "custom_generate/*.txt",
)  # fmt: skip
"""Files of a checkpoint; what else stands in a run's folder (state, log, reports) is not published."""
WITH_PATHS = ("config.json", METADATA, EXPORTED, ADAPTER_CONFIG)
"""Files in which paths of this machine may stand."""
AGAIN = "train, export or fetch the heads again"


@dataclass(frozen=True)
class Request:
    """What ``headstart push`` was asked for."""

    heads: Path
    repo: str
    private: bool = False
    dry_run: Path | None = None
    """Write the folder there instead of uploading it."""
    bench: tuple[Path, ...] = ()
    """Reports of ``headstart bench --json``."""
    base_model: str | None = None
    """The backbone's hub id, for heads trained on a local copy."""
    dtype: Dtype = "auto"
    """Of a checkpoint's weights; auto: as they are."""


def publish(request: Request) -> str:
    """Upload the heads, or write the folder; returns where they are. Raises UserError before anything is written, or if the hub refuses."""
    given = {"repository": request.repo} | ({} if request.base_model is None else {"--base-model": request.base_model})
    for what, repo in given.items():
        try:
            validate_repo_id(repo)
        except ValueError as error:
            raise UserError(f"{what} {repo!r} is not a repository's name ({cause(error)}); give USER/NAME") from None
    heads = read_heads(request)
    measured = [bench_figures(file, (heads.folder.resolve().name, heads.run.name)) for file in request.bench]
    card = model_card(heads, request.repo, measured + training_figures(heads.run, heads.card["provenance"]))
    if request.dry_run is not None:
        with new_folder(request.dry_run) as folder:
            _place(heads, card, folder, shutil.copyfile)
        return str(request.dry_run)
    with tempfile.TemporaryDirectory() as name:
        _place(heads, card, Path(name), lambda source, target: target.symlink_to(source.resolve()))
        return upload(Path(name), request.repo, request.private)


def _place(heads: Heads, card: str, folder: Path, place: Callable[[Path, Path], object]) -> None:
    """Fill a folder with the files, by ``place`` those that are not changed, and with the card."""
    backbone, saved = heads.card["backbone"], heads.saved
    known = {name: heads.shown_backbone for name in (backbone, resolve(backbone)) if name}
    for name in heads.files:
        source, target = inside(heads.folder, name), folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.name in WITH_PATHS:
            write_json(target, scrubbed(read_json(source, AGAIN), known))
        else:
            place(source, target)
    (folder / "README.md").write_text(card, encoding="utf-8")
    if saved is not None and saved.dtype != "auto":
        write_folder(folder, scrubbed(saved.config, known), saved.tensors, saved.weights_file)
        stated = read_json(folder / METADATA, AGAIN)
        stated["weights"]["sha256"] = file_hash(folder / saved.weights_file)
        write_json(folder / METADATA, stated)


def read_heads(request: Request) -> Heads:
    """Read the folder. Raises UserError if it is no checkpoint or export, lacks a file or was changed."""
    path = request.heads
    if not path.is_dir():
        raise UserError(f"no folder at {str(path)!r}; give a folder of trained heads or one that headstart export wrote")
    settle(path)
    if (path / METADATA).is_file():
        return _checkpoint(path, request)
    if not (path / EXPORTED).is_file():
        raise UserError(f"{path} is not a checkpoint: it has neither {METADATA} (headstart train) nor {EXPORTED} (headstart export)")
    if request.dtype != "auto":
        raise UserError(f"{path} is an export, whose dtype is that of headstart export --dtype; leave --dtype {request.dtype} out")
    return _exported(path, request)


def _checkpoint(path: Path, request: Request) -> Heads:
    saved = read_checkpoint(str(path)).cast(request.dtype)
    card, method = saved.card, saved.method
    _require_adapter(path / ADAPTER, card["contract"].get("adapter") is not None)
    reading = {engine for layout in layouts_of(method) for engine in layout.engines if engine not in layout.unread(saved)}
    engines = tuple(engine for engine in readers(method) if engine in reading)
    names = {file.relative_to(path) for pattern in SAVED for file in path.glob(pattern) if file.is_file()}
    known = request.base_model or _hub_id(card["backbone"])
    return Heads(path, method, card, known, saved.depth, engines, tuple(sorted(names)), path.resolve(), saved=saved)


def _exported(path: Path, request: Request) -> Heads:
    stated = read_json(path / EXPORTED, AGAIN)
    try:
        trained, adapter, of = stated["heads"], stated["adapter"], Path(stated["heads"]["path"])
        method, depth, engines = stated["method"], int(stated["depth"]), tuple(stated["engines"])
        layout, contract, backbone = stated["layout"], dict(stated["contract"]), str(stated["backbone"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path / EXPORTED} is damaged ({type(error).__name__}: {error}); export the heads again") from None
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{path} lacks its weights; export the heads again")
    _require_adapter(path / ADAPTER, adapter == "keep")
    card: dict[str, Any] = {"arguments": {}, "provenance": {}, "backbone": backbone}
    if (of / METADATA).is_file() and (saved := read_metadata(of)[1])["weights"]["sha256"] == trained["sha256"]:
        card = saved
    names = {file.relative_to(path) for file in path.rglob("*") if file.is_file() and file.name != "README.md"}
    files = tuple(sorted(name for name in names if not any(part.startswith(".") for part in name.parts)))
    known = request.base_model or _hub_id(card["backbone"])
    return Heads(path, method, {**card, "contract": contract}, known, depth, engines, files, of, layout)


def _hub_id(backbone: str) -> str | None:
    return backbone if is_hub_id(backbone) else None


def _require_adapter(folder: Path, wanted: bool) -> None:
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / name).is_file()]
    if wanted and missing:
        raise UserError(f"{folder} lacks {missing[0]} of the adapter that the heads were trained with; train, export or fetch them again")
