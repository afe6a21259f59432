"""What is compared: heads, plain decoding by our rule, and transformers' own ways to decode; and what each of them came to.

Shape suffix: T positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.inference.bench.bandwidth import now
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, Tally, continue_by_transformers, continue_texts
from headstart.support.errors import UserError

PLAIN, TRANSFORMERS, LOOKUP = "plain", "transformers", "prompt lookup"
LOOKUP_TOKENS = 10
"""Tokens that prompt lookup drafts at a time: what transformers' documentation shows."""


@dataclass(frozen=True)
class Continuations:
    """What a batch of prompts was continued with."""

    texts: list[Tensor]
    """Of each row, on the host, the prompt left out."""
    tally: Tally
    runs: list[list[int]] | None = None
    """Of each row, how many tokens each pass wrote, where the system tells."""


class System(ABC):
    """A way to decode on one backbone."""

    def __init__(self, name: str, backbone: Backbone) -> None:
        self.name, self.backbone = name, backbone

    @property
    def disturbed(self) -> int:
        """Steps so far that took longer than the next ones will: something was recorded for replay."""
        return 0

    @abstractmethod
    def write(self, prompts: Sequence[Tensor], settings: Settings, seeds: Sequence[int]) -> Continuations:
        """Continue prompts together. The time by the clock is the caller's to take."""


class HeadstartSystem(System):
    """Heads, or without a drafter plain decoding by the same rule. ``fixed``: trees of these shapes, greedy and sampled."""

    def __init__(self, name: str, heads: SpeculativeModel, fixed: tuple[TreeShape, TreeShape] | None = None) -> None:
        super().__init__(name, heads.backbone)
        self.heads, self.fixed = heads, fixed

    def settings(self, settings: Settings) -> Settings:
        """With this system's own trees, if it has any."""
        return settings if self.fixed is None else replace(settings, tree=self.fixed[settings.temperature > 0])

    @property
    def sources(self) -> list[str]:
        """What drafts: the kinds of trained heads, and the names of proposers; none in plain decoding."""
        return [type(one).__name__.lower() for one in self.heads.drafters] + [one.name for one in self.heads.proposers]

    @property
    def disturbed(self) -> int:
        return self.heads.disturbed

    def write(self, prompts: Sequence[Tensor], settings: Settings, seeds: Sequence[int], timed: bool = False) -> Continuations:
        output = continue_texts(self.heads, prompts, self.settings(settings), seeds, timed=timed)
        assert output.runs is not None
        start = max(map(len, prompts))
        lengths = [1 + sum(runs) for runs in output.runs]   # the pass over the prompt writes one
        tally = Tally()
        tally.add(output)
        texts = [row[start : start + length].cpu() for row, length in zip(output.sequences, lengths, strict=True)]
        return Continuations(texts, tally, output.runs)

    def time_parts(self, groups: Sequence[dict[int, Tensor]], settings: Settings, seed: int) -> Tally:
        """Batches of prompts once more, waiting for the accelerator at every step; prompt ``i`` with seed ``seed + i``."""
        every = Tally()
        for asked in groups:
            every.join(self.write(list(asked.values()), settings, [seed + i for i in asked], timed=True).tally)
        return every


class TransformersSystem(System):
    """Transformers' own ``generate``, with arguments of its own; one that drafts decodes one text at a time."""

    def __init__(self, name: str, backbone: Backbone, arguments: dict[str, Any] | None = None) -> None:
        super().__init__(name, backbone)
        self.arguments, self.drafts = arguments or {}, arguments is not None

    def write(self, prompts: Sequence[Tensor], settings: Settings, seeds: Sequence[int]) -> Continuations:
        assert len(prompts) == 1 or not self.drafts
        passes = 0

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        counting = self.backbone.model.register_forward_pre_hook(count)
        try:
            output = continue_by_transformers(self.backbone.model, prompts, settings, seeds[0], **self.arguments)
        finally:
            counting.remove()
        texts = [_ended(row, self.backbone.model) for row in output.sequences[:, max(map(len, prompts)) :].cpu()]
        tokens = sum(map(len, texts))
        row_passes = passes if len(prompts) == 1 else tokens   # one token a pass, but for those that draft
        return Continuations(texts, Tally(tokens=tokens, passes=passes - 1, reads=passes, row_passes=row_passes, emitted=tokens))


def load_assistant(name: str, backbone: Backbone, trust_remote_code: bool) -> PreTrainedModel:
    """A draft model for transformers' assisted decoding. Raises UserError unless it shares the backbone's vocabulary."""
    try:
        assistant = load_backbone(name, trust_remote_code=trust_remote_code, device=backbone.device)
    except UserError as error:
        raise UserError(f"--assistant: {error}") from None
    if assistant.vocab != backbone.vocab:
        raise UserError(
            f"--assistant {name} has a vocabulary of {assistant.vocab} tokens, the backbone {backbone.name} one of {backbone.vocab};"
            " give a model with the backbone's tokenizer"
        )
    return assistant.model.to(backbone.dtype)


@dataclass
class SystemResult:
    """What one system came to at one setting."""

    system: System
    tasks: dict[str, Tally] = field(default_factory=dict)
    texts: dict[int, list[Tensor]] = field(default_factory=dict)
    """By prompt, its answers: one, or one for each turn."""
    runs: dict[int, list[int]] = field(default_factory=dict)
    """By prompt, of its first answer, where the system tells."""
    parts: Tally | None = None
    """Where the time of a pass goes, where the run itself cannot tell."""

    def measure(self, task: str, asked: dict[int, Tensor], settings: Settings, seed: int) -> None:
        """Continue prompts of one task together; prompt ``i`` with seed ``seed + i``."""
        device = self.system.backbone.device
        start = now(device)
        written = self.system.write(list(asked.values()), settings, [seed + i for i in asked])
        written.tally.wall = now(device) - start
        self.tasks.setdefault(task, Tally()).join(written.tally)
        for row, i in enumerate(asked):
            self.texts.setdefault(i, []).append(written.texts[row])
            if written.runs is not None:
                self.runs.setdefault(i, written.runs[row])

    @property
    def total(self) -> Tally:
        """Over all tasks."""
        every = Tally()
        for tally in self.tasks.values():
            every.join(tally)
        return every

    def differing(self, other: SystemResult) -> int:
        """How many prompts the two answer differently."""
        assert self.texts.keys() == other.texts.keys()
        return sum(not _same(mine, other.texts[i]) for i, mine in self.texts.items())


def _same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def _ended(text_T: Tensor, model: PreTrainedModel) -> Tensor:
    """Without the padding behind the token that ends it."""
    eos = model.generation_config.eos_token_id
    ends = torch.isin(text_T, torch.tensor([eos] if isinstance(eos, int) else eos or [], dtype=text_T.dtype)).nonzero()
    return text_T[: int(ends[0]) + 1] if len(ends) else text_T
