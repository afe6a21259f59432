"""The systems that are compared: heads, autoregressive decoding, transformers' own ways to decode; and the results of each.

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
from headstart.inference.bench.timing import synchronize
from headstart.inference.capture.capture import CaptureReport
from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, Tally, continue_by_transformers, continue_texts
from headstart.support.errors import UserError

AR, AR_TRANSFORMERS, LOOKUP = "AR (headstart)", "AR (transformers)", "prompt lookup"
"""Autoregressive decoding by headstart's loop and by transformers' ``generate``, and its prompt lookup decoding."""
LOOKUP_TOKENS = 10
"""Tokens that prompt lookup drafts at a time: the number in transformers' documentation."""


@dataclass(frozen=True)
class Continuations:
    """The continuations of a batch of prompts."""

    sequences: list[Tensor]
    """Of each row, on the host, without the prompt."""
    tally: Tally
    accept_lengths: list[list[int]] | None = None
    """Of each row, the tokens each decoding step wrote; None where the system does not report them."""


class System(ABC):
    """A way to decode on one backbone."""

    def __init__(self, name: str, backbone: Backbone) -> None:
        self.name, self.backbone = name, backbone

    @property
    def capture(self) -> CaptureReport | None:
        """How forward passes are captured; None for systems that know no capture."""
        return None

    @abstractmethod
    def write(self, prompts: Sequence[Tensor], settings: Settings, seeds: Sequence[int]) -> Continuations:
        """Continue prompts together. The caller measures the wall time."""


class HeadstartSystem(System):
    """Heads, or without drafter and proposers autoregressive decoding. ``fixed``: shapes of its trees, greedy and sampled."""

    def __init__(self, name: str, heads: SpeculativeModel, fixed: tuple[TreeShape, TreeShape] | None = None) -> None:
        super().__init__(name, heads.backbone)
        self.heads, self.fixed = heads, fixed

    def settings(self, settings: Settings) -> Settings:
        """With this system's fixed trees, if it has any."""
        return settings if self.fixed is None else replace(settings, tree=self.fixed[settings.temperature > 0])

    @property
    def sources(self) -> list[str]:
        """The kinds of drafters and the names of proposers; none in autoregressive decoding."""
        return [type(one).__name__.lower() for one in self.heads.drafters] + [one.name for one in self.heads.proposers]

    @property
    def capture(self) -> CaptureReport:
        return self.heads.engine(bool(self.sources)).capturer.report()

    def write(self, prompts: Sequence[Tensor], settings: Settings, seeds: Sequence[int], timed: bool = False) -> Continuations:
        output = continue_texts(self.heads, prompts, self.settings(settings), seeds, timed=timed)
        assert output.accept_lengths is not None
        start = max(map(len, prompts))
        lengths = [1 + sum(accepted) for accepted in output.accept_lengths]   # the prefill writes one
        tally = Tally()
        tally.add(output)
        sequences = [row[start : start + length].cpu() for row, length in zip(output.sequences, lengths, strict=True)]
        return Continuations(sequences, tally, output.accept_lengths)

    def time_parts(self, groups: Sequence[dict[int, Tensor]], settings: Settings, seed: int) -> Tally:
        """Batches of prompts once more, with exact times of every step's parts; prompt ``i`` with seed ``seed + i``."""
        total = Tally()
        for asked in groups:
            total.join(self.write(list(asked.values()), settings, [seed + i for i in asked], timed=True).tally)
        return total


class TransformersSystem(System):
    """Transformers' own ``generate``, with further arguments if it drafts; then it decodes one sequence at a time."""

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
        sequences = [_until_eos(row, self.backbone.model) for row in output.sequences[:, max(map(len, prompts)) :].cpu()]
        tokens = sum(map(len, sequences))
        row_passes = passes if len(prompts) == 1 else tokens   # one token a pass, but for those that draft
        return Continuations(sequences, Tally(tokens=tokens, passes=passes - 1, reads=passes, row_passes=row_passes, emitted=tokens))


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
    """The results of one system at one temperature and batch size."""

    system: System
    tasks: dict[str, Tally] = field(default_factory=dict)
    sequences: dict[int, list[Tensor]] = field(default_factory=dict)
    """By prompt, its answers: one for each turn."""
    accept_lengths: dict[int, list[int]] = field(default_factory=dict)
    """By prompt, of its first answer, where the system reports them."""
    parts: Tally | None = None
    """Exact times of a step's parts, where the measured run cannot have them."""

    def measure(self, task: str, asked: dict[int, Tensor], settings: Settings, seed: int) -> None:
        """Continue prompts of one task together; prompt ``i`` with seed ``seed + i``."""
        device = self.system.backbone.device
        synchronize(device)
        with Stopwatch() as watch:
            written = self.system.write(list(asked.values()), settings, [seed + i for i in asked])
            synchronize(device)
        written.tally.wall = watch.seconds
        self.tasks.setdefault(task, Tally()).join(written.tally)
        for row, i in enumerate(asked):
            self.sequences.setdefault(i, []).append(written.sequences[row])
            if written.accept_lengths is not None:
                self.accept_lengths.setdefault(i, written.accept_lengths[row])

    @property
    def total(self) -> Tally:
        """Over all tasks."""
        total = Tally()
        for tally in self.tasks.values():
            total.join(tally)
        return total

    def differing(self, other: SystemResult) -> int:
        """The number of prompts that the two answer differently."""
        assert self.sequences.keys() == other.sequences.keys()
        return sum(not _same(answers, other.sequences[i]) for i, answers in self.sequences.items())


def _same(answers: list[Tensor], others: list[Tensor]) -> bool:
    return len(answers) == len(others) and all(map(torch.equal, answers, others))


def _until_eos(tokens_T: Tensor, model: PreTrainedModel) -> Tensor:
    """Without the padding after the first EOS token."""
    eos = model.generation_config.eos_token_id
    ends = torch.isin(tokens_T, torch.tensor([eos] if isinstance(eos, int) else eos or [], dtype=tokens_T.dtype)).nonzero()
    return tokens_T[: int(ends[0]) + 1] if len(ends) else tokens_T
