"""The arguments of a drafter, validated by its own ``Config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.support.config import RuleError, parse
from headstart.support.errors import UserError


def require_arguments(drafter: Mapping[str, Any], where: str) -> None:
    """Raise UserError unless ``kind`` names a drafter (one that ships, or a module of the user's own) and the rest are its arguments."""
    from headstart.heads.methods import find_drafter  # imports torch, which reading the other sections does without

    if "kind" not in drafter:
        raise UserError(f"missing key {where}.kind: the drafter to train, as in drafter.kind=eagle3 (or several, as heads)")
    if not isinstance(drafter["kind"], str):
        raise RuleError(f"{where}.kind", "is text", drafter["kind"])
    arguments = {key: value for key, value in drafter.items() if key != "kind"}
    parse(find_drafter(drafter["kind"]).Config, arguments, where)
