"""A chat with the backbone: the messages, streamed answers and the input loop."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import torch
from rich.console import Console
from transformers import DynamicCache, LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from headstart.chat.prompts import Message, Prompter
from headstart.heads.backbone.model_config import CACHE
from headstart.inference.engine.request import context_of
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, continue_text, said
from headstart.inference.steps import Tally
from headstart.support.errors import UserError
from headstart.support.text import TokenTextStream, not_utf8, visible

HELP = "/reset begins anew, /exit leaves, /help shows this; Ctrl-C stops an answer"
COLOURS = ("cyan", "yellow", "magenta", "green")
"""Colours of the tokens, in rotation by decoding step."""
BURST = 2e-4
"""Seconds between tokens that mark a new decoding step: tokens of one step arrive microseconds apart, steps at least a forward pass."""


@dataclass(frozen=True)
class Answer:
    """One answer and its statistics; ``tau`` is None if the answer was interrupted."""

    question: str
    answer: str
    conversation: int
    """Number of the conversation, from 0; /reset starts the next."""
    tokens: int
    tokens_per_second: float
    tau: float | None
    rested: float
    """The share of passes in which drafts rested, since they would have cost more than they save."""


class Chat:
    """The conversation so far, and the cache in which it has been read."""

    def __init__(
        self,
        heads: SpeculativeModel,
        prompter: Prompter,
        settings: Settings,
        seed: int,
        system: str | None = None,
        processors: LogitsProcessorList | None = None,
    ) -> None:
        self.heads, self.prompter, self.settings, self.seed, self.system = heads, prompter, settings, seed, system
        self.processors = processors or LogitsProcessorList()
        self.answers: list[Answer] = []
        self.conversation = -1
        self.messages: list[Message]
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.conversation += 1
        self.cache = DynamicCache()

    def ask(self, question: str, painter: Painter) -> Answer:
        """Generate an answer, streamed to ``painter``; KeyboardInterrupt stops it. Raises UserError if the context is full."""
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt_T = self.prompter.converse(messages)
        context = context_of(self.heads.backbone)
        room = self.settings.max_new_tokens if context is None else context - len(prompt_T)
        if room < 1:
            raise UserError(f"the conversation has {len(prompt_T)} tokens, the backbone's context {context}; /reset begins a new one")
        settings = replace(self.settings, max_new_tokens=min(room, self.settings.max_new_tokens))
        tally, start = Tally(), time.perf_counter()
        stopped = False
        try:
            seed, given = self.seed + len(self.answers), {"logits_processor": self.processors, CACHE: self.cache}
            if not self.cache.get_seq_length():  # else it holds the images
                given |= self.prompter.beside(prompt_T, self.heads.backbone.device)
            tally = continue_text(self.heads, prompt_T, settings, seed, streamer=painter, **given).tally
        except KeyboardInterrupt:
            painter.end()
            stopped = True
        speed = painter.tokens / (time.perf_counter() - start)
        tau = None if stopped else tally.tau
        answer = Answer(question, painter.text, self.conversation, painter.tokens, speed, tau, tally.rested_share)
        self.messages = [*messages, self.prompter.answered(messages, torch.tensor(painter.written))]
        self.answers.append(answer)
        return answer

    def report(self) -> dict[str, Any]:
        """Return the conversations for ``--json``."""
        sampling = {"temperature": self.settings.temperature, "seed": self.seed if self.settings.temperature > 0 else None}
        return {"system": self.system, **sampling, "answers": [asdict(answer) for answer in self.answers]}


class Painter(BaseStreamer):
    """Streams tokens as they are accepted; with ``colours``, each decoding step has the next of `COLOURS`.

    On a terminal, control characters are written out; elsewhere the text is the model's.

    Rich disables colours if the output is not a terminal or NO_COLOR is set.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO, colours: bool) -> None:
        self.stream, self.console, self.colours = TokenTextStream(tokenizer, skip_special_tokens=True), Console(file=out), colours
        self.text, self.written = "", list[int]()
        self.steps, self.last = 0, 0.0
        self.prompted = False

    @property
    def tokens(self) -> int:
        """Number of tokens written."""
        return len(self.written)

    def put(self, value: torch.Tensor) -> None:
        """Write new tokens; the first call has the prompt, which is not written."""
        if not self.prompted:
            self.prompted = True
            return
        if time.perf_counter() - self.last > BURST:
            self.steps += 1
        for token in value.flatten().tolist():
            self.written.append(token)
            self._write(self.stream.add(token))
        self.last = time.perf_counter()

    def end(self) -> None:
        """Write the text held back, and a line break."""
        self._write(self.stream.end())
        self.console.out()

    def _write(self, piece: str) -> None:
        self.text += piece
        if self.console.is_terminal:
            self.console.out(visible(piece), style=COLOURS[self.steps % len(COLOURS)] if self.colours else None, highlight=False, end="")
        else:  # the text as it is: rich would drop control characters and expand tabs
            self.console.file.write(piece)


def converse(talk: Chat) -> None:
    """Read questions from standard input, one per line, until it ends; write answers to standard output, the rest to standard error."""
    at_terminal = sys.stdin.isatty()
    drafting = bool(talk.heads.drafters or talk.heads.proposers)  # otherwise every step has one token
    if at_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (enables line editing and history in `input`)
        _note(HELP)
    while (line := _question(at_terminal)) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            talk.reset()
            _note("a new conversation")
        elif line.startswith("/"):
            _note(HELP if line == "/help" else f"unknown command {line}; {HELP}")
        elif not_utf8(line):
            _note("error: the line is not UTF-8 text; it is left out")
        elif line:
            _answer(talk, line, drafting)


def _question(at_terminal: bool) -> str | None:
    """Read the next line, stripped; None at the end of the input."""
    if not at_terminal:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return input("> ").strip()
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:  # no answer is running
        print(file=sys.stderr)
        return "/help"


def _answer(talk: Chat, question: str, colours: bool) -> None:
    try:
        answer = talk.ask(question, Painter(talk.prompter.tokenizer, sys.stdout, colours))
    except UserError as error:
        if not talk.answers:  # the first answer: the template may refuse the system message
            raise
        _note(f"error: {error}")
        return
    tau = "stopped" if answer.tau is None else f"tau {said(answer.tau, answer.rested)}"
    _note(f"{tau}, {answer.tokens} tokens, {answer.tokens_per_second:.1f} tokens/s")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
