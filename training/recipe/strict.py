"""Frozen dataclasses from YAML and back, taking nothing for granted.

Read by the rules of YAML 1.2 rather than 1.1: ``1e-3`` is a number, ``no`` and ``off`` are words, a key stands only once.
"""
from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from headstart.support.errors import UserError

Section = TypeVar("Section")
FLOAT = re.compile(r"[-+]?(\.\d+|\d[\d_]*(\.\d*)?)([eE][-+]?\d+)?$|[-+]?\.inf$|\.nan$")


class RecipeError(UserError):
    """A recipe that cannot be run; the message names the key."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would take for something else than text."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][\d_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


def parse(text: str, source: str) -> Any:
    """What a piece of YAML says."""
    try:
        return yaml.load(text, _Loader)   # a SafeLoader: plain values only
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        what = (isinstance(error, yaml.MarkedYAMLError) and error.problem) or " ".join(str(error).split())
        raise RecipeError(f"{source}{f', line {mark.line + 1}' if mark else ''}: not valid YAML: {what}") from None


def read(path: Path) -> dict[str, Any]:
    """The mapping a YAML file holds."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise RecipeError(f"no recipe {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"no recipe {path}: {error}") from None
    tree = parse(text, str(path))
    if tree is not None and not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values; got {tree!r}")
    return tree or {}


def dump(section: Any) -> str:
    return yaml.dump(to_dict(section), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def to_dict(section: Any) -> dict[str, Any]:
    """Every field, defaults too, as plain values that JSON and YAML can hold."""
    return {name: _plain(value) for name, value in dataclasses.asdict(section).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def override(tree: dict[str, Any], change: str) -> None:
    """Carry out one ``a.b=c`` on the mapping; sections not there yet are made."""
    key, equals, value = change.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"{change!r} is not an override; write key=value, as in train.lr=3e-4")
    if not value.strip():
        raise RecipeError(f"{change!r} gives no value; write {key}=null for none, {key}='\"\"' for empty text")
    *parents, last = key.split(".")
    node = tree
    for depth, parent in enumerate(parents, 1):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise RecipeError(f"{change!r}: {'.'.join(parents[:depth])} is {node!r}, with no keys below it")
    node[last] = parse(value, repr(change))


def build(cls: type[Section], tree: Mapping[str, Any], at: str = "", root: type | None = None) -> Section:
    """An instance of the dataclass, every value checked against its field's type; ``at`` is the dotted name so far."""
    root = root or cls
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls))}
    for key in tree:
        if key not in fields:
            raise RecipeError(f"unknown key {at}{key}; {_instead(str(key), at, list(fields), root)}")
    for name, f in fields.items():
        if name not in tree and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise RecipeError(f"missing key {at}{name}")
    return cls(**{key: _value(hints[key], value, at + key, root) for key, value in tree.items()})


def _instead(key: str, at: str, here: Sequence[str], root: type) -> str:
    """What the user meant, by the nearest name in this section or else in any, with its full dotted name."""
    if near := difflib.get_close_matches(key, here, 1):
        return f"did you mean {at}{near[0]}?"
    anywhere = {dotted.rpartition(".")[2]: dotted for dotted in _dotted(root)}
    if near := difflib.get_close_matches(key, anywhere, 1, cutoff=0.8):
        return f"did you mean {anywhere[near[0]]}?"
    return f"known: {', '.join(at + name for name in here)}"


def _dotted(cls: type, at: str = "") -> Iterator[str]:
    for name, hint in typing.get_type_hints(cls).items():
        yield at + name
        if dataclasses.is_dataclass(hint):
            yield from _dotted(typing.cast(type, hint), f"{at}{name}.")


def _value(hint: Any, value: Any, at: str, root: type) -> Any:
    """The value as the type hint wants it: a whole number is a float too, a list fills a tuple; nothing else is bent."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict | None):
            raise RecipeError(f"{at} is a section with keys of its own; got {value!r}")
        return build(typing.cast(type, hint), value or {}, f"{at}.", root)
    if hint is Any:
        return value
    if origin is types.UnionType:
        inner = next(option for option in arguments if option is not types.NoneType)
        return None if value is None else _value(inner, value, at, root)
    if origin is Literal:
        return _is(value in arguments, value, at, f"one of {', '.join(map(repr, arguments))}")
    if origin is dict:
        _is(isinstance(value, dict) and all(isinstance(key, str) for key in value), value, at, "a mapping with keys of text")
        return {key: _value(arguments[1], item, f"{at}.{key}", root) for key, item in value.items()}
    if origin is tuple:
        _is(isinstance(value, list) and len(value) == len(arguments), value, at, f"a list of {len(arguments)}")
        return tuple(_value(part, item, f"{at}[{i}]", root) for i, (part, item) in enumerate(zip(arguments, value, strict=True)))
    number = hint is float and type(value) is int
    return _is(number or type(value) is hint, float(value) if number else value, at, WORDS[hint])


WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _is(right: bool, value: Any, at: str, what: str) -> Any:
    if not right:
        raise RecipeError(f"{at} is {what}; got {value!r}")
    return value
