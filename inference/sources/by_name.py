"""Proposers by the names that commands and `headstart.load` know them by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from headstart.inference.sources.history import HistoryProposer
from headstart.inference.sources.lookahead import LookaheadProposer
from headstart.inference.sources.proposer import Proposer
from headstart.inference.sources.recycling import RecyclingProposer
from headstart.inference.sources.suffix import SuffixProposer
from headstart.support.errors import UserError

NAMES: dict[str, type[Proposer]] = {
    "suffix": SuffixProposer, "recycling": RecyclingProposer, "history": HistoryProposer, "lookahead": LookaheadProposer,
}  # fmt: skip
Other = TypeVar("Other")


def made(proposers: str | Sequence[str | Proposer | Other]) -> list[Proposer | Other]:
    """Make new proposers of the names among these, and keep the others; each name once. Raises UserError for a name that there is not."""
    listed = [proposers] if isinstance(proposers, str) else list(dict.fromkeys(proposers))
    unknown = [one for one in listed if isinstance(one, str) and one not in NAMES]
    if unknown:
        raise UserError(f"no proposer {unknown[0]!r}; choose any of {', '.join(NAMES)}, or give draft_model or early_exit")
    return [NAMES[one]() if isinstance(one, str) else one for one in listed]
