"""The sections of a recipe that say what is learned from: the backbone, the text, what is kept of its reading.

Sections are checked as they are made. The others are in `recipe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from headstart.heads.backbone.quantization import INTEGERS
from headstart.training.recipe.strict import RecipeError


def check(holds: bool, key: str, rule: str, got: Any) -> None:
    """Raise RecipeError unless it holds."""
    if not holds:
        raise RecipeError(f"{key} {rule}; got {got!r}")


@dataclass(frozen=True, kw_only=True)
class Backbone:
    path: str
    """A causal language model: hub id, folder, or ``embedded`` for the small one that ships with the project."""
    dtype: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] = "auto"
    """What its weights are loaded as; ``auto`` is what they were saved as, and fp32 on a CPU; ``int8`` and ``int4``: by optimum-quanto."""
    trust_remote_code: bool = False
    """Run code that comes with the model's repository."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """How it computes attention; ``eager`` is slower and for models without the other."""
    shard: bool = False
    """Share its layers out over the processes (FSDP2), each gathered while it runs: for one that does not fit a device whole."""

    def __post_init__(self) -> None:
        check(not self.shard or self.dtype not in INTEGERS, "backbone.shard", f"is for weights that are kept as numbers of one "
              f"dtype; {self.dtype} is not: leave one of them out", self.shard)


@dataclass(frozen=True, kw_only=True)
class Data:
    train: str
    """A .jsonl, .json or .parquet file (or .jsonl.gz, .json.gz), ``quickstart:FILE`` (shipped), or the name of a dataset."""
    split: str = "train"
    """Split of a named dataset; a file has none."""
    subset: str | None = None
    """Configuration of a named dataset, where it has several."""
    eval: str | None = None
    """Held-out rows, named like ``train``; null keeps ``eval_rows`` rows of ``train`` away from training instead."""
    eval_split: str = "test"
    """Split of ``eval``, where that is a named dataset."""
    eval_rows: int = 64
    """How many rows to hold out, or to read at most from ``eval``; 0 trains on every row and evaluates nothing."""
    format: Literal["auto", "messages", "conversations", "text"] = "auto"
    """Turns of role and content, turns of from and value (ShareGPT), or plain text; ``auto`` looks at the rows."""
    column: str | None = None
    """Where the rows keep it, if not in a column named like the format."""
    chat_template: str | None = None
    """A Jinja chat template for a tokenizer that has none, or instead of its own."""
    max_length: int = 2048
    """Tokens a sample may have, and a packed row."""
    packing: bool = False
    """Put as many samples into a row as fit ``max_length``, each read as if it were alone; ``train.batch_size`` then counts rows."""
    overlong: Literal["auto", "truncate", "split", "skip", "error"] = "auto"
    """What to do with longer samples: ``auto`` splits them into pieces if packed, else truncates; how many there were is reported."""
    limit: int | None = None
    """Read at most this many rows of ``train``."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Learn to draft the assistant's turns or every token; of plain text every token is learned."""

    def __post_init__(self) -> None:
        check(self.max_length >= 4, "data.max_length", "is at least 4 tokens", self.max_length)
        check(self.eval_rows >= 0, "data.eval_rows", "is 0 or more", self.eval_rows)
        check(self.limit is None or self.limit >= 1, "data.limit", "is at least 1, or null", self.limit)

    @property
    def splits_long(self) -> bool:
        """Whether a sample over ``max_length`` becomes several."""
        return self.overlong == "split" or (self.overlong == "auto" and self.packing)


@dataclass(frozen=True, kw_only=True)
class Cache:
    dir: str | None = None
    """Folder of features that training reads instead of running the backbone; null runs it at every step."""
    mode: Literal["full", "lru"] = "full"
    """``full``: ``headstart cache`` has written all; ``lru``: what is read for the first time is kept, as far as ``disk_gb`` goes."""
    dtype: Literal["int8", "bf16", "exact"] = "int8"
    """How states are kept: rounded to 8 bits with scales for channels and tokens, to bf16, or in the backbone's own dtype."""
    teacher: Literal["hidden", "topk"] = "hidden"
    """Keep the final hidden state, or its likeliest tokens in its place: less room, for heads that read taps alone."""
    top_k: int = 64
    """How many likeliest tokens; the rest of the mass is kept as one number."""
    shard_mb: int = 256
    """Size of a file; what a killed writer loses is at most one."""
    disk_gb: float = 20.0
    """How much ``lru`` keeps."""

    def __post_init__(self) -> None:
        check(self.dir != "", "cache.dir", "is the name of a folder, or null", self.dir)
        check(self.top_k >= 1, "cache.top_k", "is at least 1", self.top_k)
        check(self.shard_mb >= 1, "cache.shard_mb", "is at least 1", self.shard_mb)
        check(0 < self.disk_gb < float("inf"), "cache.disk_gb", "is above 0", self.disk_gb)


@dataclass(frozen=True, kw_only=True)
class Regenerate:
    out: str | None = None
    """The .jsonl file that ``headstart regenerate`` writes: ``data.train``, answered by the backbone itself."""
    limit: int | None = None
    """Answer at most this many rows; null: all that ``data.limit`` lets in."""
    temperature: float = 0.0
    """0 takes the likeliest token; above it answers are drawn, each row by a seed of its own."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens of this chance together."""
    max_new_tokens: int = 1024
    """Tokens an answer may have; one that does not end within them is dropped, a text is continued by as many at most."""
    prompt_tokens: int = 64
    """Of plain text, the first this many tokens are kept and continued (half of a shorter one)."""
    batch: int = 8
    """Rows decoded at once; only the speed depends on it, as on ``heads``."""
    heads: str | None = None
    """Trained heads to answer faster with, a folder or hub id; null drafts from the text and from what the backbone said before."""
    endpoint: str | None = None
    """Ask this OpenAI-compatible server, as http://localhost:8000/v1, instead of loading the backbone."""
    model: str | None = None
    """What the server calls the backbone; null: ``backbone.path``."""
    api_key: str | None = None
    """Name of the environment variable that holds the server's key; null sends none."""
    concurrency: int = 16
    """Requests under way at once."""
    retries: int = 6
    """How often a request is repeated when the server is busy, broken or silent, each time after a longer wait."""
    timeout: float = 600.0
    """Seconds to wait for an answer."""

    def __post_init__(self) -> None:
        named = self.out is None or (self.out.endswith(".jsonl") and self.out != ".jsonl")
        check(named, "regenerate.out", "is the name of a .jsonl file, or null", self.out)
        check(self.limit is None or self.limit >= 1, "regenerate.limit", "is at least 1, or null", self.limit)
        check(0 <= self.temperature < float("inf"), "regenerate.temperature", "is 0 or more", self.temperature)
        check(self.top_k >= 0, "regenerate.top_k", "is 0 or more", self.top_k)
        check(0 < self.top_p <= 1, "regenerate.top_p", "is above 0 and at most 1", self.top_p)
        for name in ("max_new_tokens", "prompt_tokens", "batch", "concurrency"):
            check(vars(self)[name] >= 1, f"regenerate.{name}", "is at least 1", vars(self)[name])
        both = f"and regenerate.endpoint={self.endpoint!r} are two ways to answer: heads draft in this process; set either to null"
        check(None in (self.heads, self.endpoint), "regenerate.heads", both, self.heads)
        check(self.endpoint is None or _is_address(self.endpoint), "regenerate.endpoint", "is an http(s) address", self.endpoint)
        check(self.retries >= 0, "regenerate.retries", "is 0 or more", self.retries)
        check(0 < self.timeout < float("inf"), "regenerate.timeout", "is above 0 seconds", self.timeout)


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:   # a port that is no number
        return False
