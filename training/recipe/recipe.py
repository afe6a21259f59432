"""A training run as a recipe: every key it may have is a field of these models; anything else is an error.

    recipe = load_recipe("recipes/quickstart/eagle3.yaml", ["train.lr=3e-4", "drafter.depth=3"])

A drafter's section has its kind, its start, and arguments that its own ``Config`` validates. There may be several:

    heads:
      - {name: eagle3, kind: eagle3, depth: 5}
      - {name: medusa, kind: medusa, depth: 4, objective: {terms: {ce: 1}}, train: {lr: 3e-4}}

Each of several is trained as it would be alone, by a recipe of its own. Keys in an entry's ``objective`` and ``train`` replace the
recipe's; its other keys are the drafter's arguments. Keys that decide which tokens a step reads are shared: the drafters learn from one
forward pass of the backbone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from headstart.support.config import RuleError, Seed, StrictModel, parse
from headstart.support.errors import UserError, naming
from headstart.support.hub import local_or_shipped
from headstart.training.recipe.sections import Backbone, Cache, Data, Log, Save, Text
from headstart.training.recipe.training import Eval, Features, Objective, Regenerate, Train
from headstart.training.recipe.yaml_text import KEY as EXTENDS
from headstart.training.recipe.yaml_text import by_name, dump_yaml, override, read_extended

LENGTHS = {"train.steps": "train.epochs", "train.epochs": "train.steps"}
"""Two keys for the length of a run: one that is given in an override replaces the other."""
SHARED_KEYS = ("steps", "epochs", "batch_size", "micro_batch", "precision")
"""Keys of ``train`` that are the same for all drafters."""
OWN_SECTIONS = ("objective", "train")
"""Sections that an entry may override."""
RESERVED_NAMES = ("state", "log.jsonl", "wandb", "tensorboard")
"""Other entries of ``save.dir``."""
VOCABULARY_KEY = "draft_vocab_size"


class Recipe(StrictModel):
    backbone: Backbone
    """The frozen language model."""
    drafter: dict[str, Any] = {}
    """``kind`` names the file in heads/ (or a module of your own), ``init`` how it starts; the rest are that drafter's own arguments.
    This or ``heads``."""
    heads: dict[str, dict[str, Any]] = {}
    """Several drafters instead, trained together on one forward pass of the backbone, each into ``save.dir/NAME``."""
    data: Data
    """What to train on."""
    cache: Cache = Cache()
    """Cached features of the backbone."""
    features: Features = Features()
    """Hidden states from servers."""
    regenerate: Regenerate = Regenerate()
    """The backbone's own answers to the data's prompts."""
    objective: Objective = Objective()
    """The loss."""
    train: Train = Train()
    """The optimizer and its schedule."""
    eval: Eval = Eval()
    """How mean acceptance length is measured."""
    save: Save
    """Where the heads go."""
    log: Log = Log()
    """Where the metrics go."""
    seed: Seed = 0
    """Of the drafter's initial weights, of the order of the data, and of regenerated answers."""

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, values: Any) -> Any:
        """A section with nothing in it (``train:``) has its defaults."""
        return {key: {} if value is None else value for key, value in values.items()} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.drafter and self.heads:
            raise RuleError("heads", "stand in place of drafter, not beside it; leave one out", list(self.heads))
        if self.heads:
            self.per_drafter()
        else:
            require_arguments(self.drafter, "drafter")
            if self.objective.on_policy and self.cache.dir is not None:
                rule = f"needs the backbone, which does not run with cache.dir={self.cache.dir!r}; set either to 0 or null"
                raise RuleError("objective.on_policy", rule, self.objective.on_policy)
        if self.backbone.adapter is not None and self.regenerate.endpoint is not None and self.regenerate.model is None:
            rule = f"is the server's name of the backbone with backbone.adapter={self.backbone.adapter!r}; set it"
            raise RuleError("regenerate.model", rule, None)
        for key, broken, rule in self._rules():
            if broken:
                raise RuleError(key, rule, True)
        return self

    def _rules(self) -> list[tuple[str, bool, str]]:
        """What cannot go together: a key, whether its rule is broken, and the rule."""
        images, lora, on_policy = self.data.images, self.backbone.lora is not None, self.objective.on_policy > 0
        adapter, served = self.backbone.adapter, self.features.endpoint is not None
        return [
            ("heads", lora and bool(self.heads), "would each need an adapter with backbone.lora; train one drafter, or set lora to null"),
            ("cache.dir", lora and self.cache.dir is not None, "keeps features, which change with backbone.lora; set either to null"),
            ("objective.on_policy", lora and on_policy, "needs a frozen backbone; set it to 0, or backbone.lora to null"),
            ("backbone.adapter", served and adapter is not None, "is not served with hidden states; merge it into the model with PEFT"),
            ("backbone.lora", served and lora, "changes hidden states, and servers have those before; set either to null"),
            ("objective.on_policy", served and on_policy, "runs the backbone on drafts, and servers do not; set either back"),
            ("data.overlong", images and self.data.overlong == "split", "does not split rows with images; set truncate, skip or error"),
            ("data.loss_on", images and self.data.loss_on == "all", "is assistant with data.images, whose tokens are no labels"),
            ("backbone.lora", images and lora, "is trained on text alone; set it to null, or data.images to false"),
            ("backbone.shard", images and self.backbone.shard, "needs passes over text alone; set it or data.images to false"),
            ("features.endpoint", images and served, "serves text alone; set it to null, or data.images to false"),
            ("objective.on_policy", images and on_policy, "reads drafts behind text alone; set it to 0, or data.images to false"),
        ]

    def but(self, changes: Mapping[str, Mapping[str, Any]]) -> Recipe:
        """Return the recipe with other values, by section and key; they are not checked."""
        return self.model_copy(update={name: getattr(self, name).model_copy(update=dict(keys)) for name, keys in changes.items()})

    def per_drafter(self) -> dict[str, Recipe]:
        """For each drafter the recipe that trains it alone, into its own folder; the only one's name is empty. Raises UserError."""
        return {name: _alone(self, name, entry) for name, entry in self.heads.items()} if self.heads else {"": self}


def _alone(recipe: Recipe, name: str, entry: dict[str, Any]) -> Recipe:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name in RESERVED_NAMES:
        raise UserError(f"heads: {name!r} cannot name a folder in save.dir; use letters, digits, '-', '_' and '.'")
    for key in OWN_SECTIONS:
        if not isinstance(entry.get(key, {}), dict):
            raise UserError(f"heads.{name}.{key} is a section with keys of its own; got {entry[key]!r}")
    for key in SHARED_KEYS:
        if key in entry.get("train", {}):
            raise UserError(f"heads.{name}.train.{key} is the same for all heads, which share the backbone's forward pass; set train.{key}")
    drafter = {key: value for key, value in entry.items() if key not in OWN_SECTIONS}
    require_arguments(drafter, f"heads.{name}")
    save = recipe.save.model_copy(update={"dir": str(Path(recipe.save.dir) / name)})
    sections = {**dict(recipe), "heads": {}, "drafter": drafter, "save": save}
    with naming(f"heads.{name}"):
        for key in OWN_SECTIONS:
            sections[key] = parse(type(getattr(recipe, key)), {**dict(getattr(recipe, key)), **entry.get(key, {})}, key)
        return parse(type(recipe), sections)


class DrafterOptions(StrictModel):
    """Keys of every drafter beside its own arguments."""

    kind: str
    """Name of a file in heads/, or the dotted name of a module of your own."""
    init: Text | None = None
    """Folder or hub id of trained heads of this kind to start from (null: start values made from the backbone)."""


def split_drafter(drafter: Mapping[str, Any], where: str = "drafter") -> tuple[DrafterOptions, dict[str, Any]]:
    """Split a drafter's section into the keys that all drafters have and the arguments of its kind. Raises UserError."""
    options = {key: drafter[key] for key in DrafterOptions.model_fields if key in drafter}
    return parse(DrafterOptions, options, where), {key: value for key, value in drafter.items() if key not in options}


def require_arguments(drafter: Mapping[str, Any], where: str) -> None:
    """Raise UserError unless ``kind`` names a drafter (one that ships, or a module of the user's own) and the rest are its arguments."""
    from headstart.heads.methods import find_drafter  # imports torch, which reading the other sections does without

    if "kind" not in drafter:
        raise UserError(f"missing key {where}.kind: the drafter to train, as in drafter.kind=eagle3 (or several, as heads)")
    options, arguments = split_drafter(drafter, where)
    config = find_drafter(options.kind).Config
    if VOCABULARY_KEY in arguments and VOCABULARY_KEY not in config.model_fields:
        raise UserError(f"{where}.{VOCABULARY_KEY}: {options.kind} drafts the backbone's whole vocabulary; leave it out")
    parse(config, arguments, where)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe with those it extends; ``overrides`` are dotted, as in ``train.lr=3e-4``, and replace its values.

    ``path``: a file, or ``recipes/...`` for one that ships with the package. Raises UserError naming the file and the key.
    """
    try:
        tree, _ = read_extended(local_or_shipped(path))
        tree.setdefault("heads", {})
        given = {change.partition("=")[0] for change in overrides}
        for change in overrides:
            override(tree, change)
            if (other := LENGTHS.get(change.partition("=")[0])) and other not in given and not change.endswith("=null"):
                override(tree, f"{other}=null")
        return parse(Recipe, {**tree, "heads": by_name(tree["heads"] or {})})
    except UserError as error:
        raise UserError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def to_dict(section: StrictModel) -> dict[str, Any]:
    """All keys, defaults included, as plain values that JSON and YAML can hold."""
    return section.model_dump(mode="json")


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe, defaults included; ``load_recipe`` reads it back to an equal one."""
    return dump_yaml(to_dict(recipe))


# The JSON schema for editors.

_EXTENDS = {
    "description": "Recipes, or parts of recipes, whose keys this one has too unless it replaces them; paths relative to this file.",
    "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}],
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file; ``drafter`` and ``heads`` know the arguments of every kind that ships."""
    from headstart.heads.methods import find_drafter, methods  # here, as above

    schema, kinds = Recipe.model_json_schema(), {kind: find_drafter(kind).Config.model_json_schema() for kind in methods()}
    definitions, options = schema["$defs"], DrafterOptions.model_json_schema()["properties"]
    own = {"name": {"type": "string"}, "objective": {"$ref": "#/$defs/Objective"}, "train": {"$ref": "#/$defs/OwnTrain"}}
    for kind, arguments in kinds.items():
        definitions.update(arguments.get("$defs", {}))
        definitions[f"drafter-{kind}"] = _drafter(kind, arguments, options)
        definitions[f"head-{kind}"] = _drafter(kind, arguments, options, own)
    train = definitions["Train"]
    definitions["OwnTrain"] = {**train, "properties": {k: v for k, v in train["properties"].items() if k not in SHARED_KEYS}}
    entry = _one_of("head", kinds)
    listed = {"type": "array", "items": entry}
    differs: dict[str, Any] = {name: {} for kind in kinds for name in definitions[f"drafter-{kind}"]["properties"]} | {"kind": False}
    part = {"type": "object", "title": "what differs from an extended file", "properties": differs, "additionalProperties": False}
    one = [*_one_of("drafter", kinds)["oneOf"], part]
    about = {key: {"description": schema["properties"][key]["description"]} for key in ("drafter", "heads")}
    schema["properties"]["drafter"] = {**about["drafter"], "oneOf": one}
    schema["properties"]["heads"] = {**about["heads"], "anyOf": [listed, {"type": "object", "additionalProperties": entry}]}
    schema["properties"] = {EXTENDS: _EXTENDS, **schema["properties"]}
    required = schema.pop("required")
    inside = {key: {"required": definitions[key.capitalize()].pop("required")} for key in required}  # an extended file may have them
    inside["drafter"] = {"required": ["kind"]}
    whole = [{"required": [*required, trained], "properties": inside} for trained in ("drafter", "heads")]
    return {"$schema": DIALECT, **schema, "title": "Headstart recipe", "anyOf": [*whole, {"required": [EXTENDS]}]}


def _drafter(kind: str, arguments: Mapping[str, Any], options: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    properties = {**options, "kind": {"const": kind}, **arguments["properties"], **(own or {})}
    required = ["kind", *arguments.get("required", [])]
    return {"type": "object", "title": kind, "properties": properties, "required": required, "additionalProperties": False}


def _one_of(prefix: str, kinds: Iterable[str]) -> dict[str, Any]:
    dotted = {"type": "object", "title": "a module of your own", "properties": {"kind": {"pattern": r"\."}}, "required": ["kind"]}
    return {"oneOf": [*({"$ref": f"#/$defs/{prefix}-{kind}"} for kind in kinds), dotted]}
