"""What the ``custom_generate`` code in a checkpoint calls: find the heads, keep them between calls, decode with them.

What is kept belongs to a twin, a module of the same parts as the model, so that it goes when the model goes and leaves nothing on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads.card import METADATA
from headstart.inference.generate import GenerateOutput, SpeculativeModel, load
from headstart.inference.runtime import share
from headstart.support.errors import UserError
from headstart.support.hub import find_folder

OPTIONS = ("revision", "allow_finetuned", "custom_generate", "trust_remote_code")
"""Arguments of the call that are not for `SpeculativeModel.generate`."""


@dataclass(frozen=True)
class Entry:
    """Loaded heads, and the state of the checkpoint and the model when they were loaded."""

    folder: Path
    state: tuple[Any, ...]
    heads: SpeculativeModel


class Loaded:
    """The heads that were loaded for a model, by checkpoint."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.twin: PreTrainedModel = model.__class__.__new__(model.__class__)
        self.entries: dict[tuple[str, str | None, bool], Entry] = {}
        self.follow(model)
        share(self.twin, model)

    def follow(self, model: PreTrainedModel) -> None:
        """Give the twin what the model has now, but for a ``generate`` that refers to the model."""
        vars(self.twin).clear()
        vars(self.twin).update({name: value for name, value in vars(model).items() if name != "generate"})


kept: WeakKeyDictionary[PreTrainedModel, Loaded] = WeakKeyDictionary()


def custom_generate(model: PreTrainedModel, heads: str | Path | None, arguments: Mapping[str, Any]) -> GenerateOutput | Tensor:
    """Decode with the heads in a folder or hub repository; ``arguments`` are those of the model's ``generate``.

    Besides those of `SpeculativeModel.generate`: ``revision`` of the hub repository, and ``allow_finetuned`` (see `load`). The heads are
    loaded once for each model, and again if the checkpoint changes. Without ``heads``, a model loaded from a folder that carries this code,
    as a draft model is, generates alone. Raises UserError if the heads are damaged or belong to another model.
    """
    rest = {name: value for name, value in arguments.items() if name not in OPTIONS}
    heads = arguments.get("custom_generate") if heads is None else heads
    if heads is None and "generate" in vars(model):  # from_pretrained(..., trust_remote_code=True) has replaced its generate
        return type(model).generate(model, **rest)
    if not isinstance(heads, str | Path):
        raise UserError(f"custom_generate names no folder or hub id of heads (got {heads!r}); pass it as heads= too")
    if model not in kept:
        kept[model] = Loaded(model)
    its = kept[model]
    its.follow(model)
    loaded = _loaded(its, str(heads), arguments.get("revision"), bool(arguments.get("allow_finetuned")))
    return type(model).generate(its.twin, custom_generate=loaded.generate, **rest)


def _loaded(its: Loaded, path: str, revision: str | None, allow_finetuned: bool) -> SpeculativeModel:
    key = (path, revision, allow_finetuned)
    entry = its.entries.get(key)
    if entry is None or entry.state != _state(its.twin, entry.folder):
        folder = find_folder(path, "heads", revision=revision)
        state = _state(its.twin, folder)
        entry = its.entries[key] = Entry(folder, state, load(folder, its.twin, allow_finetuned=allow_finetuned))
    return entry.heads


def _state(model: PreTrainedModel, folder: Path) -> tuple[Any, ...]:
    """What loaded heads depend on: the checkpoint's metadata, which is written last; the model's place, dtype and tables of tokens."""
    file = folder / METADATA
    status = file.stat() if file.is_file() else None
    tables = model.get_input_embeddings(), model.get_output_embeddings()  # others after a resize
    return model.device, model.dtype, tables, status and (status.st_mtime_ns, status.st_size)
