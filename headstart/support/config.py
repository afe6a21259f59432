"""Configuration as frozen pydantic models. An error is one line with the key, the allowed values, the value and similar names.

    class Config(StrictModel):
        depth: Annotated[int, Ge(1)] = 4
        \"\"\"Tokens drafted beyond the root.\"\"\"

    config = parse(Config, {"depth": 0}, where="drafter")   # drafter.depth is a whole number of at least 1; got 0

Bounds are `annotated_types`, from which errors, the JSON schema and the documentation are generated.
A rule between fields is a model validator that raises `RuleError`.
"""

import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Len, Lt, MinLen
from pydantic import AfterValidator, AllowInfNan, BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from headstart.support.errors import UserError, gone, nearest

# The largest values that make sense: a larger one is a slip, and would end in no answer, no memory or an overflow. Recipes, command-line
# arguments and the Python interface are held to the same limits, and docs/errors.md lists them. What a backbone and a machine can take may
# be less: `require_memory` in inference/engine/request.py, and the backbone's context.

MAX_SEED = (1 << 32) - 1
"""Seeds of recipes and of the command line, as in numpy; of the Python interface 63 bits."""
MAX_DEPTH = 128
"""Tokens drafted beyond the root; published heads draft up to 16."""
MAX_LAYERS = 256
"""Layers of a head."""
MAX_SIZE = 1 << 18
"""Width of a part of a layer."""
MAX_NODES = 4096
"""Nodes of a candidate tree. A tree's mask and logits grow with it; the best trees have less than 100."""
MAX_WIDTH = 1024
"""Nodes expanded per draft level."""
MAX_BATCH = 4096
"""Sequences decoded together."""
MAX_STEP_SEQUENCES = 1 << 20
"""Sequences of a training step."""
MAX_MEMORY_GB = 1_000_000
"""Memory of a device that a plan is made for."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Of a temperature other than 0: outside, scores overflow in half precision or all tokens are alike."""
TEMPERATURES = f"0 (greedy), or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
THREADS_PER_PROCESSOR = 4
"""More threads than this for each processor only take each other's time."""


def max_threads() -> int:
    """The largest number of threads on this machine."""
    return THREADS_PER_PROCESSOR * (os.cpu_count() or 1)


def is_temperature(value: float) -> bool:
    """Return True for 0 (greedy) and for a temperature in the range."""
    return value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE


Model = TypeVar("Model", bound="StrictModel")
WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
MANY = {str: "texts", int: "whole numbers", float: "numbers"}
ORDER = {"invalid_key": 0, "extra_forbidden": 0, "missing": 1}
"""Errors reported before all others; unknown keys before missing ones, since a misspelt key causes both."""


def _temperature(value: float) -> float:
    if not is_temperature(value):
        raise ValueError(f"is {TEMPERATURES}")
    return value


Depth = Annotated[int, Ge(1), Le(MAX_DEPTH)]
Layers = Annotated[int, Ge(1), Le(MAX_LAYERS)]
Size = Annotated[int, Ge(1), Le(MAX_SIZE)]
Seed = Annotated[int, Ge(0), Le(MAX_SEED)]
Temperature = Annotated[float, Ge(0), Le(MAX_TEMPERATURE), AfterValidator(_temperature)]
"""Types of fields with the limits above."""


class StrictModel(BaseModel):
    """Frozen model that rejects unknown keys and converts no values, except integers to floats and lists to tuples.

    The docstring under a field is its description.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _tuples(cls, value: Any, info: ValidationInfo) -> Any:
        ruled = _options(cls.model_fields[str(info.field_name)].annotation)
        options = [typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind for kind in ruled]
        return tuple(value) if isinstance(value, list) and any(typing.get_origin(option) is tuple for option in options) else value


class RuleError(ValueError):
    """A value that violates a rule between fields. Raised in a model validator; `parse` completes ``key`` to its dotted name.

    ``rule`` continues the sentence after the key: "is a divisor of batch_size=8".
    """

    def __init__(self, key: str, rule: str, value: Any) -> None:
        super().__init__(f"{key} {rule}; got {value!r}")
        self.key = key


def parse(model: type[Model], values: Mapping[str, Any], where: str = "") -> Model:
    """Build ``model`` from ``values``. Raises UserError for the first error; ``where`` is the dotted prefix of the keys."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = min(error.errors(), key=lambda details: ORDER.get(details["type"], 2))
        raise UserError(_explain(model, values, where, first)) from None


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values a field allows: ``a number above 0 and at most 1, or null``."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *inner = typing.get_args(annotation)
        return describe(annotation, [*inner, *metadata])
    options = _options(annotation)
    texts = [_describe_one(option, metadata) for option in options if option is not types.NoneType]
    return " or ".join(texts) + (", or null" if types.NoneType in options else "")


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields, including those of nested models."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if _is_model(field.annotation):
            yield from dotted_keys(typing.cast(Any, field.annotation), f"{prefix}{name}.")


def _describe_one(annotation: Any, metadata: Sequence[Any]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return describe(annotation, metadata)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}" if len(arguments) > 1 else repr(arguments[0])
    if origin is tuple or origin is list:
        item, *inner = typing.get_args(arguments[0]) if typing.get_origin(arguments[0]) is typing.Annotated else arguments[:1]
        size = "" if origin is list or Ellipsis in arguments else f"{len(arguments)} "
        return f"a list of {size}{MANY.get(item, 'sections' if _is_model(item) else 'values')}{_bounds(inner)}"
    if origin is dict or annotation is dict:
        return "a section with keys of its own"
    if _is_model(annotation):
        return "a section with keys of its own"
    text = WORDS.get(annotation, "any value")
    if annotation is int:
        metadata = [Ge(rule.gt + 1) if isinstance(rule, Gt) and isinstance(rule.gt, int) else rule for rule in metadata]
    filled = any(isinstance(rule, MinLen | Len) and rule.min_length > 0 for rule in metadata)
    return f"{text} that is not empty" if filled else text + _bounds(metadata)


def _bounds(metadata: Sequence[Any]) -> str:
    """Describe bounds as they follow a noun: `` of at least 0 and below 1``."""
    low = [f"above {_bound(rule.gt)}" for rule in metadata if isinstance(rule, Gt)]
    low += [f"of at least {_bound(rule.ge)}" for rule in metadata if isinstance(rule, Ge)]
    high = [f"below {_bound(rule.lt)}" for rule in metadata if isinstance(rule, Lt)]
    high += [f"at most {_bound(rule.le)}" for rule in metadata if isinstance(rule, Le)]
    infinite = any(isinstance(rule, AllowInfNan) and rule.allow_inf_nan for rule in metadata)
    return "".join(f" {text}" for text in [" and ".join(low + high), "(or .inf)" * infinite] if text)


def _bound(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _options(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself if it is not a union."""
    return typing.get_args(annotation) if typing.get_origin(annotation) in (types.UnionType, typing.Union) else (annotation,)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _explain(model: type[BaseModel], values: Mapping[str, Any], where: str, details: ErrorDetails) -> str:
    kind, place = details["type"], details["loc"]
    if kind in ORDER and not (kind == "missing" and isinstance(place[-1], int)):
        key = _dotted(where, [*place[:-1], str(place[-1])])
        if kind == "missing":
            return f"missing key {key}"
        section = next(option for option in _options(_resolve(model, place[:-1])[0]) if _is_model(option))
        here = [_dotted(where, [*place[:-1], name]) for name in section.model_fields]
        return f"unknown key {key}; {gone(key) or _instead(str(place[-1]), here, [_dotted(where, [name]) for name in dotted_keys(model)])}"
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, RuleError):
        at = _dotted(where, place)
        return f"{at}.{cause}" if at else str(cause)
    annotation, metadata, known = _resolve(model, place[:-1] if kind == "missing" else place)  # missing items of a tuple
    key = _dotted(where, known)
    if isinstance(cause, UserError):
        return str(cause)
    rule = str(cause) if cause is not None else f"is {describe(annotation, metadata)}"
    return f"{key or 'the configuration'} {rule}; got {_value(values, known, details['input'])!r}"


def _resolve(model: type[BaseModel], place: Sequence[str | int]) -> tuple[Any, list[Any], list[str | int]]:
    """Return annotation and bounds of the value at ``place``, and ``place`` up to a union's branch or a missing item."""
    annotation: Any = model
    metadata: list[Any] = []
    known: list[str | int] = []
    for step in place:
        options = [option for option in _options(annotation) if option is not types.NoneType]
        origin, arguments = typing.get_origin(options[0]), typing.get_args(options[0])
        if len(options) > 1:
            break
        if _is_model(options[0]) and step in options[0].model_fields:
            field = options[0].model_fields[str(step)]
            annotation, metadata = field.annotation, list(field.metadata)
        elif origin is dict:
            annotation, metadata = arguments[1], []
        elif origin is list or (origin is tuple and Ellipsis in arguments):
            annotation, metadata = arguments[0], []
        elif origin is tuple and isinstance(step, int) and step < len(arguments):
            annotation, metadata = arguments[step], []
        else:
            break
        known.append(step)
    return annotation, metadata, known


def _dotted(where: str, place: Sequence[str | int]) -> str:
    text = where
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _value(values: Any, place: Sequence[str | int], otherwise: Any) -> Any:
    for step in place:
        try:
            values = values[step]
        except (KeyError, IndexError, TypeError):
            return otherwise
    return values


def _instead(key: str, here: Sequence[str], anywhere: Sequence[str]) -> str:
    """Suggest the most similar key of this section or, failing that, of any section; else list the known keys."""
    for dotted, cutoff in ((here, 0.6), (anywhere, 0.8)):
        names = {name.rpartition(".")[2]: name for name in dotted}
        if near := nearest(key, names, cutoff):
            return f"did you mean {names[near]}?"
    return f"known: {', '.join(here)}"
