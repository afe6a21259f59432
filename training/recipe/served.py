"""The section of a recipe about hidden states from servers, and what it has in common with other sections that name servers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

from annotated_types import MinLen
from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from headstart.support.config import StrictModel
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


def _addresses(value: Any) -> Any:
    """One address as a list of one."""
    return [value] if isinstance(value, str) else value


def _or_one(schema: dict[str, Any]) -> None:
    """The JSON schema of one address or a list."""
    listed = {"type": "array", "minItems": 1, "items": schema.pop("items")}
    for key in ("type", "minItems"):
        schema.pop(key, None)
    schema["anyOf"] = [{"type": "string", "minLength": 1}, listed]


Addresses = Annotated[
    list[Annotated[str, AfterValidator(address("features"))]], MinLen(1), BeforeValidator(_addresses), Field(json_schema_extra=_or_one)
]


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
