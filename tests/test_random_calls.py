"""Random calls of ``generate``: greedy texts and beams are transformers' own, sampled ones are those without drafts, and few are refused.

RANDOM_CALLS=2000 makes so many calls in the slow test, and RANDOM_SEED=1 others.
"""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from families import Noted, backbone, heads, say
from random_calls import Call, draw
from torch import Tensor

from headstart.support.errors import UserError

MOST_REFUSED = 0.1


def attempt(call: Call, **own: Any) -> Any:
    """The output by heads, or without ``own`` by transformers; an error is the output too."""
    given = call.given()
    try:
        if not own:
            return backbone(call.family).model.generate(**given), given.get("streamer")
        return say(heads(call.family, call.kind), {}, **given, **own), given.get("streamer")
    except Exception as error:   # of any kind: transformers' own are compared too
        return error, None


def differences(ours: Any, theirs: Any, call: Call) -> list[str]:
    """Which fields of two outputs differ."""
    if isinstance(theirs, Tensor):
        return [] if torch.equal(ours, theirs) else ["text"]
    found = [] if torch.equal(ours.sequences, theirs.sequences) else ["text"]
    for name in ("scores", "logits"):
        one, other = ours[name] if name in ours else None, theirs[name] if name in theirs else None
        if (one is None) != (other is None) or one is not None and len(one) != len(other):
            found.append(f"number of {name}")
        elif one is not None and not found and "num_beams" not in call.options:
            going = going_on(ours.sequences, len(one), call)
            pairs = zip(one, other, going, strict=True)
            if not all(torch.allclose(a[on], b[on].float(), atol=1e-3, rtol=1e-3) for a, b, on in pairs):
                found.append(name)
    if call.options.get("output_scores") and "num_beams" in call.options and not found:
        if not torch.allclose(ours.sequences_scores, theirs.sequences_scores, atol=1e-3, rtol=1e-3):
            found.append("scores of beams")
    return found


def going_on(sequences: Tensor, steps: int, call: Call) -> list[Tensor]:
    """For each step, the rows that had not ended before it: those of padding alone after an end differ."""
    written = sequences[:, sequences.shape[1] - steps :]
    pad = call.options.get("pad_token_id", 0)
    return [~(written[:, step:] == pad).all(1) for step in range(steps)]


def heard(streamer: Noted) -> list[int]:
    return [token for part in streamer.got for token in part.flatten().tolist()]


def make(call: Call) -> tuple[str, Any]:
    """Make a call: "same", "refused" with the reason, "error" for one that transformers does not take either, or "different"."""
    ours, streamed = attempt(call, **call.own)
    if isinstance(ours, UserError):
        return "refused", str(ours)
    theirs, other = attempt(call, **call.own, speculate=False) if call.sampled else attempt(call)
    if isinstance(theirs, Exception):
        same = isinstance(ours, Exception)
        return ("error" if same else "different"), f"{theirs!r} and {ours!r}"
    if isinstance(ours, Exception):
        return "different", repr(ours)
    found = differences(ours, theirs, call)
    if streamed is not None and heard(streamed) != heard(other):
        found.append("streamed")
    return ("different" if found else "same"), found


def run(seeds: range) -> Counter[str]:
    """Make the calls of these seeds; returns the number of each outcome and of each reason."""
    counts: Counter[str] = Counter()
    different = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            call = draw(random.Random(seed))
            outcome, why = make(call)
            counts[outcome] += 1
            if outcome == "refused":
                counts[f"refused: {why[:60]}"] += 1
            elif outcome == "different":
                different.append(f"seed {seed}: {why}: {call}")
            elif outcome == "error":
                counts[f"error: {str(why)[:120]}"] += 1
    print(*counts.most_common(), sep="\n")
    assert not different, f"{len(different)} of {len(seeds)} calls differ; {counts}\n" + "\n".join(different[:20])
    assert counts["refused"] <= MOST_REFUSED * len(seeds), counts
    return counts


def test_random_calls_mean_what_transformers_means() -> None:
    counts = run(range(60))
    assert counts["same"] > 40


@pytest.mark.slow
def test_many_random_calls() -> None:
    first = 1000 + 100_000 * int(os.environ.get("RANDOM_SEED", 0))
    run(range(first, first + int(os.environ.get("RANDOM_CALLS", 300))))
