"""A conversation with the backbone: what is remembered of it, what is written while an answer comes, and the loop of questions."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from headstart.inference.bench.prompts import Message, Prompter
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, Tally, continue_text
from headstart.support.errors import UserError
from headstart.support.token_text import TokenTextStream

HELP = "/reset begins anew, /exit leaves, /help shows this; Ctrl-C stops an answer"
COLOURS = (36, 33, 35, 32)
"""Of the terminal: cyan, yellow, magenta, green. Each pass takes the next."""
BURST = 2e-4
"""Seconds. The tokens of one pass come microseconds apart, those of two passes at least a pass apart."""


@dataclass(frozen=True)
class Answer:
    """One answer and what it came to; without a tau if it was stopped."""

    question: str
    answer: str
    conversation: int
    """Counted from 0; /reset begins the next."""
    tokens: int
    tokens_per_second: float
    tau: float | None


class Chat:
    """The conversation so far. Every answer reads all of it anew: heads decode from the whole text."""

    def __init__(self, heads: SpeculativeModel, prompter: Prompter, settings: Settings, seed: int, system: str | None = None) -> None:
        self.heads, self.prompter, self.settings, self.seed, self.system = heads, prompter, settings, seed, system
        self.answers: list[Answer] = []
        self.conversation = -1
        self.messages: list[Message]
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.conversation += 1

    def ask(self, question: str, painter: Painter) -> Answer:
        """The answer, written by ``painter`` as it comes; KeyboardInterrupt stops it. Raises UserError if there is no room for one."""
        asked = [*self.messages, {"role": "user", "content": question}]
        prompt_T = self.prompter.converse(asked)
        context = self.heads.backbone.max_positions
        room = self.settings.max_new_tokens if context is None else context - len(prompt_T)
        if room < 1:
            raise UserError(f"the conversation has {len(prompt_T)} tokens, the backbone's context {context}; /reset begins a new one")
        settings = replace(self.settings, max_new_tokens=min(room, self.settings.max_new_tokens))
        tally, start = Tally(), time.perf_counter()
        stopped = False
        try:
            tally.add(continue_text(self.heads, prompt_T, settings, self.seed + len(self.answers), streamer=painter))
        except KeyboardInterrupt:
            painter.end()
            stopped = True
        speed = painter.tokens / (time.perf_counter() - start)
        answer = Answer(question, painter.text, self.conversation, painter.tokens, speed, None if stopped else tally.tau)
        self.messages = [*asked, {"role": "assistant", "content": painter.text}]
        self.answers.append(answer)
        return answer

    def report(self) -> dict[str, Any]:
        """What was said, for a file."""
        sampling = {"temperature": self.settings.temperature, "seed": self.seed if self.settings.temperature > 0 else None}
        return {"system": self.system, **sampling, "answers": [asdict(answer) for answer in self.answers]}


class Painter(BaseStreamer):
    """Writes tokens as they are accepted; with ``colour``, those of each pass in the next of `COLOURS`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO, colour: bool) -> None:
        self.pieces, self.out, self.colour = TokenTextStream(tokenizer, skip_special_tokens=True), out, colour
        self.text, self.tokens = "", 0
        self.passes, self.last = 0, 0.0
        self.prompted = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, which is not written; then tokens."""
        if not self.prompted:
            self.prompted = True
            return
        if time.perf_counter() - self.last > BURST:
            self.passes += 1
        for token in value.flatten().tolist():
            self.tokens += 1
            self._write(self.pieces.add(token))
        self.last = time.perf_counter()

    def end(self) -> None:
        """What was held back, and the end of the line."""
        self._write(self.pieces.end())
        print(file=self.out, flush=True)

    def _write(self, piece: str) -> None:
        self.text += piece
        if self.colour and piece:
            piece = f"\x1b[{COLOURS[self.passes % len(COLOURS)]}m{piece}\x1b[0m"
        print(piece, end="", file=self.out, flush=True)


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for a tokenizer that cannot write conversations."""
    if not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {tokenizer.name_or_path} has no chat template, so it cannot chat; use headstart generate")


def converse(talk: Chat) -> None:
    """Questions from the standard input, one a line, until it ends; answers to the standard output, the rest to the standard error."""
    at_terminal = sys.stdin.isatty()
    drafting = bool(talk.heads.drafters or talk.heads.proposers)   # else every token is a pass of its own
    colour = drafting and sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if at_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (lets `input` edit a line and recall earlier ones)
        _tell(HELP)
    while (line := _question(at_terminal)) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            talk.reset()
            _tell("a new conversation")
        elif line.startswith("/"):
            _tell(HELP if line == "/help" else f"unknown command {line}; {HELP}")
        elif line:
            _answer(talk, line, colour)


def _question(at_terminal: bool) -> str | None:
    """The next line, without blanks around it; None at the end."""
    if not at_terminal:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return input("> ").strip()
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:   # there is no answer to stop
        print(file=sys.stderr)
        return "/help"


def _answer(talk: Chat, question: str, colour: bool) -> None:
    try:
        answer = talk.ask(question, Painter(talk.prompter.tokenizer, sys.stdout, colour))
    except UserError as error:
        if not talk.answers:   # nothing has ever worked: a template that refuses the system's turn, for one
            raise
        _tell(f"error: {error}")
        return
    tau = "stopped" if answer.tau is None else f"tau {answer.tau:.2f}"
    _tell(f"{tau}, {answer.tokens} tokens, {answer.tokens_per_second:.1f} tokens/s")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
