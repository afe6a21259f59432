"""What decoding steps wrote and took, and sums over them: what every report counts from, and what a call to generate returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from headstart.inference.engine.tree import VerifiedTree

PARTS = ("draft", "verify", "host")
"""The parts of a step."""


class Step(NamedTuple):
    """One decoding step: a forward pass over all rows. Sequences are given by their numbers."""

    written: dict[int, int]
    """The number of tokens written to each sequence."""
    nodes: int
    """Nodes of a row's tree, root included: 1 for an autoregressive step; with beams, each beam has a root."""
    seconds: dict[str, float]
    """Seconds by part."""
    trees: dict[int, VerifiedTree]
    """The verified tree of each sequence; empty in beam search."""
    rested: bool = False
    """True if nothing was drafted or verified since drafts would have cost more than they save, or to time such a step."""


def cut(steps: Iterable[Step], lengths: dict[int, int]) -> list[Step]:
    """The steps without what they wrote behind the end of a text: tokens written before it was known that another row ends all.

    ``lengths``: tokens that the steps wrote to each sequence up to its end.
    """
    left, found = dict(lengths), list[Step]()
    for step in steps:
        written = {number: min(tokens, left[number]) for number, tokens in step.written.items() if left[number]}
        found.append(step._replace(written=written))
        left |= {number: left[number] - tokens for number, tokens in written.items()}
    return found


@dataclass
class Tally:
    """Sums over steps, of one text or of many."""

    texts: int = 0
    """Texts whose first token, which the prefill writes, is counted."""
    prefills: int = 0
    """Forward passes that are not steps."""
    passes: int = 0
    """Steps; one over a batch counts once."""
    rested: int = 0
    """Steps in which drafts rested, since they would have cost more than they save."""
    row_passes: int = 0
    """Steps, each counted once for every row it wrote to."""
    emitted: int = 0
    """Tokens written by them."""
    accepted: list[int] = field(default_factory=list)
    """For each depth, the number of row passes in which a draft was accepted."""
    drafts: int = 0
    """Row passes that verified a draft."""
    draft_tokens: int = 0
    """Tokens drafted."""
    kept: list[int] = field(default_factory=list)
    """As ``accepted``, with the drafts past the end of a text, as engines count them."""
    nodes: Counter[int] = field(default_factory=Counter)
    """Number of steps by the nodes of a row's tree."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds by part of a step."""
    decoded: int = 0
    """Tokens written after the prefill, in these seconds."""
    wall: float = 0.0
    """Wall-clock seconds, prefill included."""

    @staticmethod
    def of(steps: Iterable[Step], texts: int, depth: int) -> Tally:
        """The sums over one call's steps; acceptance rates of depths up to ``depth`` are counted in any case."""
        tally = Tally(texts, prefills=1, accepted=[0] * depth)
        for step in steps:
            tally.add(step)
        return tally

    def add(self, step: Step) -> None:
        lengths, trees = [*step.written.values()], [step.trees[number] for number in step.written if step.trees]
        self.join(
            Tally(
                passes=1,
                rested=step.rested,
                row_passes=len(lengths),
                emitted=sum(lengths),
                accepted=_by_depth([length - 1 for length in lengths]),
                drafts=sum(tree.drafted > 0 for tree in trees),
                draft_tokens=sum(tree.drafted for tree in trees),
                kept=_by_depth([tree.kept for tree in trees]),
                nodes=Counter([step.nodes]),
                seconds=step.seconds,
                decoded=sum(lengths),
            )
        )

    def join(self, other: Tally) -> None:
        """Add another tally."""
        for member in fields(self):
            mine, theirs = getattr(self, member.name), getattr(other, member.name)
            if isinstance(mine, list):
                mine = [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)]
            elif isinstance(mine, dict):
                mine = type(mine)({key: mine.get(key, 0) + theirs.get(key, 0) for key in {**mine, **theirs}})
            else:
                mine += theirs
            setattr(self, member.name, mine)

    @property
    def tokens(self) -> int:
        """All tokens written."""
        return self.texts + self.emitted

    @property
    def tau(self) -> float:
        """Mean acceptance length: tokens per row and pass, the backbone's own token included; 1 for autoregressive decoding."""
        return self.emitted / self.row_passes if self.row_passes else 1.0

    @property
    def rested_share(self) -> float:
        """The share of passes in which drafts rested."""
        return self.rested / max(self.passes, 1)

    @property
    def acceptance_per_depth(self) -> list[float]:
        """Acceptance rate at each depth, as a fraction of row passes."""
        return [count / max(self.row_passes, 1) for count in self.accepted]

    def engine_counts(self) -> dict[str, Any]:
        """Acceptance under vLLM's names and as vLLM counts it: over passes with a draft, with the drafts kept past the end of a text.

        ``draft_acceptance_rate``: drafts kept of all tokens drafted. Nothing is counted (None, []) if no pass had a draft.
        """
        kept = self.kept + [0] * (len(self.accepted) - len(self.kept))
        return {
            "mean_acceptance_length": 1 + sum(kept) / self.drafts if self.drafts else None,
            "acceptance_rate_per_pos": [count / self.drafts for count in kept] if self.drafts else [],
            "draft_acceptance_rate": sum(kept) / self.draft_tokens if self.draft_tokens else None,
        }

    @property
    def tokens_per_second(self) -> float:
        """Throughput over all sequences, prefill included."""
        return self.tokens / self.wall

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The same after the prefill; None if nothing was written after it."""
        return self.decoded / sum(self.seconds.values()) if self.decoded else None

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds per pass: ``draft_ms``, ``verify_ms``, ``host_ms``."""
        return {f"{part}_ms": 1000 * self.seconds[part] / max(self.passes, 1) for part in PARTS}


def _by_depth(counts: list[int]) -> list[int]:
    """How many of the counts are larger than 0, 1, ..."""
    return [sum(count > depth for count in counts) for depth in range(max(counts, default=0))]


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """The output with ``return_dict_in_generate=True``: transformers' fields and statistics of the decoding steps."""

    steps: list[Step] = None  # type: ignore[assignment]  # transformers allows no other default
    """The forward passes of the backbone after prefill."""
    tally: Tally = None  # type: ignore[assignment]
    """The sums over them."""
    capture: str | None = None
    """How its last passes ran: ``compile``, ``trace``, ``cuda-graph`` or ``off``."""
    sequences_scores: Tensor | None = None
    """With ``num_beams`` and ``output_scores=True``: the score of each sequence."""
    beam_indices: Tensor | None = None
    """With ``num_beams``: the beam that each token continued, int32 ``[B * num_return_sequences, T]``; -1 after the end."""

    @property
    def passes(self) -> int:
        """Forward passes of the backbone after prefill."""
        return len(self.steps)

    @property
    def tau(self) -> float:
        """Mean acceptance length: tokens per row and pass, the backbone's own token included; 1 for autoregressive decoding."""
        return self.tally.tau

    @property
    def rested(self) -> int:
        """Passes in which drafts rested: they would have cost more than they save, or such a pass was to be timed. Where drafts rest in
        most passes, tau is near 1 whatever they are worth."""
        return self.tally.rested

    @property
    def acceptance_per_depth(self) -> list[float]:
        """Acceptance rate at each depth, as a fraction of passes; tau is 1 + their sum."""
        return self.tally.acceptance_per_depth

    @property
    def seconds(self) -> dict[str, float]:
        """Total seconds spent on ``draft``, ``verify`` and ``host`` (on an accelerator, exact only with ``timed=True``)."""
        return self.tally.seconds

    @property
    def nodes(self) -> list[int]:
        """For each pass, the nodes of a row's tree, root included: 1 for an autoregressive step; with beams, each beam has a root."""
        return [step.nodes for step in self.steps]

    @property
    def accept_lengths(self) -> list[list[int]]:
        """For each row, the number of tokens that each pass wrote."""
        return [[step.written[row] for step in self.steps if row in step.written] for row in range(self.tally.texts)]

    @property
    def trees(self) -> list[list[VerifiedTree]] | None:
        """For each row, the verified tree of each of its passes; None with beams."""
        if self.beam_indices is not None:
            return None
        return [[step.trees[row] for step in self.steps if row in step.written] for row in range(self.tally.texts)]

    @property
    def kept(self) -> list[list[int]] | None:
        """For each row, the number of drafts that each pass accepted, those past the end of the text included; None with beams."""
        return None if self.trees is None else [[tree.kept for tree in row] for row in self.trees]

    @property
    def drafted(self) -> list[list[int]] | None:
        """For each row, the number of tokens drafted for each pass; None with beams."""
        return None if self.trees is None else [[tree.drafted for tree in row] for row in self.trees]
