"""A race: several systems continue the same prompts, batch by batch in a rotating order. Shape suffix: T positions."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor
from tqdm import tqdm

from headstart.inference.bench.systems import HeadstartSystem, System, SystemResult
from headstart.inference.bench.timing import LONGEST_RACE_WARM_UP, LONGEST_WAIT, QUIET, WAITS, WARM_UP, wait, warm_up
from headstart.inference.measure import Settings
from headstart.support.chat.prompts import Prompt, Prompter

logger = logging.getLogger(__name__)
TIMED = 4
"""Batches decoded once more on an accelerator for exact times of the parts of a step (synchronizing after each part costs speed)."""
WARM_UP_SHARE = 0.5
"""Of the tokens that are measured: as many forward passes warm a system up at most, however often it still captures."""


class Race:
    """Several systems continue the same prompts, interleaved; later questions follow the answers of the ``leader``."""

    def __init__(
        self, leader: System, systems: Sequence[System], prompts: Sequence[Prompt], settings: Settings, batch: int, seed: int
    ) -> None:
        self.results = [SystemResult(system) for system in systems]
        self.leader = next(one for one in self.results if one.system is leader)
        self.prompts, self.settings, self.batch, self.seed = prompts, settings, batch, seed
        self.pace = 0.1 if sys.stderr.isatty() else 10.0  # seconds between updates of progress
        self.dropped_turns = 0
        """Later turns of conversations that did not fit into the context."""

    def run(self, prompter: Prompter | None) -> dict[System, SystemResult]:
        """Continue every prompt with every system, then the next question of each conversation until none is left; returns the results."""
        asked = dict(enumerate(self.prompts))
        self._warm_up(asked)
        total = sum(1 + len(prompt.later) for prompt in self.prompts) * len(self.results)
        with tqdm(total=total, desc=self.title, unit="sequence", mininterval=self.pace) as progress:
            while asked:
                for turn, (task, group) in enumerate(self._groups(asked)):
                    first = turn % len(self.results)
                    for one in self.results[first:] + self.results[:first]:
                        one.measure(task, group, self.settings, self.seed)
                        progress.set_postfix_str(f"{one.system.name}: {one.total.tokens_per_second:.1f} tokens/s", refresh=False)
                        progress.update(len(group))
                asked = {} if prompter is None else self._next(asked, prompter, progress)
        self._time_parts()
        return {one.system: one for one in self.results}

    @property
    def title(self) -> str:
        """The setting, for people."""
        return f"temperature {self.settings.temperature:g}" + (f", batch {self.batch}" if self.batch > 1 else "")

    @property
    def groups(self) -> list[dict[int, Tensor]]:
        """The batches of the prompts' first turns."""
        return [group for _, group in self._groups(dict(enumerate(self.prompts)))]

    def _warm_up(self, asked: dict[int, Prompt]) -> None:
        """Let every system continue prompts, at most all of them, until it captures nothing more or `WARM_UP_SHARE` is reached.

        What is compiled beside is waited for, since compiling slows every system.
        """
        left, systems = float(LONGEST_WAIT), [one.system for one in self.results]
        longest = min(LONGEST_RACE_WARM_UP, max(WARM_UP, int(WARM_UP_SHARE * len(asked) * self.settings.max_new_tokens)))
        with tqdm(total=len(systems), desc="warm-up", unit="system", mininterval=self.pace) as progress:
            for waited in range(1 + WAITS):
                for system in systems:
                    warm_up(self._warm_up_rounds(system, asked, progress), at_most=longest, quiet=QUIET if system.drafting else 1)
                    progress.update()
                systems = [one for one in systems if one.compiling]
                if not systems or waited == WAITS:
                    break
                progress.total += len(systems)
                progress.set_postfix_str("compiling")
                left -= wait(lambda: any(one.system.compiling for one in self.results), progress.refresh, left)
        if left_over := [one.system.name for one in self.results if one.system.compiling]:
            logger.warning("%s: still being compiled beside, which slows every system; measure again in some minutes", ", ".join(left_over))

    def _warm_up_rounds(self, system: System, asked: dict[int, Prompt], progress: tqdm) -> Iterator[Callable[[], int]]:
        def passes(group: dict[int, Tensor]) -> int:
            progress.set_postfix_str(system.name)
            return system.write(list(group.values()), self.settings, [self.seed + i for i in group]).tally.reads

        for _, group in self._groups(asked):
            yield partial(passes, group)

    def _groups(self, asked: dict[int, Prompt]) -> Iterator[tuple[str, dict[int, Tensor]]]:
        """Batches of prompts; all prompts of a batch have one task."""
        for task in dict.fromkeys(prompt.task for prompt in asked.values()):
            prompts = [(i, prompt.ids_T) for i, prompt in asked.items() if prompt.task == task]
            for start in range(0, len(prompts), self.batch):
                yield task, dict(prompts[start : start + self.batch])

    def _next(self, asked: dict[int, Prompt], prompter: Prompter, progress: tqdm) -> dict[int, Prompt]:
        """The next question of each conversation, after the answer to the previous one."""
        context = self.leader.system.backbone.max_positions
        following: dict[int, Prompt] = {}
        for i, prompt in asked.items():
            if not prompt.later:
                continue
            after = prompter.follow(prompt, self.leader.sequences[i][-1])
            if context is None or len(after.ids_T) + self.settings.max_new_tokens <= context:
                following[i] = after
            else:
                self.dropped_turns += len(prompt.later)
                progress.total -= len(prompt.later) * len(self.results)
        return following

    def _time_parts(self) -> None:
        """On an accelerator, decode some prompts once more with exact times."""
        if self.leader.system.backbone.device.type == "cpu":
            return
        for one in self.results:
            if isinstance(one.system, HeadstartSystem) and one.system.sources:
                one.parts = one.system.time_parts(self.groups[:TIMED], self.settings, self.seed)
