"""The outcome of a verification, in words and as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headstart.inference.serving.verify.drafts import Comparison

UNKNOWN = "no cause was found"


@dataclass
class Verdict:
    """What was compared, whether it agrees, and if not, the likely cause."""

    folder: str
    heads: str | None
    """The original heads; None: the folder alone was checked."""
    engine: str
    backbone: str
    method: str = ""
    comparison: Comparison | None = None
    """None: the files could not be drafted with."""
    distance: float | None = None
    """Largest difference of logits, relative to the largest logit; None: not compared."""
    logits_agree: bool = True
    faults: list[str] = field(default_factory=list)
    """What the files say that cannot be right."""
    changes: list[str] = field(default_factory=list)
    """What differs from the original heads."""
    notes: list[str] = field(default_factory=list)
    found: str | None = None
    """The mistake whose correction restores agreement."""
    tried: int = 0
    """Number of other readings that were tried."""

    @property
    def compared(self) -> bool:
        """False if there was nothing to compare with: neither original heads nor another engine."""
        return self.heads is not None or self.engine != "reference"

    @property
    def equal(self) -> bool:
        """Whether both sides agree, or, with nothing to compare with, whether no mistake was found."""
        agree = self.comparison is not None and self.comparison.equal and self.logits_agree
        return agree and not self.faults and not self.changes and self.found is None

    @property
    def cause(self) -> str | None:
        """The likely cause of a difference; None if there is none."""
        if self.equal:
            return None
        known = [*self.faults[:1], *([self.found] if self.found else []), *self.changes[:1]]
        return known[0] if known else UNKNOWN

    def lines(self) -> Iterator[str]:
        """Yield the verdict for people."""
        what = f"{self.folder} ({self.method or 'not readable'}), {self.engine} engine, on {self.backbone}"
        word = ("EQUAL" if self.equal else "DIFFERENT") if self.compared else "NO MISTAKE FOUND" if self.equal else "MISTAKE FOUND"
        yield f"{word}: {what}"
        if self.cause is not None:
            yield f"likely cause: {self.cause}"
        if self.found is not None and self.found != self.cause:
            yield f"confirmed by trial: {self.found}"
        elif self.found is not None:
            yield f"confirmed: read accordingly, {'the drafts agree' if self.heads else 'more drafts are right'}"
        elif self.tried:
            outcome = "restores agreement" if self.compared else "drafts much better"
            yield f"{self.tried} other readings of the files were tried; none {outcome}"
        if not self.compared:
            yield "nothing was compared with Headstart, so a slight mistake cannot be told: give the original heads with --heads"
        yield from (f"in the files: {fault}" for fault in self.faults if fault != self.cause)
        yield from (f"against the original heads: {change}" for change in self.changes if change != self.cause)
        yield from self._figures()
        yield from (f"note: {note}" for note in self.notes)

    def _figures(self) -> Iterator[str]:
        one = self.comparison
        if one is None:
            yield "drafts were not compared: the files cannot be drafted with as they are"
            return
        if self.compared:
            sides = " and ".join(one.figures)
            yield f"{sides}: {one.prompts} prompts, {one.equal_texts} equal texts; {one.equal_drafts} of {one.drafts} drafts equal"
            if one.near_ties:
                yield f"near-ties: {one.near_ties} of the differences are between tokens about equally likely, which rounding decides"
        if (first := one.first) is not None:
            tokens = " and ".join(f"{side} {token}" for side, token in zip(one.figures, (first.ours, first.theirs), strict=True))
            what = "the text" if first.depth is None else f"depth {first.depth}"
            yield f"first difference: prompt {first.prompt}, after {first.position} tokens, {what}: tokens {tokens}"
        if self.distance is not None:
            whose = "" if self.engine == "reference" else " of the reference reading"
            yield f"logits{whose} differ by at most {self.distance:.1e} of the largest one"
        for side, figures in one.figures.items():
            rates = " ".join(f"{rate:.3f}" for rate in figures["acceptance_rate_per_pos"])
            yield (
                f"{side}: tau {figures['tau']:.3f}, mean acceptance length {figures['mean_acceptance_length']:.3f}, "
                f"acceptance rate per position {rates}, {figures['rounds']} rounds"
            )

    def report(self) -> dict[str, Any]:
        """Return the verdict as data."""
        one = self.comparison
        compared = None
        if one is not None:
            names = ("prompts", "equal_texts", "rounds", "drafts", "equal_drafts", "near_ties", "figures")
            compared = {name: getattr(one, name) for name in names} | {"first_difference": None if one.first is None else vars(one.first)}
        own = ("folder", "heads", "engine", "backbone", "method", "compared", "faults", "changes", "notes", "found", "tried")
        stated = {name: getattr(self, name) for name in own}
        return {"equal": self.equal, "cause": self.cause, **stated, "logits_distance": self.distance, "comparison": compared}
