"""The sections of a recipe that name servers: hidden states from servers, and answers by the backbone itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from headstart.support.config import MAX_BATCH, RuleError, StrictModel, Temperature
from headstart.support.errors import UserError
from headstart.training.recipe.sections import Text

VARIABLE = re.compile("[A-Z_][A-Z0-9_]*")


def address(section: str) -> Callable[[str], str]:
    """Return the check of ``section.endpoint``, an address without anything secret."""

    def check(text: str) -> str:
        try:
            parts = urlsplit(text)
            if parts.username is not None or parts.password is not None or parts.query:  # it would stand in logs and cards
                raise UserError(
                    f"{section}.endpoint is an address without user, password and query (what was given is not shown); "
                    f"name the environment variable with the server's key in {section}.api_key"
                )
            if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                return text
        except UserError:
            raise
        except ValueError:  # a port that is no number
            pass
        raise ValueError("is an http(s) address, or null")

    return check


def variable(section: str) -> Callable[[str], str]:
    """Return the check of ``section.api_key``, the name of an environment variable."""

    def check(name: str) -> str:
        if VARIABLE.fullmatch(name):
            return name
        raise UserError(
            f"{section}.api_key is the name of an environment variable in capitals, as SERVER_KEY, or null; what was given, perhaps the "
            "key itself, is not shown"
        )

    return check


def _or_one(schema: dict[str, Any]) -> None:
    """The JSON schema of one address or a list."""
    listed = {"type": "array", "minItems": 1, "items": schema.pop("items")}
    for key in ("type", "minItems"):
        schema.pop(key, None)
    schema["anyOf"] = [{"type": "string", "minLength": 1}, listed]


AS_LIST = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Addresses = Annotated[list[Annotated[str, AfterValidator(address("features"))]], MinLen(1), AS_LIST, Field(json_schema_extra=_or_one)]


class Features(StrictModel):
    endpoint: Addresses | None = None
    """One or several vLLM servers of hidden states (``headstart serve-features``), as http://host:8000; null: the backbone runs here."""
    folder: Text = "/dev/shm/headstart-features"
    """Folder that the servers write hidden states to and this machine reads and deletes them from: in memory, or on a shared disk."""
    model: str | None = None
    """The backbone's name on the servers; null: the one that ``headstart serve-features`` gives it, which names the layers."""
    api_key: Annotated[str, AfterValidator(variable("features"))] | None = None
    """Name of the environment variable that holds the servers' key; null sends none."""
    concurrency: PositiveInt = 16
    """Requests in flight at once, over all servers."""
    prefetch: NonNegativeInt = 2
    """Steps whose hidden states are asked for while earlier steps compute."""
    check_every: PositiveInt = 100
    """Of how many samples one is checked against the server's own log-probabilities, after the first eight."""
    timeout: PositiveFloat = 600.0
    """Seconds to wait for one sample's hidden states."""
    patience: PositiveFloat = 900.0
    """Seconds that all servers may be away or failing before the run ends, saved."""


def _jsonl(name: str) -> str:
    if not name.endswith(".jsonl") or name == ".jsonl":
        raise ValueError("is the name of a .jsonl file, or null")
    return name


class Regenerate(StrictModel):
    out: Annotated[str, AfterValidator(_jsonl)] | None = None
    """The .jsonl file that ``headstart regenerate`` writes: the prompts of ``data.train`` with the backbone's own answers."""
    limit: PositiveInt | None = None
    """Maximum number of rows to answer; null: as many as ``data.limit`` allows."""
    samples: PositiveInt = 1
    """Answers to each row, each sampled with a seed of its own: for few prompts. Above 1 every temperature is above 0."""
    temperature: Temperature | Annotated[tuple[Temperature, ...], MinLen(1)] = (0.0, 1.0)
    """0 is greedy; above it answers are sampled, each row with a seed of its own. Of several, each row takes one, for all its turns."""
    top_k: NonNegativeInt = 0
    """Sample from this many most probable tokens; 0: from all."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample from the most probable tokens that reach this probability together (nucleus sampling)."""
    max_new_tokens: PositiveInt = 1024
    """Most tokens of an answer; plain text is continued by at most as many."""
    unfinished: Literal["drop", "keep"] = "drop"
    """What becomes of an answer that does not end within them: dropped, or kept cut off, as the last one of its conversation."""
    prompt_tokens: PositiveInt = 64
    """Tokens of a plain text that are kept and continued (half of a shorter one)."""
    batch_size: Annotated[int, Ge(1), Le(MAX_BATCH)] = 8
    """Rows decoded at once; changes the speed only, as do ``heads``."""
    heads: str | None = None
    """Trained heads to decode faster with, a folder or hub id; null drafts from n-grams of the text and earlier answers."""
    endpoint: Annotated[str, AfterValidator(address("regenerate"))] | None = None
    """Ask this OpenAI-compatible server, as http://localhost:8000/v1, instead of loading the backbone."""
    model: str | None = None
    """The backbone's name on that server; null: ``backbone.path``."""
    api_key: Annotated[str, AfterValidator(variable("regenerate"))] | None = None
    """Name of the environment variable that holds the server's key; null sends none."""
    concurrency: PositiveInt = 16
    """Requests in flight at once."""
    retries: NonNegativeInt = 6
    """Times a request is repeated when the server is busy, broken or silent, after longer and longer waits."""
    timeout: PositiveFloat = 600.0
    """Seconds to wait for an answer."""

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Those that rows take."""
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads is not None and self.endpoint is not None:
            rule = f"and regenerate.endpoint={self.endpoint!r} are two ways to answer: heads draft in this process; set either to null"
            raise RuleError("heads", rule, self.heads)
        if self.samples > 1 and 0 in self.temperatures:
            rule = "needs regenerate.temperature above 0, at which answers to a row differ; name temperatures without 0"
            raise RuleError("samples", rule, self.samples)
        return self
