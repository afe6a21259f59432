"""Verify a folder of heads: what it drafts, read back by the import, against what the trained heads drafted when they were exported.

Files are checked first: names, shapes, finite numbers, the draft vocabulary, the configuration against the backbone. Drafts are compared
after states that a formula gives (`reference`). With an engine, prompts are decoded, and every draft is compared.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import end_tokens
from headstart.heads.base import Drafter
from headstart.heads.card import METADATA
from headstart.heads.checkpoint import checked_weights, load_drafter, read_metadata
from headstart.serving.export import agreement, reference
from headstart.serving.layouts.files import PROVENANCE, DamagedError, Files, read_files, stated_format
from headstart.serving.reading import build, original_of, read_exported, recognise, round_as_stored
from headstart.serving.verify import llamacpp, vllm
from headstart.serving.verify.drafts import Engine, EngineProcess, EngineSettings, Verdict, compare
from headstart.support.errors import UserError
from headstart.support.hub import resolve
from headstart.support.json_text import read_json

ENGINES: dict[str, tuple[EngineProcess, Engine]] = {"vllm": (vllm.VLLM, vllm.draft), "llama.cpp": (llamacpp.LLAMACPP, llamacpp.draft)}
AGREES = "read back, these files draft what the trained heads do: the difference is the engine's own"


@dataclass(frozen=True)
class Check:
    """What to verify, and for an engine on which prompts."""

    folder: Path
    backbone: Backbone
    """For the reference its embedding and output layer are enough."""
    heads: str | None
    """The original heads: a folder or hub id (None: the folder itself if it is a checkpoint of Headstart, otherwise none)."""
    engine: str
    """``reference``: none."""
    prompts: list[list[int]]
    new_tokens: int
    depth: int | None = None
    """Tokens per draft (None: as many as the heads draft)."""
    allow_finetuned: bool = False
    where: str = ""
    """How many prompts, and where they are from."""
    stored: tuple[dict[str, Any], ...] | None = None
    """The drafts that the export stored, taken in place of those of ``heads``."""

    @property
    def original(self) -> str | None:
        own = str(self.folder) if (self.folder / METADATA).is_file() else None
        return self.heads if self.heads is not None else own


def require_engine(name: str) -> None:
    """Raise UserError if that engine is not installed."""
    ENGINES[name][0].find_python()


@torch.no_grad()
def verify(check: Check) -> Verdict:
    """Verify a folder. Raises UserError for a missing folder, heads of no known layout, or an engine that is not installed."""
    verdict = Verdict(str(check.folder), check.original, check.engine, check.backbone.name)
    try:
        files = read_files(check.folder)
        _require_unchanged(check)
    except DamagedError as error:
        verdict.faults.append(str(error))
        return verdict
    layout = recognise(files)
    verdict.method = layout.title
    original = None if check.original is None else original_of(check.original, check.backbone, check.allow_finetuned)
    drafter = _read(verdict, files, check.backbone, original)
    if drafter is not None:
        expected = check.stored if check.stored is not None else None if original is None else reference(original)
        verdict.reference = None if expected is None else agreement(drafter, expected)
        if verdict.reference is not None and not verdict.reference.whole and original is not None:
            how = stated_format(files.config)
            quantised = [f"the folder's weights are quantised ({how}), which changes drafts by itself"]
            verdict.changes += quantised if how is not None else differences(drafter, original)
    if check.engine != "reference":
        _against_engine(check, verdict, drafter)
    return verdict


def _read(verdict: Verdict, files: Files, backbone: Backbone, original: Drafter | None) -> Drafter | None:
    """Return the folder as a drafter, and round the original to the precision in which the folder stores it; None if it cannot be read."""
    try:
        found = read_exported(files, backbone)
        drafter = build(found, backbone, files.path)
    except UserError as error:
        verdict.faults.append(str(error))
        return None
    verdict.faults += [*found.remarks, *_rope_faults(files)]
    verdict.notes += found.notes
    if original is not None:
        round_as_stored(original, found)
    return drafter


def differences(drafter: Drafter, original: Drafter) -> list[str]:
    """Say in which arguments and tensors heads are not the original ones."""
    mine, theirs = drafter.arguments, original.arguments
    own = [key for key in ("taps", "layer", *theirs) if key not in ("depth", "draft_depth", "layers", "draft_vocab_size", "path", "choose")]
    found = [f"config: {key} is {mine[key]}, of the original heads {theirs[key]}" for key in dict.fromkeys(own)
             if key in mine and key in theirs and mine[key] != theirs[key]]  # fmt: skip
    tensors, others = drafter.tensors(), original.tensors()
    odd = [name for name in others if name not in tensors or not tensors[name].equal(others[name])]
    return [*found, *(f"tensor {name} is not as in the original heads: damaged, of another training or another vocabulary" for name in odd)]


def recorded(folder: Path) -> tuple[str | None, str | None, tuple[dict[str, Any], ...] | None]:
    """Return the heads that a folder was exported from, the backbone that it is for, and the stored drafts, as far as they are recorded.

    The heads are those of a folder that is still there, with the weights that were exported; a checkpoint of Headstart is its own.
    """
    if (folder / METADATA).is_file():
        return str(folder), None, None
    try:
        stated = read_json(folder / PROVENANCE, "export the heads again")
        path, sha256, backbone = str(stated["heads"]["path"]), stated["heads"]["sha256"], str(stated["backbone"])
        drafts = tuple(stated["reference"]) if "reference" in stated else None
    except (UserError, KeyError, TypeError):
        return None, None, None
    try:
        _, card = read_metadata(path)
    except UserError:
        return None, backbone, drafts
    return (path if card["weights"]["sha256"] == sha256 else None), backbone, drafts


def _require_unchanged(check: Check) -> None:
    """Raise DamagedError if the folder is a checkpoint whose weights are not those that were saved."""
    if (check.folder / METADATA).is_file() and check.heads is None:
        folder, card = read_metadata(check.folder)
        try:
            checked_weights(str(check.folder), folder, card)
        except UserError as error:
            raise DamagedError(f"{error}, or give them with --heads") from None


def _rope_faults(files: Files) -> list[str]:
    """Name two rotary bases that a configuration states under the old and the new key."""
    config = files.config.get("transformer_layer_config") or files.config
    stated = config.get("rope_parameters") or {}
    bases = {float(base) for section in (stated.get("full_attention", stated), config) if (base := section.get("rope_theta")) is not None}
    named = " and ".join(f"{base:g}" for base in sorted(bases))
    return [f"rope: config.json states two bases, {named}; engines read either"] if len(bases) > 1 else []


def _against_engine(check: Check, verdict: Verdict, drafter: Drafter | None) -> None:
    """Decode the prompts with the engine, and compare with Headstart's heads, the original ones if there are any."""
    if check.original is not None:
        drafter = load_drafter(check.original, check.backbone, allow_finetuned=check.allow_finetuned)
    if check.backbone.adapter is not None:
        merged = "export them with the adapter merged (headstart export --adapter merge)"
        raise UserError(f"{check.original} drafts for a backbone with an adapter, which {check.engine} is not given here: {merged}")
    if drafter is None:
        return
    settings = EngineSettings(check.depth or drafter.depth, check.new_tokens, end_tokens(check.backbone.model.generation_config))
    drafter.require_depth(settings.depth)
    process, draft = ENGINES[check.engine]
    try:
        transcripts = draft(check.folder, resolve(check.backbone.name), check.prompts, settings)
    except UserError as error:
        if not verdict.faults:
            raise
        verdict.notes.append(f"the engine refuses the folder: {error}")
        return
    verdict.prompts = f"{check.where}, at temperature 0, up to {check.new_tokens} tokens each"
    verdict.comparison = compare(drafter, transcripts)
    if not verdict.comparison.equal and verdict.reference is not None and verdict.reference.whole:
        verdict.notes.append(AGREES)
    gguf = check.backbone.gguf
    if not verdict.comparison.equal and process.quantised and gguf is not None and gguf.type != "F32":
        verdict.notes.append(process.quantised)
