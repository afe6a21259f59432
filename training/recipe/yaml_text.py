"""YAML 1.2 as text, and overrides of single keys: ``1e-3`` is a number, ``no`` and ``2024-01-01`` are text, a key occurs once.

Only the values of JSON are read (null, true and false, numbers, text, lists, mappings with text as keys), as deep, as large and as many
as a recipe can use.

Recipes may extend others.

    extends: ../shared/ultrachat.yaml                       # or a list; later files replace keys of earlier ones
    drafter: {kind: eagle3, depth: 7}

The paths are relative to the file that names them. Sections are merged key by key; any other value, null included, replaces the extended
one, and the recipe's own keys come last. An extended file may be a part of a recipe, such as a data section, and may extend others.
"""

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent, NodeEvent
from ruamel.yaml.resolver import VersionedResolver

from headstart.support.errors import UserError, cause, naming
from headstart.support.files import as_path
from headstart.support.hub import local_or_shipped
from headstart.support.json_text import MAX_DEPTH, TOO_DEEP, require_depth, whole
from headstart.support.text import read_text, require_characters

CORE_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))
MAX_BYTES = 256 << 10
"""Size of a recipe."""
MAX_VALUES = 100_000
"""Values of a recipe, those that aliases repeat included."""
KEY = "extends"
MAX_FILES = 100
"""Files that one recipe may extend, directly or not, a file that several extend counted for each."""


class _Resolver(VersionedResolver):
    """Resolves the tags of YAML 1.2's core schema only: no dates, no merge keys."""

    def add_version_implicit_resolver(self, version: Any, tag: Any, regexp: Any, first: Any) -> None:
        if tag in CORE_TAGS:
            super().add_version_implicit_resolver(version, tag, regexp, first)


def _yaml() -> YAML:
    yaml: Any = YAML(typ="safe", pure=True)  # plain values only
    yaml.Resolver = _Resolver
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 140
    return cast(YAML, yaml)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML document. Raises UserError with ``source`` and the line if it is not valid, or beyond a limit."""
    try:
        _require_shape(text, source)  # before values are made: slow and recursive in what is nested
        value = _yaml().load(text)
    except UserError:
        raise
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        quotes = "; text that begins with * is written in quotes" if "undefined alias" in (error.problem or "") else ""
        raise UserError(f"{source}{line}: not valid YAML: {' '.join((error.problem or str(error)).split())}{quotes}") from None
    except YAMLError as error:
        raise UserError(f"{source}: not valid YAML: {cause(error)}") from None
    except ValueError as error:
        said = "a whole number of thousands of digits; at most 64 bits are read" if "digit" in str(error) else cause(error)
        raise UserError(f"{source}: not valid YAML: {said}") from None
    with naming(source):
        require_depth(value, MAX_VALUES)
        return _plain(value)


def _require_shape(text: str, source: str) -> None:
    """Raise UserError for a tag, and where lists and mappings are nested too deep."""
    depth = 0
    for event in _yaml().parse(text):
        line = f"{source}, line {event.start_mark.line + 1}"
        if isinstance(event, NodeEvent) and (tag := getattr(event, "tag", None)) is not None:
            raise UserError(f"{line}: the tag {tag}; tags are not read: write the value alone")
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise UserError(f"{line}: {TOO_DEEP}")


def _plain(value: Any) -> Any:
    """Return the value. Raises UserError for a key that is no text, a character that no file holds, or a number beyond 64 bits."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"a key is text; got {key!r}")
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, str):
        if "\0" in value:
            raise UserError(f"{value[:60]!r} holds a null character; remove it")
        return require_characters(value, repr(value[:60]))
    return whole(value)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file holds an empty one."""
    if path.suffix in (".gguf", ".safetensors"):
        raise UserError(f"{path} is a model and not a recipe; headstart new-recipe {path} writes one for it")
    tree = parse_yaml(read_text("recipe", path, MAX_BYTES), str(path))
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
    if len(parents) >= MAX_DEPTH:
        raise UserError(f"{key[:60]!r}... is no key: a key has at most {MAX_DEPTH} parts; write it as in train.lr=3e-4")
    node = tree
    for level, parent in enumerate(parents, 1):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise UserError(f"{change!r}: {'.'.join(parents[:level])} is {node!r}, with no keys below it")
    node[last] = _plain(value) if value.startswith("*") else parse_yaml(value, repr(change))  # a pattern of files


def read_extended(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return a recipe file's keys with those it extends, and the extended files in the order of their use. Raises UserError."""
    extended: list[Path] = []
    return _read(path, (), extended), extended


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``under`` with the values of ``over``; mappings in both are merged in turn."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _read(path: Path, above: Sequence[Path], extended: list[Path]) -> dict[str, Any]:
    tree = read_yaml(path)
    names = tree.pop(KEY, None)
    listed = names if isinstance(names, list) else [] if names is None else [names]
    if not all(isinstance(name, str) and name for name in listed):
        raise UserError(f"extends is the path of a recipe, or a list of paths; got {names!r}")
    if "heads" in tree:
        tree["heads"] = by_name(tree["heads"] or {})
    result: dict[str, Any] = {}
    for name in listed:
        beside = path.parent / as_path("extends:", name)
        file = beside if beside.exists() else local_or_shipped(name)
        if not file.is_file():
            raise UserError(f"extends: no file {name!r}; its path is relative to {path.parent}, where {path.name} is")
        if len(extended) > MAX_FILES:
            raise UserError(f"extends: more than {MAX_FILES} files are read for one recipe; let it extend fewer")
        if file.resolve() in {file_of.resolve() for file_of in (*above, path)}:
            chain = " -> ".join(str(file_of) for file_of in (*above, path, file))
            raise UserError(f"extends: {name!r} leads back to a file that extends it ({chain}); take one of these lines out")
        result = merged(result, _read(file, (*above, path), extended))
        extended.append(file)
    return merged(result, tree)


def by_name(entries: Any) -> Any:
    """A list of entries as a mapping by name; anything but a list is returned as it is, for validation to judge."""
    if not isinstance(entries, list):
        return entries
    named: dict[str, Any] = {}
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise UserError(f"heads[{i}] is a mapping with kind, a name and the drafter's arguments; got {entry!r}")
        name = entry.get("name", entry.get("kind"))
        if not isinstance(name, str):
            raise UserError(f"heads[{i}].name is text; got {name!r}")
        if name in named:
            raise UserError(f"heads[{i}] is named {name!r} like another; give each a name of its own, as in {{name: {name}-2, ...}}")
        named[name] = {key: value for key, value in entry.items() if key != "name"}
    return named
