"""Verify a folder of heads: an engine's drafts against Headstart's, token by token, and if they differ, why.

Files are checked first: names, shapes, finite numbers, the draft vocabulary, the configuration against the backbone and, tensor by tensor,
against the original heads. Then both sides decode the same prompts. Where they differ, other readings of the files are tried, and the
verdict names the mistake whose correction restores agreement.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.backbone.head_only import HeadOnlyBackbone
from headstart.heads.backbone.shipped import resolve
from headstart.heads.base import Drafter
from headstart.heads.checkpoint import METADATA, read_metadata
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.serving.layouts.files import PROVENANCE, DamagedError, Files, read_files
from headstart.inference.serving.layouts.reader.base import Reading, Target
from headstart.inference.serving.verify import decode
from headstart.inference.serving.verify.decode import Expected, Fit, headstart_drafts, read_heads, reference_drafts
from headstart.inference.serving.verify.drafts import Engine, EngineSettings, Transcript, Verdict, compare
from headstart.inference.serving.verify.mistakes import differences, faults_of, other_readings
from headstart.inference.serving.verify.stored import StoredTarget, require_states, stored_drafts
from headstart.support.errors import UserError
from headstart.support.files import file_hash
from headstart.support.json_text import read_json
from headstart.support.terminal import watched

BETTER = 1.25
"""Without original heads, a reading that drafts so many times as much of the backbone's text is taken for the right one."""
LEAST = 0.05
AGREES = "the reference engine agrees with Headstart on these files: the difference is the engine's own"


@dataclass(frozen=True)
class Check:
    """What to verify, on which prompts."""

    folder: Path
    backbone: Backbone
    heads: str | None
    """The original heads: a folder or hub id (None: the folder itself if it is a checkpoint of Headstart, otherwise none)."""
    engine: str
    prompts: list[list[int]]
    new_tokens: int
    depth: int | None = None
    """Tokens per draft (None: as many as the heads draft)."""
    end_tokens: tuple[int, ...] = ()
    allow_finetuned: bool = False
    texts: tuple[Features, ...] = ()
    """Texts with their features, if the backbone is not to run: the prompts are their beginnings."""
    where: str = ""
    """Where the texts, or the prompts, are from."""

    @cached_property
    def target(self) -> Target:
        model = self.backbone.model
        return StoredTarget(model, self.texts) if self.texts else Target(model)

    @property
    def original(self) -> str | None:
        own = str(self.folder) if (self.folder / METADATA).is_file() else None
        return self.heads if self.heads is not None else own


def find_engine(name: str) -> Engine:
    """Return the engine of that name, other than the reference."""
    engine: Engine = importlib.import_module(f"headstart.inference.serving.verify.{name}").draft
    return engine


@torch.no_grad()
def verify(check: Check) -> Verdict:
    """Verify a folder. Raises UserError for a missing folder, heads that the engine does not read, or an engine that is not installed."""
    verdict = Verdict(str(check.folder), check.original, check.engine, check.backbone.name)
    verdict.prompts = f"{len(check.prompts)} prompts of {check.where}, at temperature 0, up to {check.new_tokens} tokens each"
    try:
        files = read_files(check.folder)
        _require_unchanged(check)
        original = check.original
        heads = None if original is None else load(original, check.backbone, allow_finetuned=check.allow_finetuned, capture="off")
        target, reading = check.target, read_heads(files, check.backbone)
    except DamagedError as error:
        verdict.faults.append(str(error))
        return verdict
    verdict.method, verdict.notes = reading.method, list(reading.notes)
    verdict.faults += faults_of(reading, target)
    theirs = None
    if original is not None and (folder := read_metadata(original)[0]).resolve() != check.folder.resolve():
        theirs = read_heads(read_files(folder), check.backbone)
        if reading.method != theirs.method:
            verdict.changes.append(f"the folder holds {reading.method} heads, the original ones are {theirs.method}")
        else:
            verdict.changes += [cause for cause, _ in differences(reading, theirs)]
    if heads is not None and heads.drafter is not None:
        _round_as_stored(heads.drafter, files)
    _compare(check, verdict, heads, reading, theirs)
    return verdict


def recorded(folder: Path) -> tuple[str | None, str | None]:
    """Return the heads that a folder was exported from and the backbone that it is for, as far as they are recorded.

    The heads are those of a folder that is still there, with the weights that were exported; a checkpoint of Headstart is its own.
    """
    if (folder / METADATA).is_file():
        return str(folder), None
    try:
        stated = read_json(folder / PROVENANCE, "export the heads again")
        path, sha256, backbone = str(stated["heads"]["path"]), stated["heads"]["sha256"], str(stated["backbone"])
    except (UserError, KeyError, TypeError):
        return None, None
    try:
        _, card = read_metadata(path)
    except UserError:
        return None, backbone
    return (path if card["weights"]["sha256"] == sha256 else None), backbone


def _require_unchanged(check: Check) -> None:
    """Raise DamagedError if the folder is a checkpoint whose weights are not those that were saved."""
    if not (check.folder / METADATA).is_file() or check.heads is not None:
        return
    _, card = read_metadata(check.folder)
    file = check.folder / card["weights"]["file"]
    if not file.is_file() or file_hash(file) != card["weights"]["sha256"]:
        fault = "changed or cut short since it was saved: its hash is not" if file.is_file() else "missing, and not"
        raise DamagedError(f"{file} is {fault} the one in {METADATA} (half-written, or edited); give the heads as they were with --heads")


def _round_as_stored(drafter: Drafter, files: Files) -> None:
    """Round Headstart's heads to the precision in which the folder stores them."""
    tensors = (files.read([name])[name] for name in sorted(files.shapes))
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    if dtype.itemsize < drafter.backbone.dtype.itemsize:
        drafter.to(dtype).to(drafter.backbone.dtype)


def _compare(check: Check, verdict: Verdict, heads: SpeculativeModel | None, reading: Reading, original: Reading | None) -> None:
    """Decode on both sides and look for the cause of a difference."""
    target, drafter = check.target, None if heads is None else heads.drafter
    settings = EngineSettings(_depth(check, drafter, reading), check.new_tokens, check.end_tokens)
    if isinstance(target, StoredTarget):
        ours = _on_stored(check, verdict, target, drafter, reading, settings)
    else:
        ours = None if heads is None else headstart_drafts(heads, check.prompts, settings)
    theirs = _engine_drafts(check, verdict, reading, target, settings)
    whole = not reading.faults
    if ours is None and check.engine != "reference" and whole:
        ours = reference_drafts(reading, target, check.prompts, settings)
    if ours is None and theirs is None:
        return
    texts = decode.expected_texts(target, theirs or [], settings.depth) if ours is None else decode.expected_drafts(target, ours, drafter)
    fit = decode.fit_of(reading, target, texts) if whole else None
    right = fit is not None and fit.whole
    if theirs is not None:
        names = ("headstart" if heads else "reference", check.engine)
        near_tie = partial(decode.near_tie, reading, target) if right else lambda *_: False
        verdict.comparison = compare(ours or theirs, theirs, names, near_tie)
    if drafter is not None and fit is not None:
        verdict.distance, verdict.logits_agree = fit.distance, fit.whole
    if heads is None and check.engine == "reference":
        _look_for_better(verdict, texts, target, reading, fit)
    elif not right:
        verdict.found = _look_for_cause(verdict, texts, target, reading, original)
    elif theirs is not None and check.engine != "reference" and not verdict.equal:
        verdict.notes.append(AGREES)
        if cause := _look_for_cause(verdict, decode.expected_drafts(target, theirs), target, reading, None):
            verdict.notes.append(f"the engine drafts as if: {cause}")


def _on_stored(
    check: Check, verdict: Verdict, target: StoredTarget, drafter: Drafter | None, reading: Reading, settings: EngineSettings
) -> list[Transcript] | None:
    """Return the transcripts of Headstart's heads on stored features; None without heads."""
    require_states(target, drafter, reading, check.where)
    assert isinstance(check.backbone, HeadOnlyBackbone)
    target.lend(check.backbone)
    verdict.notes.append(f"drafts continue {len(check.texts)} texts with their states in {check.where}: the backbone was not run")
    if lacking := target.lacking(reading.taps):
        verdict.notes.append(f"the folder reads the backbone after layers {list(reading.taps)}; the states of {lacking} are not stored")
    return None if drafter is None else stored_drafts(drafter, target, check.prompts, settings)


def _depth(check: Check, drafter: Drafter | None, reading: Reading) -> int:
    assert reading.reader is not None
    return check.depth or (drafter.depth if drafter is not None else reading.reader.depth_of(reading.options) or 4)


def _engine_drafts(check: Check, verdict: Verdict, reading: Reading, target: Target, settings: EngineSettings) -> list[Transcript] | None:
    """The engine's transcripts; None if the files are too damaged to draft with."""
    if check.engine == "reference":
        unread = reading.faults or (isinstance(target, StoredTarget) and target.lacking(reading.taps))
        return None if unread else reference_drafts(reading, target, check.prompts, settings)
    engine = find_engine(check.engine)
    if check.backbone.adapter is not None:
        merged = "export them with the adapter merged (headstart export --adapter merge)"
        raise UserError(f"{check.original} drafts for a backbone with an adapter, which {check.engine} is not given here: {merged}")
    try:
        return engine(check.folder, resolve(check.backbone.name), check.prompts, settings)
    except UserError as error:
        if not verdict.faults:
            raise
        verdict.notes.append(f"the engine refuses the folder: {error}")
        return None


def _look_for_cause(verdict: Verdict, texts: list[Expected], target: Target, reading: Reading, original: Reading | None) -> str | None:
    """Try other readings until one gives what is expected, and return the mistake that it corrects."""
    for cause, other in watched(other_readings(reading, target, original), "trying other readings", "reading"):
        verdict.tried += 1
        fit = decode.fit_of(other, target, texts, first_only=True)
        if fit is not None and fit.whole:
            return cause
    return None


def _look_for_better(verdict: Verdict, texts: list[Expected], target: Target, reading: Reading, fit: Fit | None) -> None:
    """Without original heads: look for a reading that drafts much more of the backbone's own text."""
    drafted, now = (fit.drafted, fit.share) if fit is not None else (0, 0.0)
    best, share = None, max(now * BETTER, now + 2 * (now / max(drafted, 1)) ** 0.5, LEAST)  # beyond what chance makes of so many drafts
    for cause, other in watched(other_readings(reading, target, None), "trying other readings", "reading"):
        verdict.tried += 1
        found = decode.fit_of(other, target, texts)
        if found is not None and found.share > share:
            best, share = cause, found.share
    if best is not None:
        verdict.found = f"{best}; read so, {share:.0%} of the drafts are right instead of {now:.0%}"
