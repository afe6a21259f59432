"""What the plain reading of heads drafts along a text.

Shape suffixes: K depth, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.heads.base import Drafter
from headstart.serving.export import draft_logits
from headstart.serving.verify.drafts import EngineSettings, Round, Transcript
from plain.base import Reading, Target


def judged(position: int, drafts: Sequence[int], text: Sequence[int]) -> Round:
    """Return the round of drafts after so many tokens of a text."""
    hits = [drafted == true for drafted, true in zip(drafts, text[position:], strict=False)]
    return Round(position, tuple(drafts), hits.index(False) if False in hits else len(hits))


def reference_drafts(reading: Reading, target: Target, prompts: Sequence[Sequence[int]], settings: EngineSettings) -> list[Transcript]:
    """Return a transcript per prompt, for a depth that the heads can draft.

    Every text is the backbone's own greedy continuation, so it is computed first, and the drafts at the places of its rounds afterwards.
    """
    return [_transcript(reading, target, list(prompt), settings) for prompt in prompts]


def _transcript(reading: Reading, target: Target, prompt: list[int], settings: EngineSettings) -> Transcript:
    room = (target.max_positions or 1 << 31) - len(prompt)
    text = [*prompt, *target.continued(prompt, min(settings.new_tokens + settings.depth, room))]
    with torch.no_grad():
        reader = reading.on(target, target.read(text, reading.taps))
    assert reader.max_depth is None or settings.depth <= reader.max_depth
    written, rounds, position = settings.ended(text[len(prompt) :]), [], len(prompt) + 1
    while position < len(prompt) + len(written):
        rounds.append(judged(position, reader.draft(position, settings.depth), text))
        position += rounds[-1].kept + 1
    return Transcript(tuple(prompt), tuple(written), tuple(rounds))


@torch.no_grad()
def headstart_logits(drafter: Drafter, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
    """Return Headstart's logits ``[K, V]`` of each draft after the text, given the drafts before it."""
    tokens_1T = torch.tensor([text], device=drafter.backbone.device)
    return draft_logits(drafter, drafter.backbone.read(tokens_1T[:, :-1], taps=drafter.taps), int(text[-1]), len(drafts), drafts)
