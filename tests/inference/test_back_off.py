"""Sources that draft and back off in whole calls of generate, on a clock whose time passes only where a test says so."""

from typing import Any

import pytest
from families import backbone, prompts, say

from headstart.inference.capture import captured
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.tree import CandidateTree, TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import said
from headstart.inference.sources.proposer import Candidates, Proposer


class SimulatedClock:
    """Time that passes only where a test says so, in place of the clocks of the decoding loop: what is chosen depends on no machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A forward pass takes 2 ms, and 2 % more for each further node."""
        self.seconds = 0.0
        monkeypatch.setattr(captured, "time", self)
        read = Reader.tree

        def timed(reader: Reader, cache: Any, tree: CandidateTree) -> Any:
            self.seconds += 2e-3 * (1 + 0.02 * (tree.size - 1))
            return read(reader, cache, tree)

        monkeypatch.setattr(Reader, "tree", timed)

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    return SimulatedClock(monkeypatch)


class Parrot(Proposer):
    """Proposes the continuation it was given: always right, or always wrong."""

    def __init__(self, clock: SimulatedClock, truths: list[list[int]], right: bool, delay: float = 0.0) -> None:
        """``delay``: simulated seconds that it takes."""
        self.name, self.clock, self.truths, self.right, self.delay = f"parrot {right}", clock, truths, right, delay
        self.texts: dict[int, list[int]] = {}
        self.asked = 0

    def open(self, row: int, tokens: list[int]) -> None:
        self.texts[row] = list(tokens)

    def extend(self, row: int, tokens: list[int]) -> None:
        self.texts[row] += tokens

    def propose(self, row: int, depth: int, nodes: int) -> Candidates:
        self.asked += 1
        self.clock.seconds += self.delay
        text = self.texts[row]
        truth = next(t for t in self.truths if t[: len(text)] == text)
        coming = truth[len(text) : len(text) + min(depth, 6)]
        tokens = coming if self.right else [(token + 1) % 61 for token in coming]
        return Candidates(tokens, list(range(-1, len(tokens) - 1)), [-0.1] * len(tokens))


OPTIONS: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}


def test_a_proposer_that_is_right_is_verified_and_one_that_is_wrong_backs_off(clock: SimulatedClock) -> None:
    on, rows = backbone("shallow"), {"input_ids": prompts((9,))[0][None]}
    truths = say(SpeculativeModel(on), rows, **OPTIONS | {"max_new_tokens": 150}).sequences.tolist()
    right, wrong = Parrot(clock, truths, True), Parrot(clock, truths, False, delay=5e-3)
    for proposers in ([right], [wrong], [right, wrong]):
        of, passes = SpeculativeModel(on, proposers=proposers), 0
        right.asked = wrong.asked = 0
        for _ in range(2):
            out = say(of, rows, **OPTIONS)
            assert out.sequences.tolist()[0] == truths[0][:69]
            passes += out.passes
        if right in proposers:
            assert out.tau > 3 and right.asked >= passes - 3, "all but plain steps that are timed"
        assert wrong.asked <= 8, "it brings nothing: asked now and then, and not in all of 118"


def test_drafts_that_rest_are_counted_and_said(clock: SimulatedClock) -> None:
    on, rows = backbone("shallow"), {"input_ids": prompts((9,))[0][None]}
    truths = say(SpeculativeModel(on), rows, **OPTIONS | {"max_new_tokens": 150}).sequences.tolist()
    for right in (True, False):
        out = say(SpeculativeModel(on, proposers=[Parrot(clock, truths, right, delay=5e-3 * (not right))]), rows, **OPTIONS)
        plain = sum(count == 0 for count in out.drafted[0])
        assert plain - 1 <= out.rested <= plain, "a last token needs no draft"
        assert (out.tally.rested_share > 0.8) is not right
        assert said(out.tau, out.tally.rested_share).startswith("1.00 (drafts rested in 9") is not right
    fixed = say(SpeculativeModel(on, proposers=[Parrot(clock, truths, False)]), rows, tree=TreeShape(4, 1), **OPTIONS)
    assert fixed.tau == 1.0 and fixed.rested == 0, "they were drafted and are bad"
    assert say(SpeculativeModel(on), rows, **OPTIONS).rested == 0, "there are none"


def test_of_two_sources_that_draft_the_same_one_backs_off(clock: SimulatedClock) -> None:
    """The second one has nothing to add to what the first has drafted."""
    on, rows = backbone("shallow"), {"input_ids": prompts((9,))[0][None]}
    truths = say(SpeculativeModel(on), rows, **OPTIONS | {"max_new_tokens": 150}).sequences.tolist()
    both = [Parrot(clock, truths, True, delay=5e-3), Parrot(clock, truths, True, delay=5e-3)]
    of = SpeculativeModel(on, proposers=both)
    for _ in range(3):
        out = say(of, rows, **OPTIONS)
        assert out.tau > 3
    assert min(one.asked for one in both) < 8 and max(one.asked for one in both) > 20


def test_a_source_that_pauses_with_one_row_is_tried_with_eight(clock: SimulatedClock) -> None:
    on, rows = backbone("shallow"), {"input_ids": prompts((9,))[0][None]}
    truths = say(SpeculativeModel(on), rows, **OPTIONS | {"max_new_tokens": 150}).sequences.tolist()
    of = SpeculativeModel(on, proposers=[Parrot(clock, truths, False, delay=5e-3)])
    say(of, rows, **OPTIONS)
    asked = of.proposers[0].asked
    say(of, {"input_ids": rows["input_ids"].expand(8, -1)}, **OPTIONS | {"max_new_tokens": 2})
    assert of.proposers[0].asked == asked + 8
