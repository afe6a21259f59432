"""Drafts that need no training, a file each, which is its name for commands and for `headstart.load`."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import TypeVar

from headstart.inference.engine.proposer import Proposer
from headstart.support.errors import UserError

NAMES = tuple(sorted((module.name for module in pkgutil.iter_modules(__path__)), reverse=True))
Other = TypeVar("Other")


def made(proposers: str | Sequence[str | Proposer | Other]) -> list[Proposer | Other]:
    """Make new proposers of the names among these, and keep the others; each name once. Raises UserError for a name that there is not."""
    listed = [proposers] if isinstance(proposers, str) else list(dict.fromkeys(proposers))
    unknown = [proposer for proposer in listed if isinstance(proposer, str) and proposer not in NAMES]
    if unknown:
        raise UserError(f"no proposer {unknown[0]!r}; choose any of {', '.join(NAMES)}, or give draft_model or early_exit")
    return [_of(proposer)() if isinstance(proposer, str) else proposer for proposer in listed]


def _of(name: str) -> type[Proposer]:
    """The one proposer that a file defines."""
    module = f"{__name__}.{name}"
    classes = [value for value in vars(import_module(module)).values() if inspect.isclass(value)]
    (found,) = (kind for kind in classes if issubclass(kind, Proposer) and kind.__module__ == module)
    return found
