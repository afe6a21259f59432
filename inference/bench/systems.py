"""The systems that a benchmark compares (heads, autoregressive decoding, transformers' own ``generate``) and their results.

Shape suffix: T positions.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.inference.capture.capture import CaptureReport
from headstart.inference.capture.captured import Stopwatch
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, continue_by_transformers, continue_texts
from headstart.inference.steps import PARTS, Tally
from headstart.support.errors import UserError, naming

Beside = Callable[[Tensor, torch.device], dict[str, Tensor]]
"""`Prompter.beside`."""
AR, AR_TRANSFORMERS, LOOKUP = "AR (headstart)", "AR (transformers)", "prompt lookup"
"""Autoregressive decoding by headstart's loop, the same by transformers' ``generate``, and transformers' prompt lookup decoding."""
ALONE, FIXED = ", alone", ", fixed trees"
"""Added to the names of heads that are measured without proposers, and in trees of a fixed size."""
LOOKUP_TOKENS = 10
"""Tokens that prompt lookup drafts at a time: the value in transformers' documentation."""


@dataclass(frozen=True)
class Continuations:
    """The continuations of a batch of prompts."""

    sequences: list[Tensor]
    """The tokens of each row without the prompt, on the host."""
    tally: Tally
    accept_lengths: list[list[int]] | None = None
    """For each row, the number of tokens that each decoding step wrote; None where the system does not report it."""


class System(ABC):
    """A decoding method on one backbone, or on its weights in another engine."""

    drafts = False
    """True if it drafts by a method that is not headstart's."""
    one_by_one = False
    """True if it takes one sequence at a time."""
    plain: System | None = None
    """For a system that drafts, in another engine than transformers: the same engine without drafts, whose text it writes."""

    def __init__(self, name: str, backbone: Backbone, beside: Beside | None = None) -> None:
        self.name, self.backbone, self.beside = name, backbone, beside

    def images(self, prompts: Sequence[Tensor]) -> dict[str, Tensor]:
        """What the model reads beside the tokens; of several prompts nothing."""
        return {} if self.beside is None else self.beside(prompts[0], self.backbone.device)

    @property
    def capture(self) -> CaptureReport | None:
        """How forward passes are captured; None for systems without capture."""
        return None

    @abstractmethod
    def write(self, prompts: Sequence[Tensor], settings: Settings, seeds: Sequence[int]) -> Continuations:
        """Continue prompts as one batch. The caller measures the wall time."""


class HeadstartSystem(System):
    """Headstart's decoding loop; autoregressive without drafter and proposers. ``fixed``: shapes of its trees, greedy and sampled."""

    def __init__(
        self, name: str, heads: SpeculativeModel, fixed: tuple[TreeShape, TreeShape] | None = None, beside: Beside | None = None
    ) -> None:
        super().__init__(name, heads.backbone, beside)
        self.heads, self.fixed = heads, fixed

    def settings(self, settings: Settings) -> Settings:
        """The settings, with this system's fixed tree if it has one."""
        return settings if self.fixed is None else replace(settings, tree=self.fixed[settings.temperature > 0])

    @property
    def sources(self) -> list[str]:
        """The kinds of drafters and the names of proposers; none in autoregressive decoding."""
        return [type(one).__module__.rpartition(".")[2] for one in self.heads.drafters] + [one.name for one in self.heads.proposers]

    @property
    def capture(self) -> CaptureReport:
        return self.heads.engine(bool(self.sources)).capturer.report()

    def write(self, prompts: Sequence[Tensor], settings: Settings, seeds: Sequence[int], timed: bool = False) -> Continuations:
        output = continue_texts(self.heads, prompts, self.settings(settings), seeds, timed=timed, **self.images(prompts))
        start = max(map(len, prompts))
        lengths = [1 + sum(accepted) for accepted in output.accept_lengths]  # the prefill writes one token
        sequences = [row[start : start + length].cpu() for row, length in zip(output.sequences, lengths, strict=True)]
        return Continuations(sequences, output.tally, output.accept_lengths)

    def time_parts(self, groups: Sequence[dict[int, Tensor]], settings: Settings, seed: int) -> Tally:
        """Decode batches of prompts with exact times of every step's parts; prompt ``i`` has seed ``seed + i``."""
        total = Tally()
        for asked in groups:
            total.join(self.write(list(asked.values()), settings, [seed + i for i in asked], timed=True).tally)
        return total


class TransformersSystem(System):
    """Transformers' own ``generate``. ``arguments``: for assisted decoding, which takes one sequence at a time; None: autoregressive."""

    def __init__(self, name: str, backbone: Backbone, arguments: dict[str, Any] | None = None, beside: Beside | None = None) -> None:
        super().__init__(name, backbone, beside)
        self.arguments, self.drafts = arguments or {}, arguments is not None
        self.one_by_one = self.drafts

    def write(self, prompts: Sequence[Tensor], settings: Settings, seeds: Sequence[int]) -> Continuations:
        assert len(prompts) == 1 or not self.drafts
        passes, watch = 0, Stopwatch(self.backbone.device)
        first = _FirstStep(watch)

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        counting = self.backbone.model.register_forward_pre_hook(count)
        try:
            given = {"stopping_criteria": StoppingCriteriaList([first]), **self.arguments, **self.images(prompts)}
            with watch:
                output = continue_by_transformers(self.backbone.model, prompts, settings, seeds[0], **given)
                seconds, start = watch.lap(), max(map(len, prompts))
        finally:
            counting.remove()
        sequences = [_until_eos(row, self.backbone.model) for row in output.sequences[:, start:].cpu()]
        tokens = sum(map(len, sequences))
        decoded = tokens - sum(min(len(sequence), first.length - start) for sequence in sequences)
        row_passes = passes if len(prompts) == 1 else tokens  # in a batch each pass writes one token per row
        times = dict.fromkeys(PARTS, 0.0) | {"verify": seconds}
        counts = Tally(prefills=1, passes=passes - 1, row_passes=row_passes, emitted=tokens, decoded=decoded, seconds=times)
        return Continuations(sequences, counts)


class _FirstStep(StoppingCriteria):
    """Stops nothing; a lap of the watch ends when the first pass, the prefill, has written its tokens; the length of the rows is kept."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch, self.length = watch, 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if not self.length:
            self.watch.lap()
            self.length = input_ids.shape[1]
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def load_assistant(name: str, backbone: Backbone, trust_remote_code: bool) -> PreTrainedModel:
    """Load a draft model for transformers' assisted decoding. Raises UserError unless its vocabulary has the backbone's size."""
    with naming("--assistant"):
        assistant = load_backbone(name, trust_remote_code=trust_remote_code, device=backbone.device)
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
    rounds: list[Tally] = field(default_factory=lambda: [Tally()])
    """A tally for each round over the prompts."""
    sequences: dict[int, list[Tensor]] = field(default_factory=dict)
    """The answers to each prompt, one for each turn of each round."""
    prompts: dict[int, list[Tensor]] = field(default_factory=dict)
    """What each of them answers."""
    accept_lengths: dict[int, list[int]] = field(default_factory=dict)
    """The accept lengths of each prompt's first answer, where the system reports them."""
    parts: Tally | None = None
    """Exact times of a step's parts from a separate run, where the measured run has none."""

    def measure(self, task: str, asked: dict[int, Tensor], settings: Settings, seed: int) -> None:
        """Continue prompts of one task as one batch; prompt ``i`` has seed ``seed + i``."""
        with Stopwatch(self.system.backbone.device) as watch:
            written = self.system.write(list(asked.values()), settings, [seed + i for i in asked])
        written.tally.wall = watch.seconds
        self.tasks.setdefault(task, Tally()).join(written.tally)
        self.rounds[-1].join(written.tally)
        for row, (i, prompt_T) in enumerate(asked.items()):
            self.prompts.setdefault(i, []).append(prompt_T)
            self.sequences.setdefault(i, []).append(written.sequences[row])
            if written.accept_lengths is not None:
                self.accept_lengths.setdefault(i, written.accept_lengths[row])

    @property
    def total(self) -> Tally:
        """The tally over all tasks."""
        total = Tally()
        for tally in self.tasks.values():
            total.join(tally)
        return total

    def ratios(self, other: SystemResult) -> list[float]:
        """How many times as fast as the other system it was, by round."""
        return [mine.tokens_per_second / theirs.tokens_per_second for mine, theirs in zip(self.rounds, other.rounds, strict=True)]

    def differing(self, other: SystemResult) -> int:
        """The number of prompts for which the two systems wrote different tokens."""
        assert self.sequences.keys() == other.sequences.keys()
        return sum(not _same(answers, other.sequences[i]) for i, answers in self.sequences.items())


def _same(answers: list[Tensor], others: list[Tensor]) -> bool:
    return len(answers) == len(others) and all(map(torch.equal, answers, others))


def _until_eos(tokens_T: Tensor, model: PreTrainedModel) -> Tensor:
    """The tokens up to the first EOS token, without the padding after it."""
    eos = model.generation_config.eos_token_id
    ends = torch.isin(tokens_T, torch.tensor([eos] if isinstance(eos, int) else eos or [], dtype=tokens_T.dtype)).nonzero()
    return tokens_T[: int(ends[0]) + 1] if len(ends) else tokens_T


class OtherPrograms:
    """Within its context, the processors' time that other programs take; ``processors``: how many they keep busy, a mean."""

    processors = 0.0

    def __enter__(self) -> Self:
        self._before = time.monotonic(), self._taken()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        start, taken = self._before
        self.processors = max(self._taken() - taken, 0.0) / max(time.monotonic() - start, 1e-3)

    @staticmethod
    def _taken() -> float:
        whole = psutil.cpu_times()._asdict()
        idle = sum(whole.get(key, 0.0) for key in ("idle", "iowait", "guest", "guest_nice"))  # guests are counted as user too
        return sum(whole.values()) - idle - sum(os.times()[:4])
