"""Heads that are models, or a part of one.

MTP modules are alone, as Headstart saves them, or inside a whole model's checkpoint, as DeepSeek, MiMo and Qwen3.5 ship them. Engines look
for them only there, so an export is a copy of the backbone's checkpoint with the trained modules' weights.

Draft models are ordinary folders of transformers with the backbone's vocabulary, written as they are; PARD's name a mask token.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads.backbone import smaller
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.backbone.weight_files import LAYOUTS, SHARED, checkpoint_folder, weight_files
from headstart.heads.backbone.weight_files import Layout as Names
from headstart.heads.card import METADATA
from headstart.heads.checkpoint import read_drafter
from headstart.heads.draft_model import DraftModel as Drafter
from headstart.heads.mtp import Mtp
from headstart.serving.layouts.files import DamagedError, Files, require_finite, require_new
from headstart.serving.layouts.layout import Checkpoint, Counting, Heads, Layout
from headstart.support.errors import UserError
from headstart.support.files import atomic, write_json
from headstart.support.json_text import read_json

NEW_FILE = "model-mtp.safetensors"
"""File of the modules' weights in a checkpoint of several files that has none of them yet."""
INDEX = "model.safetensors.index.json"


def write_back(drafter: Mtp, folder_out: str | Path) -> None:
    """Write a copy of the backbone's checkpoint with the modules' weights, under the names of the drafter's layout.

    Weights that the checkpoint has are replaced, in their dtype; others are added, and the configuration states the number of modules.
    Raises UserError if the folder is not empty, or if the backbone has an adapter.
    """
    source, out = checkpoint_folder(drafter.backbone), Path(folder_out)
    if drafter.backbone.adapter is not None:
        raise UserError("the backbone has an adapter, which its checkpoint lacks: merge it, save the merged model and train on that")
    require_new(out)
    with atomic(out, folder=True) as copy:
        shutil.copytree(source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "*.bin", "*.pt", "*.pth"))
        _write_tensors(copy, {name: weight.detach().cpu().contiguous() for name, weight in drafter.tensors().items()})
        config = read_json(copy / "config.json", "fetch the checkpoint again")
        text, key, count = config.get("text_config", config), drafter.layout.count_key, len(drafter.mtps)
        if (text.get(key) or 0) < count:
            text[key] = count
            write_json(copy / "config.json", config)


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace the tensors that the folder's files hold, in their dtypes, and add the others in the dtype of the first file."""
    files, index = weight_files(folder), folder / INDEX
    first = next(iter(files.values()))
    with safe_open(first, framework="pt") as file:
        dtype = next(x.dtype for name in file.keys() if (x := file.get_tensor(name)).is_floating_point())  # noqa: SIM118
    homes = {name: files.get(name, folder / NEW_FILE if index.is_file() else first) for name in tensors}
    for path in sorted({*homes.values()}):
        held = load_file(path) if path.is_file() else {}
        held |= {name: tensors[name].to(held[name].dtype if name in held else dtype) for name, home in homes.items() if home == path}
        with atomic(path) as temporary:
            save_file(held, temporary, metadata={"format": "pt"})
    new = [tensor for name, tensor in tensors.items() if name not in files]
    if new and index.is_file():
        listed = read_json(index, "fetch the checkpoint again")
        listed["weight_map"] |= {name: NEW_FILE for name in tensors if name not in files}
        if "total_size" in listed.get("metadata", {}):
            listed["metadata"]["total_size"] += sum(tensor.numel() for tensor in new) * dtype.itemsize
        write_json(index, listed)


SERVED = {("mimo", "mimo"), ("qwen3_5", "qwen3_5"), ("qwen3_5", "qwen3_5_text")}
"""Names of the modules and type of the backbone for which engines have a class of dense MTP modules."""
PARTS = ("enorm", "hnorm", "eh_proj", "norm")


class MtpStitch(Layout):
    """The copy has the backbone's own dtype; of its files only safetensors, configuration and tokenizer."""

    name, title, methods, engines = "mtp-stitch", "MTP modules", ("mtp",), ("vllm", "sglang")

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        if heads.dtype != "auto":
            raise UserError(
                f"--dtype {heads.dtype} is not for mtp-stitch, which writes the dtype of the backbone's checkpoint; leave it out"
            )
        if heads.adapter is not None:
            raise UserError(f"{heads.path} was trained with an adapter, which a copy of the backbone lacks: merge it and train on that")
        drafter = read_drafter(heads.path, heads.folder, heads.card, heads.load_backbone())
        assert isinstance(drafter, Mtp)
        require_finite(drafter.tensors())
        write_back(drafter, folder)
        return [f"a copy of {heads.backbone} with the modules' weights"]

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        names, kind = str(heads.card["arguments"]["layout"]), str(heads.card["contract"]["model_type"])
        reason = f"it is not known to read {names} modules of dense layers in a model of type {kind}; it reads MiMo's and Qwen3.5's"
        return {} if (names, kind) in SERVED else dict.fromkeys(self.engines, reason)

    def recognises(self, files: Files) -> bool:
        layers = _text(files).get("num_hidden_layers")
        return isinstance(layers, int) and _names(files, layers) is not None

    def sizes(self, files: Files) -> dict[str, Any]:
        return _text(files)

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        layers = backbone.num_layers
        if (names := _names(files, layers)) is None:
            raise DamagedError(f"{files.path} holds MTP modules, but none that follows the {layers} layers of this backbone")
        wanted, modules = list[str](), 0
        while names.native(f"mtp.{modules}.eh_proj.weight", layers) in files.shapes and not (names.single and modules):
            own = [names.native(f"mtp.{modules}.{part}.weight", layers) for part in PARTS]
            inside = files.names(names.native(f"mtp.{modules}.layer.", layers))
            wanted += own + [name for name in inside if name not in own and not name.endswith(SHARED)]
            modules += 1
        tensors = files.read(name for name in wanted if name in files.shapes)
        arguments = {"layout": names.name} | ({"shared": False, "depth": modules} if modules > 1 else {})
        rest = len(files.shapes) - len(tensors)
        notes = (f"{rest} tensors of the model beside the modules are left out",) if rest else ()
        return Heads("mtp", arguments, tensors, notes=notes)


def _text(files: Files) -> dict[str, Any]:
    return dict(files.config.get("text_config") or files.config)


def _names(files: Files, layers: int) -> Names | None:
    return next((layout for layout in LAYOUTS.values() if layout.native("mtp.0.eh_proj.weight", layers) in files.shapes), None)


TEXT = {".json", ".txt", ".model", ".jinja"}
"""Suffixes of the files of a tokenizer."""
PARALLEL_DEPTH = 8
"""Tokens that a parallel model drafts where its files do not say; PARD's configurations do not."""


class DraftModel(Layout):
    """Weights, configuration and the backbone's tokenizer."""

    name, title, methods = "draft-model", "draft model", ("draft_model", "pard")
    engines = ("vllm", "sglang", "trtllm", "transformers")

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        own = {METADATA, "config.json", heads.weights_file}
        for file in heads.folder.iterdir():
            if file.is_file() and file.suffix in TEXT and file.name not in own:
                shutil.copyfile(file, folder / file.name)
        return super().write(heads, folder)

    def recognises(self, files: Files) -> bool:
        architectures = files.config.get("architectures") or []
        named = any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
        return named and len(files.shapes) > 0 and "fc.weight" not in files.shapes

    def sizes(self, files: Files) -> dict[str, Any]:
        return {}  # the configuration is that of the draft model

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        small = load_backbone(str(files.folder), dtype="auto", device=backbone.device)
        smaller.require_fitting(backbone, small, smaller.find_tokenizers(backbone.name, str(files.folder)))
        brought = f"its vocabulary of {small.vocab} was brought to the backbone's {backbone.vocab}"
        remarks = (brought,) if small.vocab != backbone.vocab else ()
        smaller.resize(small.model, backbone.vocab)
        arguments: dict[str, Any] = {"architecture": smaller.stated_config(small.model.config)}
        notes: list[str] = []
        if (mask := files.config.get("pard_token")) is not None:
            arguments |= {"parallel": True, "mask_token": None if mask == backbone.vocab - 1 else mask, "depth": PARALLEL_DEPTH}
            notes.append(f"drafts in parallel; its files do not say how many tokens, {PARALLEL_DEPTH} here: --depth N for others")
        tensors = Drafter(backbone, Drafter.Config(**arguments), small.model).tensors()
        return Heads("draft_model", arguments, dict(tensors), notes=tuple(notes), remarks=remarks)
