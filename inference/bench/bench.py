"""Compares heads with autoregressive decoding and with transformers' own ``generate`` on the same prompts in one process.

The systems alternate batch by batch in a rotating order, in several rounds over the prompts, so that a machine that slows down or warms up
affects all of them, and speeds are ratios within a round. Later questions of a conversation follow the answers of autoregressive decoding.

Shape suffixes: T positions.
"""

import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from headstart.chat.prompts import Prompt, Prompter
from headstart.heads.backbone.backbone import Backbone
from headstart.inference.bench.judging import Judging, compare_logits
from headstart.inference.bench.results import References, Sizes, baseline, busy, memory_bandwidth, result, weight_bytes
from headstart.inference.bench.systems import (
    ALONE,
    AR,
    AR_TRANSFORMERS,
    FIXED,
    Beside,
    HeadstartSystem,
    OtherPrograms,
    System,
    SystemResult,
    TransformersSystem,
)
from headstart.inference.bench.table import samples
from headstart.inference.engine.request import context_of, require_room, unknown_token
from headstart.inference.engine.tree import TreeShape, TreeSize
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings
from headstart.inference.runtime import paused
from headstart.inference.steps import Tally
from headstart.support.devices import dtype_name, versions
from headstart.support.errors import UserError
from headstart.support.terminal import watched

TIMED = 4
"""Batches decoded once more on an accelerator for exact times of the parts of a step (synchronizing after each part costs speed)."""
WARM_UP, WARM_UP_SECONDS = 4, 15.0
"""Batches that warm up a system that captures passes (others need one), and the seconds after which it begins no other of them."""


class Race:
    """Several systems continue the same prompts, interleaved; later questions follow the answers of the ``leader``."""

    def __init__(
        self, leader: System, systems: Sequence[System], prompts: Sequence[Prompt], settings: Settings, batch: int, seed: int
    ) -> None:
        self.results = [SystemResult(system) for system in systems]
        self.leader = next(entry for entry in self.results if entry.system is leader)
        self.prompts, self.settings, self.batch, self.seed = prompts, settings, batch, seed
        self.pace = 0.1 if sys.stderr.isatty() else 10.0  # seconds between updates of progress
        self.others = OtherPrograms()
        self.dropped_turns = 0
        """Later turns of conversations that did not fit into the context."""

    def run(self, prompter: Prompter | None, rounds: int = 1) -> dict[System, SystemResult]:
        """Continue every prompt with every system, then the next question of each conversation until none is left, in so many rounds;
        returns the results."""
        self._warm_up()
        total = sum(1 + len(prompt.later) for prompt in self.prompts) * len(self.results) * rounds
        with self.others, tqdm(total=total, desc=self.title, unit="sequence", mininterval=self.pace) as progress:
            for number in range(rounds):
                self._round(number, prompter, progress)
        self._time_parts()
        return {entry.system: entry for entry in self.results}

    def _round(self, number: int, prompter: Prompter | None, progress: tqdm) -> None:
        for entry in self.results if number else ():
            entry.rounds.append(Tally())
        asked, self.dropped_turns = dict(enumerate(self.prompts)), 0
        while asked:
            for turn, (task, group) in enumerate(self._groups(asked), number):
                first = turn % len(self.results)
                for entry in self.results[first:] + self.results[:first]:
                    entry.measure(task, group, self.settings, self.seed)
                    progress.set_postfix_str(f"{entry.system.name}: {entry.total.tokens_per_second:.1f} tokens/s", refresh=False)
                    progress.update(len(group))
            asked = {} if prompter is None else self._next(asked, prompter, progress)

    @property
    def title(self) -> str:
        """The setting, for people."""
        return f"temperature {self.settings.temperature:g}" + (f", batch {self.batch}" if self.batch > 1 else "")

    @property
    def groups(self) -> list[dict[int, Tensor]]:
        """The batches of the prompts' first turns."""
        return [group for _, group in self._groups(dict(enumerate(self.prompts)))]

    def _warm_up(self) -> None:
        """Let every system continue the first prompts: what is loaded, captured and first timed is in no round."""
        with tqdm(total=len(self.results), desc="warm-up", unit="system", mininterval=self.pace) as progress:
            for system in (entry.system for entry in self.results):
                progress.set_postfix_str(system.name)
                start = time.monotonic()
                for group in self.groups[: 1 if system.capture is None else WARM_UP]:
                    if time.monotonic() - start < WARM_UP_SECONDS:
                        system.write(list(group.values()), self.settings, [self.seed + i for i in group])
                progress.update()

    def _groups(self, asked: dict[int, Prompt]) -> Iterator[tuple[str, dict[int, Tensor]]]:
        """Batches of prompts; all prompts of a batch have one task."""
        for task in dict.fromkeys(prompt.task for prompt in asked.values()):
            prompts = [(i, prompt.ids_T) for i, prompt in asked.items() if prompt.task == task]
            for start in range(0, len(prompts), self.batch):
                yield task, dict(prompts[start : start + self.batch])

    def _next(self, asked: dict[int, Prompt], prompter: Prompter, progress: tqdm) -> dict[int, Prompt]:
        """The next question of each conversation, after the answer to the previous one."""
        context = context_of(self.leader.system.backbone)
        following: dict[int, Prompt] = {}
        for i, prompt in asked.items():
            if not prompt.later:
                continue
            after = None
            with suppress(UserError):  # the template may refuse what was written
                after = prompter.follow(prompt, self.leader.sequences[i][-1])
            if after is not None and (context is None or len(after.ids_T) + self.settings.max_new_tokens <= context):
                following[i] = after
            else:
                self.dropped_turns += len(prompt.later)
                progress.total -= len(prompt.later) * len(self.results)
        return following

    def _time_parts(self) -> None:
        """On an accelerator, decode some prompts once more with exact times."""
        if self.leader.system.backbone.device.type == "cpu":
            return
        for entry in self.results:
            if isinstance(entry.system, HeadstartSystem) and entry.system.sources:
                entry.parts = entry.system.time_parts(self.groups[:TIMED], self.settings, self.seed)


@dataclass(frozen=True)
class Plan:
    """Settings of a benchmark. ``seed``: the seed of prompt 0; prompt ``i`` has ``seed + i``."""

    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    tree: TreeSize = "auto"
    sampled: TreeSize | None = None
    """Replaces ``tree`` above temperature 0, where the next token is less certain and a wider tree is faster."""
    batches: tuple[int, ...] = (1,)
    fixed_trees: tuple[TreeShape, TreeShape] | None = None
    """Also measure the trained heads without proposers, in trees of these shapes (greedy, sampled)."""
    also_alone: bool = False
    """Also measure the trained heads without proposers, in the trees of the others."""
    rounds: int = 1
    """How often every system continues all prompts, in turns with the others."""

    def settings(self, temperature: float) -> Settings:
        """Decoding settings at one temperature."""
        return Settings(self.max_new_tokens, temperature, tree=self.sampled if self.sampled and temperature > 0 else self.tree)


@paused()
def compare(
    heads: Sequence[tuple[str, SpeculativeModel]],
    prompts: Sequence[Prompt],
    plan: Plan,
    prompter: Prompter | None = None,
    others: Sequence[System] = (),
) -> dict[str, Any]:
    """Measure all systems. The report has an entry for each system, temperature and batch size, in two lists: baselines and heads.

    ``heads``: pairs of a name for the report and a model, all on one backbone. ``prompter``: needed for later turns and sample outputs.
    ``others``: further baselines. Prompts that leave no room in the context are set aside. Raises UserError if all do.
    """
    backbone = heads[0][1].backbone
    fitting, too_long = those_that_fit(prompts, plan, backbone)
    beside = None if prompter is None else prompter.beside
    ar = HeadstartSystem(AR, SpeculativeModel(backbone, capture=heads[0][1].capture), None, beside)
    ar_transformers = TransformersSystem(AR_TRANSFORMERS, backbone, None, beside)
    drafting, judging = _drafting_systems(heads, plan, beside), Judging(backbone, beside)
    report = _header(backbone, fitting, plan, len(prompts)) | {"set_aside": too_long}
    for temperature in plan.temperatures:
        first: SystemResult | None = None
        for batch in plan.batches:
            baselines = [ar_transformers, ar, *(system for system in others if batch == 1 or not system.one_by_one)]
            race = Race(ar, [*baselines, *drafting], fitting, plan.settings(temperature), batch, plan.seed)
            by_system = race.run(prompter, plan.rounds)
            references = References(by_system[ar], by_system[ar_transformers], first, by_system)
            sizes = Sizes(temperature, batch, report["weight_bytes"], report["memory_bytes_per_second"])
            ours = {system: result(by_system[system], references, race.settings, sizes) for system in drafting}
            rows = {system: baseline(by_system[system], references, sizes) for system in baselines}
            for system, row in (rows | ours).items():
                tqdm.write(f"{race.title}: {system.name}: tau {row['tau']:.2f}, {row['tokens_per_second']:.1f} tokens/s", file=sys.stderr)
            _judge(judging, rows | ours, by_system, race)
            report["baselines"], report["results"] = [*report["baselines"], *rows.values()], [*report["results"], *ours.values()]
            report["dropped_turns"] += race.dropped_turns
            report["other_programs"] = max(report["other_programs"], race.others.processors)
            if first is None and prompter is not None:
                report["samples"] += samples([by_system[system] for system in drafting], fitting, prompter.tokenizer, temperature)
            first = first or by_system[ar]
    judging.finish(report)
    return report | {"busy": busy(report)}


def _judge(judging: Judging, rows: dict[System, dict[str, Any]], by_system: dict[System, SystemResult], race: Race) -> None:
    """Judge what the systems of a race wrote, and compare some logits. What transformers sampled follows noise of its own."""
    greedy = race.settings.temperature == 0
    entries = {
        system: judging.add(row, by_system[system], race.seed)
        for system, row in watched(rows.items(), "judging the texts", "system")
        if greedy or isinstance(system, HeadstartSystem)
    }
    drafting = [system for system, row in rows.items() if "head" in row]
    beside = [entries[system] for system in drafting]
    logits = compare_logits(judging, beside, entries[race.leader.system], race.groups, race.settings, race.seed)
    for system, compared in zip(drafting, logits, strict=True):
        rows[system]["logits"] = compared


def _drafting_systems(heads: Sequence[tuple[str, SpeculativeModel]], plan: Plan, beside: Beside | None) -> list[HeadstartSystem]:
    """The heads as given and, if the plan says so, each trained drafter without proposers, in adaptive and in fixed trees."""
    systems = [HeadstartSystem(name, loaded, None, beside) for name, loaded in heads]
    trained = [(name, loaded) for name, loaded in heads if loaded.drafter is not None]
    if plan.also_alone:
        systems += [HeadstartSystem(f"{name}{ALONE}", _alone(loaded), None, beside) for name, loaded in trained]
    if plan.fixed_trees is not None:
        systems += [HeadstartSystem(f"{name}{FIXED}", _alone(loaded), plan.fixed_trees, beside) for name, loaded in trained]
    return systems


def _alone(heads: SpeculativeModel) -> SpeculativeModel:
    """The trained drafter without proposers."""
    alone = SpeculativeModel(heads.backbone, heads.drafter, capture=heads.capture)
    alone.measured = heads.measured
    return alone


def those_that_fit(prompts: Sequence[Prompt], plan: Plan, backbone: Backbone) -> tuple[list[Prompt], list[int]]:
    """Return the prompts that leave room for an answer, and the numbers of the others, from 1. Raises UserError if none does."""
    if unknown := unknown_token(torch.cat([prompt.ids_T for prompt in prompts]), backbone):
        raise UserError(unknown)
    longest = (context_of(backbone) or sys.maxsize) - plan.max_new_tokens
    fitting = [prompt for prompt in prompts if len(prompt.ids_T) <= longest]
    if not fitting:
        require_room("the shortest prompt", min(len(prompt.ids_T) for prompt in prompts), plan.max_new_tokens, backbone)
    return fitting, [number for number, prompt in enumerate(prompts, 1) if len(prompt.ids_T) > longest]


def _header(backbone: Backbone, prompts: Sequence[Prompt], plan: Plan, given: int) -> dict[str, Any]:
    """The report without results: backbone, prompts of those given, settings, versions, machine."""
    device = backbone.device
    return {
        "backbone": backbone.name,
        "prompts": len(prompts),
        "tasks": dict(Counter(prompt.task for prompt in prompts)),
        "dropped_prompts": given - len(prompts),
        "dropped_turns": 0,
        "max_new_tokens": plan.max_new_tokens,
        "seed": plan.seed,
        "rounds": plan.rounds,
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count() or 1,
        "other_programs": 0.0,
        "versions": versions("torch", "transformers"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})",
        "dtype": dtype_name(backbone.dtype),
        "weight_bytes": weight_bytes(backbone),
        "memory_bytes_per_second": memory_bandwidth(device),
        "baselines": [],
        "results": [],
        "samples": [],
    }
