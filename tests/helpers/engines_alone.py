"""Headstart's own drafts, by the decoding loop that users run, and those of the reference reading, in the form of an engine's."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain.base import Target
from plain.drafts import reference_drafts
from plain.folders import read_heads
from transformers import LogitsProcessorList

from headstart import Backbone, SpeculativeModel, TreeShape, load, load_backbone
from headstart.inference.decode import Decoder
from headstart.inference.engine.request import Request
from headstart.serving.layouts.files import read_files
from headstart.serving.verify import verify as verification
from headstart.serving.verify.drafts import EngineSettings, Round, Transcript
from headstart.serving.verify.vllm import VLLM

PROMPTS = ([5, 9, 33, 12, 7], [1, 2, 3, 4, 50, 60, 7])


@torch.no_grad()
def headstart_drafts(heads: SpeculativeModel, prompts: Sequence[Sequence[int]], settings: EngineSettings) -> list[Transcript]:
    """Return a transcript per prompt, of trees that are chains."""
    return [_transcript(heads, list(prompt), settings) for prompt in prompts]


def _transcript(heads: SpeculativeModel, prompt: list[int], settings: EngineSettings) -> Transcript:
    """Decode past the end by the length of a draft, so that the last round is as long as an engine's, and cut what is too much."""
    most = min(len(prompt) + settings.new_tokens + settings.depth, heads.backbone.max_positions or 1 << 31)
    engine, shape = heads.engine(True), TreeShape(nodes=settings.depth + 1, width=1, depth=settings.depth)
    ids_1T = torch.tensor([prompt], device=heads.backbone.device)
    request = Request.plain(ids_1T, most, settings.end_tokens, LogitsProcessorList(), sample=False)
    decoder = Decoder(engine.reader, engine.policy, request, shape, None, 1)
    rounds, position, end = [], len(prompt) + 1, len(prompt) + settings.new_tokens
    for step in decoder.run():
        if position < end and step.nodes > 1:
            rounds.append(Round(position, tuple(step.trees[0].tokens[1:]), step.trees[0].kept))
        position += step.written[0]
    return Transcript(tuple(prompt), tuple(decoder.texts.of[0].written[: settings.new_tokens]), tuple(rounds))


def headstart(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
    """See `Engine`; ``folder`` is a checkpoint of Headstart."""
    return headstart_drafts(load(folder, load_backbone(backbone, dtype="fp32", device="cpu")), prompts, settings)


def reference(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
    """See `Engine`: heads as the readers of `layouts` read them."""
    on = load_backbone(backbone, dtype="fp32", device="cpu")
    return reference_drafts(read_heads(read_files(folder), on), Target(on.model), prompts, settings)


def plain_reader_agrees(folder: Path, heads: str, backbone: Backbone) -> bool:
    """True if the files of a folder, by the plain reader, draft what the trained heads draft."""
    trained = load(heads, backbone, capture="off")
    assert trained.drafter is not None
    settings, reading = EngineSettings(trained.drafter.depth, 6), read_heads(read_files(folder), backbone)
    found = reference_drafts(reading, Target(backbone.model), PROMPTS, settings)
    return not reading.faults and found == headstart_drafts(trained, PROMPTS, settings)


def stand_in(monkeypatch: pytest.MonkeyPatch, engine: Callable[..., list[Transcript]]) -> None:
    """Have ``headstart verify`` ask this engine, whichever it is told to."""
    monkeypatch.setattr(verification, "ENGINES", dict.fromkeys(verification.ENGINES, (replace(VLLM, python=Path(sys.executable)), engine)))
