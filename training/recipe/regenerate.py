"""The section of a recipe about answers by the backbone itself."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import AfterValidator, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from headstart.support.config import RuleError, StrictModel, Temperature
from headstart.support.numeric_limits import MAX_BATCH
from headstart.training.recipe.served import address, variable


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
