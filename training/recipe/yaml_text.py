"""YAML 1.2 as text, and overrides of single keys: ``1e-3`` is a number, ``no`` and ``2024-01-01`` are text, a key occurs once."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.resolver import VersionedResolver

from headstart.support.errors import UserError

CORE_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))


class _Resolver(VersionedResolver):
    """Resolves the tags of YAML 1.2's core schema only: no dates, no merge keys."""

    def add_version_implicit_resolver(self, version: Any, tag: Any, regexp: Any, first: Any) -> None:
        if tag in CORE_TAGS:
            super().add_version_implicit_resolver(version, tag, regexp, first)


def _yaml() -> YAML:
    yaml: Any = YAML(typ="safe", pure=True)   # plain values only
    yaml.Resolver = _Resolver
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 140
    return cast(YAML, yaml)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML document. Raises UserError with ``source`` and the line if it is not valid."""
    try:
        return _yaml().load(text)
    except YAMLError as error:
        problem, line = str(error), ""
        if isinstance(error, MarkedYAMLError):
            problem = error.problem or problem
            line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{source}{line}: not valid YAML: {' '.join(problem.split())}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file holds an empty one."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise UserError(f"no recipe {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"no recipe {path}: {error}") from None
    tree = parse_yaml(text, str(path))
    if tree is not None and not isinstance(tree, dict):
        raise UserError(f"{path}: a recipe is a mapping of keys to values; got {tree!r}")
    return tree or {}


def dump_yaml(values: Mapping[str, Any]) -> str:
    """YAML text that `parse_yaml` reads back to equal values."""
    stream = StringIO()
    _yaml().dump(dict(values), stream)
    return stream.getvalue()


def override(tree: dict[str, Any], change: str) -> None:
    """Apply one ``section.key=value`` to ``tree`` in place; sections that are missing are created."""
    key, equals, value = change.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"{change!r} is not an override; write key=value, as in train.lr=3e-4")
    if not value.strip():
        raise UserError(f"{change!r} gives no value; write {key}=null for none, {key}='\"\"' for empty text")
    *parents, last = key.split(".")
    node = tree
    for level, parent in enumerate(parents, 1):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise UserError(f"{change!r}: {'.'.join(parents[:level])} is {node!r}, with no keys below it")
    node[last] = parse_yaml(value, repr(change))
