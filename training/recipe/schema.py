"""The recipe models as a JSON schema for editors, and as the tables of docs/recipe.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headstart.heads.layers.start_values import LayerShape
from headstart.heads.methods import find_drafter, methods
from headstart.heads.own_readout import ShortlistConfig
from headstart.support.config import describe
from headstart.support.errors import UserError
from headstart.training.recipe.recipe import SHARED_KEYS, DrafterOptions, Recipe
from headstart.training.recipe.sections import Lora
from headstart.training.recipe.yaml_text import KEY as EXTENDS

_EXTENDS = {
    "description": "Recipes, or parts of recipes, whose keys this one has too unless it replaces them; paths relative to this file.",
    "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}],
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"
TABLE = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end of table -->", re.S)


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file; ``drafter`` and ``heads`` know the arguments of every kind that ships."""
    schema = Recipe.model_json_schema()
    options = DrafterOptions.model_json_schema()
    definitions = schema["$defs"]
    for kind in methods():
        definitions.update(find_drafter(kind).Config.model_json_schema().get("$defs", {}))
        definitions[f"drafter-{kind}"] = _drafter(kind, options["properties"], {})
        own = {"name": {"type": "string"}, "objective": {"$ref": "#/$defs/Objective"}, "train": {"$ref": "#/$defs/OwnTrain"}}
        definitions[f"head-{kind}"] = _drafter(kind, options["properties"], own)
    train = definitions["Train"]
    definitions["OwnTrain"] = {**train, "properties": {k: v for k, v in train["properties"].items() if k not in SHARED_KEYS}}
    entry = _one_of("head")
    listed = {"type": "array", "items": entry}
    kinds = [definitions[f"drafter-{kind}"] for kind in methods()]
    differs: dict[str, Any] = {name: {} for kind in kinds for name in kind["properties"]} | {"kind": False}
    part = {"type": "object", "title": "what differs from an extended file", "properties": differs, "additionalProperties": False}
    one = [*_one_of("drafter")["oneOf"], part]
    about = {key: {"description": schema["properties"][key]["description"]} for key in ("drafter", "heads")}
    schema["properties"]["drafter"] = {**about["drafter"], "oneOf": one}
    schema["properties"]["heads"] = {**about["heads"], "anyOf": [listed, {"type": "object", "additionalProperties": entry}]}
    schema["properties"] = {EXTENDS: _EXTENDS, **schema["properties"]}
    required = schema.pop("required")
    inside = {key: {"required": definitions[key.capitalize()].pop("required")} for key in required}  # an extended file may have them
    inside["drafter"] = {"required": ["kind"]}
    whole = [{"required": [*required, trained], "properties": inside} for trained in ("drafter", "heads")]
    return {"$schema": DIALECT, **schema, "title": "Headstart recipe", "anyOf": [*whole, {"required": [EXTENDS]}]}


def _drafter(kind: str, options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    arguments = find_drafter(kind).Config.model_json_schema()
    properties = {**options, "kind": {"const": kind}, **arguments["properties"], **own}
    required = ["kind", *arguments.get("required", [])]
    return {"type": "object", "title": kind, "properties": properties, "required": required, "additionalProperties": False}


def _one_of(prefix: str) -> dict[str, Any]:
    dotted = {"type": "object", "title": "a module of your own", "properties": {"kind": {"pattern": r"\."}}, "required": ["kind"]}
    return {"oneOf": [*({"$ref": f"#/$defs/{prefix}-{kind}"} for kind in methods()), dotted]}


def with_tables(page: str) -> str:
    """The Markdown ``page`` with what stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->`` made anew.

    NAME is ``recipe``, one of its sections, ``backbone.lora``, ``drafter.layer``, ``drafter.shortlist``, or ``drafter.KIND``. Raises
    UserError for others.
    """
    return TABLE.sub(lambda match: f"<!-- table: {match[1]} -->\n{_table(match[1])}<!-- end of table -->", page)


def _table(name: str) -> str:
    section, _, kind = name.partition(".")
    if name == "recipe":
        return _rows("", Recipe)
    if section == "drafter" and kind in methods():
        return _rows("drafter.", find_drafter(kind).Config)
    parts: dict[str, Any] = {"backbone.lora": Lora, "drafter": DrafterOptions}
    parts |= {"drafter.layer": LayerShape, "drafter.shortlist": ShortlistConfig}
    model = parts.get(name) or (Recipe.model_fields[name].annotation if name in Recipe.model_fields else None)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise UserError(f"no table {name!r}; there are recipe, its sections, and drafter.KIND")
    return _rows(f"{name}.", model)


def _rows(prefix: str, model: type[BaseModel]) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        values, default = _escaped(describe(field.annotation, field.metadata)), _default(field)
        lines.append(f"| `{prefix}{name}` | {values} | {default} | {_escaped(field.description or '')} |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "see below" if isinstance(field.default, BaseModel) else f"`{_yaml(field.default)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_yaml, value))}]"
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _escaped(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())
