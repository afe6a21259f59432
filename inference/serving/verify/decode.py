"""Headstart's own drafts, by the decoding loop that users run, and those of the plain reading of the files.

Shape suffixes: K depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.base import Drafter
from headstart.inference.decode import Decoder
from headstart.inference.engine.request import Request
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.serving.layouts.files import Files, read_files
from headstart.inference.serving.layouts.layout import Sizes, layouts, recognise
from headstart.inference.serving.layouts.reader.base import Reading, Target
from headstart.inference.serving.verify.drafts import EngineSettings, Round, Transcript, judged
from headstart.support.errors import UserError
from headstart.support.progress import watched


def headstart(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
    """See `Engine`; ``folder`` is a checkpoint of Headstart."""
    return headstart_drafts(load(folder, load_backbone(backbone, dtype="fp32", device="cpu")), prompts, settings)


@torch.no_grad()
def headstart_drafts(heads: SpeculativeModel, prompts: Sequence[Sequence[int]], settings: EngineSettings) -> list[Transcript]:
    """Return a transcript per prompt, of trees that are chains. Raises UserError for a depth that the heads cannot draft."""
    assert heads.drafter is not None
    heads.drafter.require_depth(settings.depth)
    return [_headstart_transcript(heads, list(prompt), settings) for prompt in watched(prompts, "drafting with Headstart", "prompt")]


def _headstart_transcript(heads: SpeculativeModel, prompt: list[int], settings: EngineSettings) -> Transcript:
    """Decode past the end by the length of a draft, so that the last round is as long as an engine's, and cut what is too much."""
    most = min(len(prompt) + settings.new_tokens + settings.depth, heads.backbone.max_positions or 1 << 31)
    engine = heads.engine(True)
    shape = TreeShape(nodes=settings.depth + 1, width=1, depth=settings.depth)
    ids_1T = torch.tensor([prompt], device=heads.backbone.device)
    request = Request.plain(ids_1T, most, settings.end_tokens, LogitsProcessorList(), sample=False)
    decoder = Decoder(engine.reader, engine.speculation, request, shape, None, 1)
    rounds, position, end = [], len(prompt) + 1, len(prompt) + settings.new_tokens
    for step in decoder.run():
        if position < end and step.nodes > 1:
            rounds.append(Round(position, tuple(decoder.tree.tokens[0][1:]), step.kept[0]))
        position += step.written[0]
    return Transcript(tuple(prompt), tuple(decoder.texts.of[0].written[: settings.new_tokens]), tuple(rounds))


@torch.no_grad()
def headstart_logits(drafter: Drafter, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
    """Return the logits ``[K, V]`` of each draft after the text, given the drafts before it; -inf for tokens that are not drafted."""
    tokens_1T = torch.tensor([text], device=drafter.backbone.device)
    features = drafter.backbone.read(tokens_1T[:, :-1], taps=drafter.taps)
    state = drafter.reserve(drafter.begin(features), len(text) + 2 * len(drafts))
    given, rows, zero_11 = [int(text[-1]), *drafts[:-1]], [], torch.zeros_like(tokens_1T[:, :1])
    all_BKD = None
    for depth, token in enumerate(given):
        token_11 = torch.full_like(zero_11, token)
        if drafter.all_depths_at_once:
            if all_BKD is None:
                all_BKD, state = drafter.step(state, token_11, zero_11, 0)
            hidden = all_BKD[:, depth : depth + 1]
        else:
            hidden, state = drafter.step(state, token_11, zero_11, depth)
        logits_DV = drafter.readout(hidden, depth, token_11)[0, 0].float()
        whole_V = logits_DV.new_full((drafter.backbone.vocab,), -torch.inf)
        rows.append(logits_DV if drafter.vocabulary is None else whole_V.scatter(0, drafter.vocabulary, logits_DV))
    return torch.stack(rows)


def read_heads(files: Files, on: Backbone) -> Reading:
    """Read heads as the engines do, in fp32. Raises UserError, or DamagedError for files that contradict each other."""
    layout = recognise(files, readable=True)
    if layout is None:
        stated = files.config.get("architectures") or files.config.get("model_type") or "no architecture"
        known = ", ".join(one.name for one in layouts() if one.order and one.readable)
        raise UserError(f"{files.folder} ({stated}) holds no heads that the reference engine reads; it reads {known}")
    reading = layout.stated(files, Sizes.of(on))
    return replace(reading, tensors={name: x.float() if x.is_floating_point() else x for name, x in reading.tensors.items()})


def reference(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
    """See `Engine`: heads as the readers of `layouts` read them."""
    on = load_backbone(backbone, dtype="fp32", device="cpu")
    return reference_drafts(read_heads(read_files(folder), on), Target(on.model), prompts, settings)


def reference_drafts(reading: Reading, target: Target, prompts: Sequence[Sequence[int]], settings: EngineSettings) -> list[Transcript]:
    """Return a transcript per prompt. Raises UserError for a depth that the heads cannot draft.

    Every text is the backbone's own greedy continuation, so it is computed first, and the drafts at the places of its rounds afterwards.
    """
    shown = watched(prompts, "drafting with the reference engine", "prompt")
    return [_reference_transcript(reading, target, list(prompt), settings) for prompt in shown]


def _reference_transcript(reading: Reading, target: Target, prompt: list[int], settings: EngineSettings) -> Transcript:
    room = (target.max_positions or 1 << 31) - len(prompt)
    truth = [*prompt, *target.continued(prompt, min(settings.new_tokens + settings.depth, room))]
    with torch.no_grad():
        reader = reading.on(target, target.read(truth, reading.taps))
    if reader.max_depth is not None and settings.depth > reader.max_depth:
        fault = f"these heads draft {reader.max_depth} tokens; got a depth of {settings.depth}"
        raise UserError(f"{fault}: give --depth {reader.max_depth} or less")
    written, rounds, position = settings.ended(truth[len(prompt) :]), [], len(prompt) + 1
    while position < len(prompt) + len(written):
        rounds.append(judged(position, reader.draft(position, settings.depth), truth))
        position += rounds[-1].kept + 1
    return Transcript(tuple(prompt), tuple(written), tuple(rounds))
