"""The interface of an engine for verification: greedy decoding in fp32, one prompt at a time, a chain of drafts per round.

Engine ``NAME`` is the function ``draft`` of ``inference/serving/verification/NAME.py``, found by that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headstart.inference.serving.transcript import Transcript


@dataclass(frozen=True)
class EngineSettings:
    """What all engines of a comparison are given."""

    depth: int
    """Tokens drafted per round, in a chain."""
    new_tokens: int
    """Tokens to write after each prompt, unless an end token is written before."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a text; such a token is written. Empty: every text has ``new_tokens`` tokens."""


class Engine(Protocol):
    """An engine. Two engines may draft a different number of tokens past the end of a text; comparisons ignore those."""

    def __call__(self, folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
        """Decode the prompts with the heads in ``folder`` on the model ``backbone`` (a folder or hub id).

        Returns one transcript per prompt, in order, with a round for each draft. Raises UserError, in one line, if the engine is not
        installed, or does not load these heads.
        """
