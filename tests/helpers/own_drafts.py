"""Headstart's own drafts, by the decoding loop that users run, in the form of an engine's, and the logits of drafts after a text.

Shape suffixes: K depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from headstart.heads.base import Drafter
from headstart.inference.decode import Decoder
from headstart.inference.engine.request import Request
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.serving.reference import draft_logits
from headstart.serving.verify.drafts import EngineSettings, Round, Transcript


@torch.no_grad()
def headstart_drafts(heads: SpeculativeModel, prompts: Sequence[Sequence[int]], settings: EngineSettings) -> list[Transcript]:
    """Return a transcript per prompt, of trees that are chains. Raises UserError for a depth that the heads cannot draft."""
    assert heads.drafter is not None
    heads.drafter.require_depth(settings.depth)
    return [_transcript(heads, list(prompt), settings) for prompt in prompts]


def _transcript(heads: SpeculativeModel, prompt: list[int], settings: EngineSettings) -> Transcript:
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
    """Return the logits ``[K, V]`` of each draft after the text, given the drafts before it."""
    tokens_1T = torch.tensor([text], device=drafter.backbone.device)
    return draft_logits(drafter, drafter.backbone.read(tokens_1T[:, :-1], taps=drafter.taps), int(text[-1]), drafts)
