"""User errors, reported in one line."""

import difflib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

LONGEST = 1500
"""Characters of a message; the middle of a longer one is left out."""
SILENCE = 5.0
"""Seconds without a line while something is waited for."""
GONE = {
    "lora": "heads are trained whole, from drafter.init",
    "cache.teacher": "a cache holds the final hidden states, in 8 bits by default; leave it out",
    "cache.top_k": "a cache holds the final hidden states, in 8 bits by default; leave it out",
    "tune": "decoding times this machine in its first steps, and heads keep the acceptance of their training",
    "--also-alone": "say --include-heads-only",
    "--also-fixed-tree": "say --include-static-tree",
    "--draft-offload": "say --offload-draft-kv",
    "--draft-sink": "say --num-sink-tokens",
    "--features": "the folder's drafts are compared with those that its export stored; leave it out",
    "--quantize": "engines' own tools quantise heads, and headstart import reads those",
}
"""Keys, commands and flags of earlier versions, and what takes their place."""


class UserError(ValueError):
    """Invalid input. The message is one line with the value, the allowed values and a remedy.

    Commands print it as ``error: ...`` and exit with status 2; Python callers may catch it as a ``ValueError``.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Within this context, the message of a UserError begins with ``what``, where the mistake is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


def one_line(text: str, longest: int = LONGEST) -> str:
    """Return the text in one line that is safe on a terminal: line breaks become spaces, other control characters escapes."""
    if len(text) > longest:
        text = f"{text[: longest - 400]} ... {text[-395:]}" if longest > 800 else f"{text[: longest - 3]}..."
    return "".join(char if char.isprintable() else " " if char in "\n\r\t\v\f\x85\u2028\u2029" else repr(char)[1:-1] for char in text)


def cause(error: BaseException, longest: int = 300) -> str:
    """Return what an error says in one line of at most ``longest`` characters; its type if it says nothing."""
    return one_line(" ".join(str(error).split()), longest) or type(error).__name__


def nearest(name: str, known: Iterable[str], cutoff: float = 0.75) -> str | None:
    """Return the name that was probably meant; None if no known one is as similar (`difflib`'s ratio; its 0.6 takes ollama for vllm)."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), None)


def gone(name: str) -> str:
    """Return what takes the place of a key, command or flag of earlier versions; empty if it never was one."""
    return next((f"it is gone: {instead}" for key, instead in GONE.items() if f".{name}".endswith(f".{key}")), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the beginning of a remedy that offers the nearest known name; empty if none is near."""
    near = nearest(name, known)
    return "" if near is None else f"did you mean {near!r}? "


def notice(line: str) -> None:
    """Print one line on standard error, unless logging is set up otherwise; of several processes the first does."""
    if int(os.environ.get("RANK", "0")) == 0:
        logging.getLogger("headstart").warning("%s", one_line(line))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Within this context, a `notice` every few seconds (`SILENCE`) says what is waited for, and for how long already."""
    over, start = Event(), time.monotonic()

    def say() -> None:
        while not over.wait(SILENCE):
            notice(f"{what}: {time.monotonic() - start:.0f} s")

    thread = Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
