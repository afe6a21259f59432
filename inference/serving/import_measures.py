"""Acceptance of imported heads: the prompts, and which reading of a folder fits, the one whose drafts the backbone accepts most often.

Shape suffix: T positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone, load_tokenizer
from headstart.heads.backbone.embedded import EMBEDDED, resolve
from headstart.heads.backbone.end_tokens import end_tokens
from headstart.heads.base import Drafter
from headstart.inference.bench.prompts import Prompter, read_prompts
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, continue_texts, measure_tau
from headstart.inference.serving.layouts.layout import Imported
from headstart.support.chat.settings import ChatSettings
from headstart.support.errors import UserError
from headstart.support.progress import progress, watched
from headstart.support.spread import spread

CHAIN = 5
"""Most tokens of the chains that are measured."""
PROMPTS, WRITTEN = 8, 24
"""Number of prompts, and how long those are that the backbone writes."""


@dataclass(frozen=True)
class Measured:
    """A reading, its drafter, and what it accepted."""

    reading: Imported
    drafter: Drafter
    figures: dict[str, Any]

    @property
    def tau(self) -> float:
        return float(self.figures["tau"])


def measure(readings: Sequence[tuple[Imported, Drafter]], prompts: Sequence[Tensor], new_tokens: int) -> list[Measured]:
    """Decode the prompts greedily with each reading's drafter, in chains; the best comes first, and of equal ones the first."""
    found = []
    for reading, drafter in readings:
        depth = min(CHAIN, drafter.max_depth or CHAIN)
        with torch.no_grad():
            figures = measure_tau(
                SpeculativeModel(drafter.backbone, drafter, capture="off"), watched(prompts, "measuring the heads", "prompt"),
                max_new_tokens=new_tokens, tree=TreeShape(depth + 1, 1, depth),
            )
        rates = figures["acceptance_per_depth"][:depth]
        found.append(Measured(reading, drafter, {**figures, "acceptance_per_depth": rates}))
    return sorted(found, key=lambda one: -one.tau)


def verdict(measured: Sequence[Measured]) -> list[str]:
    """Say which reading was taken and how the others did, a line each; the figures alone for a single one."""
    first, *others = measured
    rates = " ".join(f"{rate:.3f}" for rate in first.figures["acceptance_per_depth"])
    lines = [f"tau {first.tau:.3f} in {first.figures['passes']} passes, acceptance per depth {rates}"]
    if others:
        lines.append(f"read as: {first.reading.choice}")
        lines += [f"  otherwise tau {one.tau:.3f}: {one.reading.choice}" for one in others]
        if first.tau - others[0].tau < 0.02 * first.tau:
            lines.append("the figures are too close to tell the readings apart: give more prompts with --prompts FILE, or force --counting")
    return lines




def prompts_for(
    backbone: Backbone, file: str | None, trust_remote_code: bool = False, variables: Mapping[str, Any] | None = None
) -> tuple[list[Tensor], str]:
    """Return prompts (int64 ``[T]``) and a description of where they are from; ``variables``: of the chat template. Raises UserError."""
    if file is None and backbone.name == EMBEDDED:
        file = str(Path(resolve(EMBEDDED)).parent / "prompts.jsonl")
    if file is not None:
        settings = ChatSettings(variables=variables or {}, ends=end_tokens(backbone.model.generation_config))
        prompter = Prompter(load_tokenizer(backbone.name, trust_remote_code=trust_remote_code), settings=settings)
        return [prompt.ids_T for prompt in read_prompts(file, prompter, PROMPTS)], f"{PROMPTS} prompts of {Path(file).name}"
    return written(backbone), f"{PROMPTS} texts that the backbone wrote itself"


def written(backbone: Backbone) -> list[Tensor]:
    """Return the beginnings of texts that the backbone samples from its first token, or from different tokens if it has none."""
    first = backbone.config.bos_token_id
    starts = [first] * PROMPTS if isinstance(first, int) else spread(1, backbone.vocab - 1, PROMPTS)
    prompts = [torch.tensor([start]) for start in starts]
    with progress("writing prompts with the backbone", "prompt", PROMPTS) as bar:
        output = continue_texts(
            SpeculativeModel(backbone), prompts, Settings(WRITTEN, temperature=1.0), list(range(PROMPTS)), speculate=False
        )
        bar.update(PROMPTS)
    assert output.accept_lengths is not None
    found = [row_T[: 2 + sum(lengths)].cpu() for row_T, lengths in zip(output.sequences, output.accept_lengths, strict=True)]
    ends = end_tokens(backbone.model.generation_config)
    usable = [row_T for row_T in found if int(row_T[-1]) not in ends]
    if not usable:
        raise UserError(f"{backbone.name or 'the backbone'} ends every text that it begins itself; give prompts with --prompts FILE")
    return usable
