"""The folder that is published: heads as Headstart saved or exported them, complete and unchanged since, without paths of this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load_file

from headstart.heads.backbone.adapter import CONFIG as ADAPTER_CONFIG
from headstart.heads.backbone.adapter import FOLDER as ADAPTER
from headstart.heads.backbone.adapter import WEIGHTS as ADAPTER_WEIGHTS
from headstart.heads.checkpoint import METADATA, read_metadata
from headstart.heads.lora import FOLDER as DRAFTER_ADAPTER
from headstart.inference.serving.checkpoint import Checkpoint
from headstart.inference.serving.engines import method_of, readers
from headstart.inference.serving.export import PROVENANCE as EXPORTED
from headstart.inference.serving.layouts.layout import layouts_of
from headstart.support.errors import UserError
from headstart.support.files import file_hash
from headstart.support.hub import is_hub_id
from headstart.support.json_text import read_json
from headstart.support.transaction import settle

SAVED = (
    METADATA, "config.json", "generation_config.json", "*.safetensors", "*.pt", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", f"{ADAPTER}/*", f"{DRAFTER_ADAPTER}/*", "custom_generate/*.py",
    "custom_generate/*.txt",
)  # fmt: skip
"""Files of a checkpoint; what else stands in a run's folder (state, log, reports) is not published."""
PATH = re.compile(r"""(?<![\w.:/~-])(?:~[\w.-]*|[A-Za-z]:)?[/\\](?:[^\s/\\'",:=]+[/\\])*([^\s/\\'",:=]+)[/\\]?""")
"""An absolute path in a command; the group is its last part."""
START = re.compile(r"[/~]|[A-Za-z]:[/\\]")
HOSTS = ("endpoint", "_name_or_path")
"""Keys whose values may name a host or folder and say nothing about the heads."""
TEXTS = ("template", "chat_template", "template_kwargs")
"""Keys of chat templates, in which ``</think>`` and ``/no_think`` are no paths."""


@dataclass(frozen=True)
class Heads:
    """Heads to publish."""

    folder: Path
    method: str
    """See `engines.METHODS`, or the kind of code of the user's own."""
    backbone: str
    """As the files name it; it may be a path of this machine."""
    base_model: str | None
    """The backbone's hub id, if it is known."""
    depth: int
    engines: tuple[str, ...]
    """Engines that read the heads, exported first where their method needs it."""
    config: dict[str, Any]
    files: tuple[Path, ...]
    """Relative to the folder."""
    layout: str | None = None
    """Of an exported folder; None: a checkpoint."""
    quantize: str | None = None
    """Of an exported folder with weights in 8 bits: int8 or fp8."""
    names: tuple[str, ...] = ()
    """Under which names a report of `headstart bench` may list them."""
    arguments: dict[str, Any] = field(default_factory=dict)
    contract: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    """Of the checkpoint; empty if it is not known."""
    run: Path | None = None
    """The folder of the training run, if it is there."""

    @property
    def shown_backbone(self) -> str:
        """The backbone's name without a path."""
        return self.base_model or last_part(self.backbone) or "a backbone that is not named"

    @property
    def rank(self) -> int:
        """The rank of the backbone's adapter; 0 without one."""
        file = self.folder / ADAPTER / ADAPTER_CONFIG
        if not file.is_file():
            return 0
        config = _json(file)
        return max([int(config.get("r") or 0), *map(int, (config.get("rank_pattern") or {}).values())])


def read_heads(path: Path, base_model: str | None) -> Heads:
    """Read the folder. ``base_model``: the backbone's hub id, for heads trained on a local copy.

    Raises UserError if it is no checkpoint or export, lacks a file or was changed, or for an invalid hub id.
    """
    if base_model is not None:
        require_repo_id("--base-model", base_model)
    if not path.is_dir():
        raise UserError(f"no folder at {str(path)!r}; give a folder of trained heads or one that headstart export wrote")
    settle(path)
    if (path / METADATA).is_file():
        return _checkpoint(path, base_model)
    if (path / EXPORTED).is_file():
        return _exported(path, base_model)
    raise UserError(f"{path} is not a checkpoint: it has neither {METADATA} (headstart train) nor {EXPORTED} (headstart export)")


def require_repo_id(what: str, repo: str) -> None:
    """Raise UserError unless ``repo`` is a valid name of a repository."""
    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise UserError(f"{what} {repo!r} is not a repository's name ({' '.join(str(error).split())}); give USER/NAME") from None


def _checkpoint(path: Path, base_model: str | None) -> Heads:
    _, card = read_metadata(path)
    _require_file(path / card["weights"]["file"], card["weights"]["sha256"])
    for folder, wanted in ((ADAPTER, card["contract"].get("adapter")), (DRAFTER_ADAPTER, card["weights"].get("adapter"))):
        _require_adapter(path / folder, wanted is not None)
    names = {file.relative_to(path) for pattern in SAVED for file in path.glob(pattern) if file.is_file()}
    arguments, backbone, config = card["arguments"], card["backbone"], _json(path / "config.json")
    tensors = load_file(path / card["weights"]["file"])
    trained = Checkpoint(str(path), path, card, method_of(card["kind"], arguments), config, tensors, backbone, backbone)
    return Heads(
        folder=path,
        method=trained.method,
        backbone=backbone,
        base_model=base_model or _hub_id(backbone),
        depth=trained.depth,
        engines=_engines(trained),
        config=config,
        files=tuple(sorted(names)),
        names=(path.resolve().name,),
        arguments=arguments,
        contract=card["contract"],
        provenance=card["provenance"],
        run=path,
    )


def _exported(path: Path, base_model: str | None) -> Heads:
    stated = _json(path / EXPORTED)
    try:
        trained, adapter = stated["heads"], stated["adapter"]
        of = Path(trained["path"])
        heads = {"method": stated["method"], "depth": int(stated["depth"]), "layout": stated["layout"], "quantize": stated["quantize"]}
        engines = tuple(stated["engines"])
        contract = dict(stated["contract"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path / EXPORTED} is damaged ({type(error).__name__}: {error}); export the heads again") from None
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{path} lacks its weights; export the heads again")
    _require_adapter(path / ADAPTER, adapter == "keep")
    checkpoint: dict[str, Any] = {"arguments": {}, "provenance": {}, "backbone": str(stated["backbone"])}
    if (of / METADATA).is_file() and (card := read_metadata(of)[1])["weights"]["sha256"] == trained["sha256"]:
        checkpoint = card
    names = [file.relative_to(path) for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path))]
    return Heads(
        folder=path,
        backbone=checkpoint["backbone"],
        base_model=base_model or _hub_id(checkpoint["backbone"]),
        config=_json(path / "config.json"),
        files=tuple(sorted(names)),
        names=(path.resolve().name, of.name),
        arguments=checkpoint["arguments"],
        contract=contract,
        engines=engines,
        provenance=checkpoint["provenance"],
        run=of if checkpoint["provenance"] else None,
        **heads,
    )


def _engines(trained: Checkpoint) -> tuple[str, ...]:
    """Return the engines that read a checkpoint in some layout."""
    held = layouts_of(trained.method)
    return tuple(
        engine for engine in readers(trained.method) if any(engine in one.engines and engine not in one.unread(trained) for one in held)
    )


def _hub_id(backbone: str) -> str | None:
    return backbone if is_hub_id(backbone) else None


def _hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts) or file.name == "README.md"


def _require_adapter(folder: Path, wanted: bool) -> None:
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / name).is_file()]
    if wanted and missing:
        raise UserError(f"{folder} lacks {missing[0]} of the adapter that the heads were trained with; train, export or fetch them again")


def _require_file(file: Path, sha256: str) -> None:
    if not file.is_file() or file_hash(file) != sha256:
        fault = f"is changed or truncated (see the hash in {METADATA})" if file.is_file() else "is missing"
        raise UserError(f"{file} {fault}; train or fetch the heads again")


def _json(file: Path) -> dict[str, Any]:
    return read_json(file, "train, export or fetch the heads again")


def last_part(name: str) -> str:
    """Return a path's last part; anything that is no absolute path is left as it is."""
    if START.match(name):   # the whole is a path, with spaces perhaps
        return re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    return PATH.sub(lambda match: match[1], name)


def scrubbed(value: Any, known: dict[str, str]) -> Any:
    """Return JSON with absolute paths replaced by their last parts, or as ``known`` says, and hosts by null; chat templates stay."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key in TEXTS}
        return {key: None if key in HOSTS else scrubbed(item, known) for key, item in value.items()} | kept
    if isinstance(value, list):
        return [scrubbed(item, known) for item in value]
    if isinstance(value, str):
        return known.get(value, last_part(value))
    return value
