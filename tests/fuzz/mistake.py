# ruff: noqa: E501
"""A mistake as a command, and what the lists of mistakes share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SURROGATE = '"\\ud800"'
DEEP = "[" * 100_000
HUGE = "9" * 5_000
DATA_COMMANDS: dict[str, list[str]] = {
    "train": ["train", "recipe.yaml", "data.train=bad.jsonl"],
    "inspect": ["inspect", "recipe.yaml", "data.train=bad.jsonl"],
    "plan": ["plan", "recipe.yaml", "data.train=bad.jsonl", "--no-calibration"],
    "cache": ["cache", "recipe.yaml", "data.train=bad.jsonl", "cache.dir=features"],
    "regenerate": ["regenerate", "recipe.yaml", "data.train=bad.jsonl", "regenerate.out=new.jsonl", "regenerate.max_new_tokens=4"],
    "bench": ["bench", "--heads", "heads", "--backbone", "backbone", "--prompts", "bad.jsonl", "--max-new-tokens", "4"],
}  # fmt: skip
GENERATE = ["generate", "--heads", "heads", "--backbone", "backbone", "--max-new-tokens", "4"]
BENCH = ["bench", "--heads", "heads", "--backbone", "backbone", "--prompts", "prompts.jsonl", "--max-new-tokens", "4"]
CHAT = ["chat", "--heads", "heads", "--backbone", "backbone", "--max-new-tokens", "4"]
Prepare = Callable[[], object]


@dataclass(frozen=True)
class Mistake:
    name: str
    argv: list[str]
    files: dict[str, str | bytes] = field(default_factory=dict)
    """Written before; the command may not change them."""
    stdin: bytes | None = b""
    prepare: Prepare | None = None
    """Run in the folder before the command."""


def write(path: str, content: str | bytes) -> Prepare:
    return lambda: Path(path).write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
