"""The recipe models as a JSON schema for editors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.heads.methods import find_drafter, methods
from headstart.training.recipe.recipe import SHARED_KEYS, DrafterOptions, Recipe
from headstart.training.recipe.yaml_text import KEY as EXTENDS

_EXTENDS = {
    "description": "Recipes, or parts of recipes, whose keys this one has too unless it replaces them; paths relative to this file.",
    "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}],
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


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
