"""Find drafter classes by kind, and construct drafters without weights or newly initialised."""

import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers.initialization import no_init_weights

import headstart.heads as package
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.support.config import parse
from headstart.support.errors import UserError, did_you_mean

KIND = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
"""A name, or dotted names."""


def drafters_of(module: str) -> list[type[Drafter]]:
    """List the concrete drafter classes that a module defines."""
    classes = [value for value in vars(importlib.import_module(module)).values() if isinstance(value, type)]
    return [kind for kind in classes if issubclass(kind, Drafter) and kind.__module__ == module and not inspect.isabstract(kind)]


def methods() -> list[str]:
    """List the built-in drafter kinds: the modules of this package that define one."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg]
    return sorted(name for name in names if drafters_of(f"headstart.heads.{name}"))


def built_in(kind: str) -> bool:
    """True if this package has a module of that name; none is imported."""
    return KIND.fullmatch(kind) is not None and "." not in kind and importlib.util.find_spec(f"headstart.heads.{kind}") is not None


def find_drafter(kind: str) -> type[Drafter]:
    """Return the drafter class: ``medusa`` is in heads/medusa.py, a dotted name is a user's module. Raises UserError."""
    if not KIND.fullmatch(kind):
        raise UserError(f"{kind!r} names no drafter; known: {', '.join(methods())}, or the dotted name of a module of your own")
    name = kind if "." in kind else f"headstart.heads.{kind}"
    if "." in kind and not {"", os.getcwd()} & {*sys.path}:  # behind what is installed
        sys.path.append(os.getcwd())
    try:
        drafters = drafters_of(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        drafters = []
        if "." in kind:
            known = ", ".join(methods())
            raise UserError(f"no module {name!r} for the drafter; known: {known}, or a dotted name that can be imported") from None
    if not drafters and "." not in kind:  # no file of that name, or one of another purpose
        hint = did_you_mean(kind, methods())
        raise UserError(f"unknown drafter {kind!r}; {hint}known: {', '.join(methods())}, or the dotted name of a module of your own")
    if len(drafters) != 1:
        raise UserError(f"{name} must define exactly one Drafter; it defines {len(drafters)}")
    return drafters[0]


def construct_drafter(kind: str, backbone: Backbone, arguments: Mapping[str, Any]) -> Drafter:
    """Construct a drafter without weights: all are NaN until loaded or initialised.

    Raises UserError for an unknown kind, an unknown argument, or an invalid value.
    """
    cls = find_drafter(kind)
    config = parse(cls.Config, arguments, "drafter")
    with no_init_weights():
        drafter = cls(backbone, config)
    for tensor in drafter.state_dict().values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    return drafter


def build_drafter(kind: str, backbone: Backbone, arguments: Mapping[str, Any]) -> Drafter:
    """Construct a newly initialised drafter. Raises UserError as `construct_drafter` does."""
    drafter = construct_drafter(kind, backbone, arguments).to(backbone.device)  # start values are computed from the backbone's tensors
    with torch.no_grad():
        drafter.init_from(backbone)
    require_weights(drafter, f"init_from of drafter {kind}")
    return drafter


def require_weights(drafter: Drafter, source: str) -> None:
    """Raise UserError naming the first weight with a NaN; ``source`` is where the weights came from."""
    for name, tensor in drafter.state_dict().items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise UserError(f"{source} leaves weight {name} of {type(drafter).__name__} not a number (NaN): missed, or damaged")
