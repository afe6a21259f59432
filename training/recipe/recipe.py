"""A training run as a recipe: every key it may have is a field of these models; anything else is an error.

recipe = load_recipe("recipes/quickstart/eagle3.yaml", ["train.lr=3e-4", "drafter.depth=3"])
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from headstart.support.config import Model, RuleError, Seed, StrictModel, parse
from headstart.support.errors import UserError
from headstart.support.hub import local_or_shipped
from headstart.training.recipe.drafter import OWN_SECTIONS, RESERVED_NAMES, SHARED_KEYS, by_name, require_arguments
from headstart.training.recipe.sections import Backbone, Cache, Data
from headstart.training.recipe.served import Features, Regenerate
from headstart.training.recipe.training import Eval, Log, Objective, Save, Train
from headstart.training.recipe.yaml_text import dump_yaml, override, read_extended

LENGTHS = {"train.steps": "train.epochs", "train.epochs": "train.steps"}
"""Two keys for the length of a run: one that is given in an override replaces the other."""


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
            self._check_drafter()
        if self.backbone.lora is not None:
            self._check_lora()
        if self.backbone.adapter is not None and self.regenerate.endpoint is not None and self.regenerate.model is None:
            rule = f"is the server's name of the backbone with backbone.adapter={self.backbone.adapter!r}; set it"
            raise RuleError("regenerate.model", rule, None)
        if self.features.endpoint is not None:
            self._check_served()
        if self.data.images:
            self._check_images()
        return self

    def _check_images(self) -> None:
        _refuse(
            ("data.overlong", self.data.overlong == "split", "does not split rows with images; set truncate, skip or error"),
            ("data.loss_on", self.data.loss_on == "all", "is assistant with data.images, whose tokens are no labels"),
            ("backbone.lora", self.backbone.lora is not None, "is trained on text alone; set it to null, or data.images to false"),
            ("backbone.shard", self.backbone.shard, "needs passes over text alone; set it or data.images to false"),
            ("features.endpoint", self.features.endpoint is not None, "serves text alone; set it to null, or data.images to false"),
            ("regenerate.endpoint", self.regenerate.endpoint is not None, "is asked text alone; set it to null, or data.images to false"),
            ("objective.on_policy", self.objective.on_policy > 0, "reads drafts behind text alone; set it to 0, or data.images to false"),
        )

    def _check_served(self) -> None:
        _refuse(
            ("backbone.adapter", self.backbone.adapter is not None, "is not served with hidden states; merge it into the model with PEFT"),
            ("backbone.lora", self.backbone.lora is not None, "changes hidden states, and servers have those before; set either to null"),
            ("objective.on_policy", self.objective.on_policy > 0, "runs the backbone on drafts, and servers do not; set either back"),
        )

    def _check_drafter(self) -> None:
        require_arguments(self.drafter, "drafter")
        if self.objective.on_policy and self.cache.dir is not None:
            rule = f"needs the backbone, which does not run with cache.dir={self.cache.dir!r}; set either to 0 or null"
            raise RuleError("objective.on_policy", rule, self.objective.on_policy)

    def _check_lora(self) -> None:
        _refuse(
            ("heads", bool(self.heads), "would each need an adapter with backbone.lora; train one drafter, or set lora to null"),
            ("cache.dir", self.cache.dir is not None, "keeps features, which change with backbone.lora; set either to null"),
            ("objective.on_policy", bool(self.objective.on_policy), "needs a frozen backbone; set it to 0, or backbone.lora to null"),
        )

    def per_drafter(self) -> dict[str, Recipe]:
        """For each drafter the recipe that trains it alone, to the same weights, into its own folder; the only one's name is empty.

        Raises UserError for an entry that is not valid.
        """
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
    sections = {
        **dict(recipe),
        "heads": {},
        "drafter": drafter,
        "save": recipe.save.model_copy(update={"dir": str(Path(recipe.save.dir) / name)}),
    }
    try:
        sections["objective"] = _changed(recipe.objective, entry.get("objective", {}), "objective")
        sections["train"] = _changed(recipe.train, entry.get("train", {}), "train")
        return parse(type(recipe), sections)
    except UserError as error:
        raise UserError(f"heads.{name}: {error}") from None


def _changed(section: Model, changes: dict[str, Any], where: str) -> Model:
    return parse(type(section), {**dict(section), **changes}, where) if changes else section


def _refuse(*rules: tuple[str, bool, str]) -> None:
    """Raise the first of these rules, each a key, whether it is broken, and the rule."""
    for key, broken, rule in rules:
        if broken:
            raise RuleError(key, rule, True)


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
