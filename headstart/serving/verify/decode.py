"""Headstart's own drafts, by the decoding loop that users run, and their logits after a text.

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
from headstart.serving.reference import after, are_picks
from headstart.serving.verify.drafts import EngineSettings, Round, Transcript
from headstart.support.terminal import watched


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
    decoder = Decoder(engine.reader, engine.policy, request, shape, None, 1)
    rounds, position, end = [], len(prompt) + 1, len(prompt) + settings.new_tokens
    for step in decoder.run():
        if position < end and step.nodes > 1:
            rounds.append(Round(position, tuple(step.trees[0].tokens[1:]), step.trees[0].kept))
        position += step.written[0]
    return Transcript(tuple(prompt), tuple(decoder.texts.of[0].written[: settings.new_tokens]), tuple(rounds))


@torch.no_grad()
def headstart_logits(drafter: Drafter, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
    """Return the logits ``[K, V]`` of each draft after the text, given the drafts before it; -inf for tokens that are not drafted."""
    tokens_1T = torch.tensor([text], device=drafter.backbone.device)
    next_token = after(drafter, drafter.backbone.read(tokens_1T[:, :-1], taps=drafter.taps), len(drafts))
    return torch.stack([next_token(token) for token in [int(text[-1]), *drafts[:-1]]])


@torch.no_grad()
def near_tie(drafter: Drafter, given: Sequence[int], depth: int | None, tokens: tuple[int, int]) -> bool:
    """See `NearTie`: by the logits of the heads, and for the text by the backbone's own."""
    if depth is None:
        backbone = drafter.backbone
        hidden_1TD = backbone.read(torch.tensor([list(given)], device=backbone.device)).hidden_BTD
        logits_V = backbone.readout(hidden_1TD[0, -1])
    else:
        place = len(given) - depth
        logits_V = headstart_logits(drafter, given[:place], [*given[place:], tokens[0]])[-1]
    return all(are_picks(logits_V.float().expand(2, -1), tokens))
