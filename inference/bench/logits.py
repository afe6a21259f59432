"""Whether decoding with drafts computes the logits of autoregressive decoding: bit for bit, or by how much they differ.

A pass over a tree may round differently from one over a single position. Then two nearly equal logits can change places, and another token
is written. Both systems continue some prompts once more, keeping their logits: first those whose tokens differ. Logits are compared up to
the first token that differs, since the texts are the same before it; and those of each system with the uncaptured model's (`judging`).

Shape suffixes: T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headstart.inference.bench.judging import Entry, Judging
from headstart.inference.bench.systems import HeadstartSystem, System
from headstart.inference.measure import Settings, continue_texts
from headstart.support.terminal import progress

Kept = tuple[Tensor, Tensor]
"""The tokens ``[T]`` of a text, and the logits ``[T, V]`` that they were chosen by."""
PROMPTS, POSITIONS = 4, 64
"""How many batches of prompts are compared, and how many tokens of prompts whose tokens are the same."""
MOST_LOGITS = 2**26
"""How many logits of a batch are kept; of large batches and vocabularies, fewer positions are compared."""


@dataclass
class LogitsComparison:
    """Positions compared, how many of them have other logits in any bit, and by how much.

    Where no logit differs by more than d, only tokens whose logits are at most 2 d apart (divided by the temperature) can change places.
    """

    positions: int = 0
    differing: int = 0
    largest_difference: float = 0.0
    """Of one logit."""
    largest_logit: float = 0.0

    def add(self, logits_TV: Tensor, others_TV: Tensor) -> None:
        """Compare logits at the same positions."""
        largest_T = torch.where(logits_TV == others_TV, 0, logits_TV - others_TV).abs().amax(-1)  # equal infinities are equal
        self.positions += len(largest_T)
        self.differing += int((largest_T > 0).sum())
        self.largest_difference = max(self.largest_difference, float(largest_T.max()))
        self.largest_logit = max(self.largest_logit, float(logits_TV.max()))

    def add_texts(self, texts: Sequence[Kept], others: Sequence[Kept]) -> int:
        """Compare the texts of two systems up to the first token that differs; returns the number of texts that differ."""
        differing = 0
        for (tokens_T, logits_TV), (others_T, others_TV) in zip(texts, others, strict=True):
            same = _same(tokens_T, others_T)
            count = min(same + 1, len(tokens_T), len(others_T))
            self.add(logits_TV[:count], others_TV[:count])
            differing += not len(tokens_T) == len(others_T) == same
        return differing


def compare_logits(
    judging: Judging, drafting: Entry, ar: Entry, groups: Sequence[dict[int, Tensor]], settings: Settings, seed: int
) -> dict[str, Any]:
    """Compare a system with autoregressive decoding on some of the batches ``groups``; prompt ``i`` has seed ``seed + i``."""
    texts, others = drafting.measured.sequences, ar.measured.sequences
    same = {i: _same(texts[i][0], others[i][0]) for group in groups for i in group}
    first = sorted(groups, key=lambda group: all(same[i] == len(others[i][0]) for i in group))
    found = LogitsComparison()
    chosen = first[:PROMPTS]
    bar = progress("comparing logits", "batch", 2 * len(chosen))
    for group in chosen:
        wanted = [POSITIONS if same[i] == len(others[i][0]) else same[i] + 1 for i in group]
        room = max(1, MOST_LOGITS // (len(group) * judging.judge.backbone.vocab))
        needed = replace(settings, max_new_tokens=min(settings.max_new_tokens, max(wanted), room))
        both = []
        for one in (drafting, ar):
            both.append(continued(one.measured.system, group, needed, seed))
            for (i, prompt_T), (tokens_T, logits_TV) in zip(group.items(), both[-1], strict=True):
                judging.add_logits(one, prompt_T, tokens_T, logits_TV, seed + i)
            bar.update()
        found.add_texts(*both)
    bar.close()
    return asdict(found)


def _same(tokens_T: Tensor, others_T: Tensor) -> int:
    """The number of tokens before the first that differs."""
    shorter = min(len(tokens_T), len(others_T))
    differing = (tokens_T[:shorter] != others_T[:shorter]).nonzero()
    return int(differing[0]) if len(differing) else shorter


def continued(system: System, group: dict[int, Tensor], settings: Settings, seed: int) -> list[Kept]:
    """The tokens ``[T]`` with which the system continues each prompt, and the logits ``[T, V]`` that they were chosen by."""
    assert isinstance(system, HeadstartSystem)
    seeds = [seed + i for i in group]
    output = continue_texts(system.heads, list(group.values()), system.settings(settings), seeds, output_logits=True)
    assert output.logits is not None
    start, logits_BTV = max(map(len, group.values())), torch.stack(output.logits, 1)
    lengths = [1 + sum(accepted) for accepted in output.accept_lengths]  # the prefill writes one token
    rows = zip(output.sequences, logits_BTV, lengths, strict=True)
    return [(row_T[start : start + length], row_TV[:length]) for row_T, row_TV, length in rows]
