"""The reference engine: heads as `headstart.inference.serving.reference` reads them.

Every text is the backbone's own greedy continuation, so it is computed first, and the drafts at the places of its rounds afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headstart.heads.backbone.embedded import resolve
from headstart.inference.serving.reference.decode import begin, draft_at, require_depth
from headstart.inference.serving.reference.files import read_files
from headstart.inference.serving.reference.methods import read_heads
from headstart.inference.serving.reference.reading import Reading
from headstart.inference.serving.reference.target import Target, load_target
from headstart.inference.serving.transcript import Round, Transcript
from headstart.inference.serving.verification.engine import EngineSettings
from headstart.support.terminal import watched


def draft(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
    """See `Engine`."""
    target = load_target(resolve(backbone))
    return reference_drafts(read_heads(read_files(folder), target), target, prompts, settings)


def reference_drafts(reading: Reading, target: Target, prompts: Sequence[Sequence[int]], settings: EngineSettings) -> list[Transcript]:
    """Return a transcript per prompt. Raises UserError for a depth that the heads cannot draft."""
    shown = watched(prompts, "drafting with the reference engine", "prompt")
    return [_transcript(reading, target, list(prompt), settings) for prompt in shown]


def _transcript(reading: Reading, target: Target, prompt: list[int], settings: EngineSettings) -> Transcript:
    room = (target.max_positions or 1 << 31) - len(prompt)
    truth = [*prompt, *target.continued(prompt, min(settings.new_tokens + settings.depth, room))]
    written = truth[len(prompt) : len(prompt) + settings.new_tokens]
    ends = [i for i, token in enumerate(written) if token in settings.end_tokens]
    written = written[: ends[0] + 1] if ends else written
    drafting = begin(reading, target, truth)
    require_depth(drafting, settings.depth)
    rounds, position = [], len(prompt) + 1
    while position < len(prompt) + len(written):
        drafts = draft_at(drafting, position, settings.depth)
        hits = [drafted == true for drafted, true in zip(drafts, truth[position:], strict=False)]
        kept = hits.index(False) if False in hits else len(hits)
        rounds.append(Round(position, tuple(drafts), kept))
        position += kept + 1
    return Transcript(tuple(prompt), tuple(written), tuple(rounds))
