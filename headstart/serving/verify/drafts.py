"""What an engine drafted and wrote, acceptance as engines count it, and a comparison with the heads, token by token.

A round is one draft and the forward pass that verifies it. vLLM counts all drafts that a round kept; Headstart counts the tokens
written, which are fewer in the last round if the end of the text cuts it. A `Verdict` is the outcome, in words and as data.

Engine and Headstart need other versions of the same libraries, so an engine runs in a process and an environment of its own. A driver is a
script that the engine's Python runs, ``driver JOB.json RESULT.json``, with nothing of Headstart.

Shape suffixes: B batch, T positions, K drafts or written tokens, V vocabulary.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.serving.export import Agreement, are_picks, draft_logits
from headstart.support.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class EngineProcess:
    """How an engine is found and run."""

    engine: str
    package: str
    """What the environment has, with its version."""
    variable: str
    """Environment variable that names the environment's Python."""
    python: Path
    """Where `make engines` puts it in a checkout."""
    driver: Path
    environment: dict[str, str] = field(default_factory=dict)
    quantised: str = ""
    """Why its texts and drafts differ on a quantised backbone, if they do."""

    def find_python(self) -> Path:
        """Return the Python of an environment with the engine. Raises UserError if there is none."""
        named = os.environ.get(self.variable)
        if named is not None and not Path(named).is_file():
            raise UserError(f"{self.variable}={named} is no file; name the Python of an environment with {self.package}")
        python = self.python if named is None else Path(named)
        if not python.is_file():
            where = f"in a checkout, or set {self.variable} to the Python of an environment with {self.package}"
            raise UserError(f"{self.engine} is not installed: run `make engines` {where}")
        return python

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run the driver on one thread and return its result. Raises UserError, with the engine's own words, if it fails."""
        python = self.find_python()
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            (work / "job.json").write_text(json.dumps(job))
            files = [str(work / name) for name in ("job.json", "result.json")]
            command = [str(python), "-I", str(self.driver), *files]  # -I: the vllm.py of this folder is not vLLM
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | self.environment
            done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, errors="replace")
            file = work / "result.json"
            if not file.is_file():
                log = work / "stderr"  # where a driver sends the engine's log
                said = done.stdout + done.stderr + (log.read_text(errors="replace") if log.is_file() else "")
                said = _one_line(" ".join(said.split("\n")[-8:]))
                raise UserError(f"{self.engine} ended with status {done.returncode} and without a result: {said}")
            result: dict[str, Any] = json.loads(file.read_text())
        if "error" in result:
            raise UserError(f"{self.engine} cannot serve this: {_one_line(result['error'])}")
        return result


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]


@dataclass(frozen=True)
class Round:
    """One draft, a chain: ``drafts`` continue the first ``position`` tokens (prompt, written tokens and root)."""

    position: int
    """Number of tokens that the drafts continue; the last of them is the root."""
    drafts: tuple[int, ...]
    kept: int
    """Leading drafts that equal the tokens of the backbone, whether or not they were written."""


@dataclass(frozen=True)
class Transcript:
    """One prompt, the text written after it, and the rounds that wrote it."""

    prompt: tuple[int, ...]
    written: tuple[int, ...]
    rounds: tuple[Round, ...]

    @property
    def text(self) -> tuple[int, ...]:
        """Return the prompt and what was written."""
        return self.prompt + self.written


def acceptance(transcripts: Sequence[Transcript]) -> dict[str, Any]:
    """Return the acceptance of transcripts, of which without rounds nothing is accepted.

    ``tau``: tokens written per round, the backbone's own included, as `headstart bench` reports it. ``mean_acceptance_length``: drafts kept
    per round plus one, and ``acceptance_rate_per_pos``: the share of rounds that kept the draft at each position, as vLLM reports them.
    """
    rounds = [(at, min(at.kept + 1, len(transcript.text) - at.position)) for transcript in transcripts for at in transcript.rounds]
    count, longest = max(len(rounds), 1), max((len(at.drafts) for at, _ in rounds), default=0)
    return {
        "tau": sum(written for _, written in rounds) / count if rounds else 1.0,
        "mean_acceptance_length": 1 + sum(at.kept for at, _ in rounds) / count,
        "acceptance_rate_per_pos": [sum(at.kept > i for at, _ in rounds) / count for i in range(longest)],
        "rounds": len(rounds),
    }


# An engine decodes greedily in fp32, one prompt at a time, with a chain of drafts per round.


@dataclass(frozen=True)
class EngineSettings:
    """What all engines of a comparison are given."""

    depth: int
    """Tokens drafted per round, in a chain."""
    new_tokens: int
    """Tokens to write after each prompt, unless an end token is written before."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a text; such a token is written. Empty: every text has ``new_tokens`` tokens."""

    def ended(self, tokens: Sequence[int]) -> list[int]:
        """Return what is written of these tokens."""
        written = list(tokens[: self.new_tokens])
        ends = [i for i, token in enumerate(written) if token in self.end_tokens]
        return written[: ends[0] + 1] if ends else written


Engine = Callable[[Path, str, list[list[int]], EngineSettings], list[Transcript]]
"""Decodes prompts with the heads in a folder on a model (a folder or hub id): one transcript per prompt, with a round for each draft.

Raises UserError, in one line, if the engine is not installed, or does not load these heads.
"""


@dataclass(frozen=True)
class Difference:
    """The first draft that differs, or the first token of a text."""

    prompt: int
    """Number of the prompt, from 1."""
    position: int
    """Tokens before the draft."""
    depth: int | None
    """None: the backbone's own token."""
    ours: int
    theirs: int
    """The likeliest token here, and the engine's."""


@dataclass(frozen=True)
class Comparison:
    """Counts over all prompts. A draft is equal if it is the heads' likeliest token after the drafts before it, but for rounding."""

    prompts: int
    equal_texts: int
    """Texts of which the backbone would have written every token, after those before it."""
    rounds: int
    drafts: int
    equal_drafts: int
    first: Difference | None
    figures: dict[str, Any]
    """The engine's acceptance, under the names of each way of counting."""

    @property
    def equal(self) -> bool:
        return self.equal_texts + self.equal_drafts == self.prompts + self.drafts


@torch.no_grad()
def compare(drafter: Drafter, transcripts: Sequence[Transcript]) -> Comparison:
    """Compare what an engine wrote and drafted with the logits of the backbone and of the heads at each place."""
    texts = drafts = 0
    first = None
    for number, transcript in enumerate(transcripts, 1):
        for at, tokens, logits_KV in _held_to(drafter, transcript):
            same = are_picks(logits_KV, tokens)
            texts, drafts = (texts + all(same), drafts) if at is None else (texts, drafts + sum(same))
            if first is None and not all(same):
                k = same.index(False)
                position = len(transcript.prompt) + k if at is None else at.position
                first = Difference(number, position, None if at is None else k, int(logits_KV[k].argmax()), tokens[k])
    rounds = [at for transcript in transcripts for at in transcript.rounds]
    return Comparison(len(transcripts), texts, len(rounds), sum(len(at.drafts) for at in rounds), drafts, first, acceptance(transcripts))


def _held_to(drafter: Drafter, transcript: Transcript) -> Iterator[tuple[Round | None, tuple[int, ...], Tensor]]:
    """Yield a text, without a round, and the drafts of each round, with the logits ``[K, V]`` from which they should have been picked."""
    read = drafter.backbone.read(torch.tensor([transcript.text], device=drafter.backbone.device), taps=drafter.taps)
    yield None, transcript.written, drafter.backbone.readout(read.hidden_BTD[0, len(transcript.prompt) - 1 : -1]).float()
    for at in transcript.rounds:
        if at.drafts:
            T, taps = at.position - 1, read.taps or {}
            before = Features(read.tokens_BT[:, :T], read.hidden_BTD[:, :T], {tap: x_BTD[:, :T] for tap, x_BTD in taps.items()} or None)
            yield at, at.drafts, draft_logits(drafter, before, transcript.text[T], len(at.drafts), at.drafts)


@dataclass
class Verdict:
    """What was compared, whether it agrees, and if not, the likely cause."""

    folder: str
    heads: str | None
    """The original heads, if they are there."""
    engine: str
    backbone: str
    method: str = ""
    prompts: str = ""
    """How many prompts the figures are of, where they are from, and how they were decoded."""
    reference: Agreement | None = None
    """The drafts of the folder against those of the trained heads; None: there are none to compare with, or the files cannot be read."""
    comparison: Comparison | None = None
    """The drafts of an engine; None: it was not asked, or refuses the folder."""
    faults: list[str] = field(default_factory=list)
    """What the files say that cannot be right."""
    changes: list[str] = field(default_factory=list)
    """What differs from the original heads."""
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        return self.reference is not None or self.comparison is not None

    @property
    def equal(self) -> bool:
        """Whether all that was compared agrees, and the files have no fault."""
        agree = self.reference is None or self.reference.whole
        asked = self.engine == "reference" or (self.comparison is not None and self.comparison.equal)
        return agree and asked and not self.faults

    @property
    def cause(self) -> str | None:
        """The likely cause of a difference; None if there is none."""
        unknown = "no cause was found" if self.heads else "not known: give the original heads with --heads to see what differs"
        return None if self.equal else next(iter([*self.faults, *self.changes, unknown]))

    def lines(self) -> Iterator[str]:
        """Yield the verdict for people."""
        word = "EQUAL" if self.equal else "DIFFERENT"
        if not self.compared and not self.faults:
            word = "NO FAULT FOUND"
        how = "read back" if self.engine == "reference" else f"{self.engine} engine"
        yield f"{word}: {self.folder} ({self.method or 'not readable'}), {how}, on {self.backbone}"
        if self.cause is not None:
            yield f"likely cause: {self.cause}"
        yield from (f"in the files: {fault}" for fault in self.faults if fault != self.cause)
        yield from (f"against the original heads: {change}" for change in self.changes if change != self.cause)
        if (result := self.reference) is not None:
            logits = f"their logits differ by at most {result.distance:.1e} of the largest one"
            yield f"{result.equal} of {result.drafts} drafts are those of the trained heads, {logits}"
        elif not self.faults:
            yield "the export stored no drafts to compare with: give the original heads with --heads, or measure it (headstart import)"
        yield from self._figures()
        yield from (f"note: {note}" for note in self.notes)

    def _figures(self) -> Iterator[str]:
        result = self.comparison
        if result is None:
            return
        texts = f"{result.equal_texts} of {result.prompts} texts are the backbone's own"
        yield f"{self.engine}: {texts}; {result.equal_drafts} of {result.drafts} drafts are those of the heads here"
        if (first := result.first) is not None:
            what = "the text" if first.depth is None else f"depth {first.depth}"
            tokens = f"headstart {first.ours} and {self.engine} {first.theirs}"
            yield f"first difference: prompt {first.prompt}, after {first.position} tokens, {what}: tokens {tokens}"
        yield f"measured on {self.prompts}"
        rates = " ".join(f"{rate:.3f}" for rate in result.figures["acceptance_rate_per_pos"])
        yield (
            f"{self.engine}: tau {result.figures['tau']:.3f}, mean acceptance length {result.figures['mean_acceptance_length']:.3f}, "
            f"acceptance rate per position {rates}, {result.figures['rounds']} rounds"
        )

    def report(self) -> dict[str, Any]:
        """Return the verdict as data."""
        return {"equal": self.equal, "cause": self.cause, "compared": self.compared, **asdict(self)}
