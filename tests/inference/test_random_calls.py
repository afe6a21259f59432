"""Random calls of ``generate``: greedy texts and beams are transformers' own, sampled ones are those without drafts, and few are refused.

RANDOM_CALLS=2000 makes so many calls in the slow test, and RANDOM_SEED=1 others.
"""

import os
import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from families import Noted, Scripted, backbone, heads, say
from random_calls import Call, draw
from torch import Tensor

from headstart.inference.generate import SpeculativeModel
from headstart.support.errors import UserError

MOST_REFUSED = 0.1


def attempt(call: Call, of: SpeculativeModel | None, **own: Any) -> Any:
    """The output by these heads, or by transformers itself, and what was streamed; an error is the output too."""
    given = call.given()
    try:
        if of is None:
            return backbone(call.family).model.generate(**given), given.get("streamer")
        return say(of, {}, **given, **own), given.get("streamer")
    except Exception as error:  # of any kind: transformers' own are compared too
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


def drafting(call: Call, truth: Any) -> SpeculativeModel:
    """The heads of a call: random ones, whose drafts are rarely right, or some that mostly know the text."""
    if call.kind != "nearly" or isinstance(truth, Exception):
        return heads(call.family, "eagle3" if call.kind == "nearly" else call.kind)
    sequences, rows = truth if isinstance(truth, Tensor) else truth.sequences, call.rows["input_ids"]
    pads = (call.rows["attention_mask"] == 0).sum(1).tolist() if "attention_mask" in call.rows else [0] * len(rows)
    texts = [text[pads[number * len(rows) // len(sequences)] :] for number, text in enumerate(sequences.tolist())]
    return SpeculativeModel(backbone(call.family), Scripted(backbone(call.family), texts, "nearly"), capture="off")


def make(call: Call) -> tuple[str, Any]:
    """Make a call: "same", "refused" with the reason, "error" for one that transformers does not take either, or "different"."""
    of = heads(call.family, "eagle3")
    theirs, other = attempt(call, of, **call.own, speculate=False) if call.sampled else attempt(call, None)
    ours, streamed = attempt(call, drafting(call, theirs), **call.own)
    if isinstance(ours, UserError):
        return "refused", str(ours)
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
    counts = run(range(24))
    assert counts["same"] > 16


@pytest.mark.slow
def test_many_random_calls() -> None:
    first = 1000 + 100_000 * int(os.environ.get("RANDOM_SEED", 0))
    run(range(first, first + int(os.environ.get("RANDOM_CALLS", 300))))
