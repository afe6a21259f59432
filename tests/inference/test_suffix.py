"""The suffix automaton against its definition on random sequences; its cost in steps."""

import random
from typing import Any

import pytest

from headstart.inference.engine.suffix import Automaton, following
from headstart.inference.engine.suffix import SuffixProposer as Suffix

Text = list[int]


def ends(text: Text, part: Text) -> list[int]:
    """End positions of ``part`` in the sequence: the number of tokens up to each."""
    return [i + len(part) for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]


def counts(text: Text, part: Text) -> dict[int, int]:
    """How often each token was counted after ``part``.

    Once when it first followed ``part``; then each time it came where the longest suffix it had followed before was ``part``, or
    a longer string with the same end positions as ``part``.
    """
    followers = {text[end]: 1 for end in ends(text, part) if end < len(text)}
    for i, token in enumerate(text):
        before = text[:i]
        known = next((before[j:] for j in range(i + 1) if ends(before, [*before[j:], token])), None)
        if known is None or len(part) > len(known) or known[len(known) - len(part) :] != part:
            continue
        if ends(before, known) == ends(before, part):
            followers[token] += 1
    return followers


def state_of(automaton: Automaton, part: Text) -> int:
    state = 0
    for token in part:
        state = automaton.next[state][token]
    return state


@pytest.mark.parametrize("letters", [1, 2, 3, 6])
def test_the_longest_known_suffix_and_what_followed_it(letters: int) -> None:
    draw = random.Random(letters)
    for _ in range(20):
        text = [draw.randrange(letters) for _ in range(draw.randrange(40))]
        automaton = Automaton([])
        for i, token in enumerate(text):
            automaton.add(token)
            read, (state, length) = text[: i + 1], automaton.match()
            known = next((read[j:] for j in range(1, i + 1) if len(ends(read, read[j:])) > 1), [])
            assert length == len(known)
            assert state == state_of(automaton, known)
            followed = {text[end] for end in ends(read, known) if end <= i}
            assert set(automaton.next[state]) == followed


@pytest.mark.parametrize("letters", [1, 2, 4])
def test_counts_of_every_string(letters: int) -> None:
    draw = random.Random(letters)
    for _ in range(4):
        text = [draw.randrange(letters) for _ in range(18)]
        automaton = Automaton(text)
        for start in range(len(text)):
            for end in range(start, len(text) + 1):
                part = text[start:end]
                state, expected = state_of(automaton, part), counts(text, part)
                assert {token: automaton.seen(state, token) for token in range(letters) if automaton.seen(state, token)} == expected
                assert automaton.totals[state] == sum(expected.values())


def test_continuations_stand_in_the_order_in_which_they_were_last_counted() -> None:
    automaton = Automaton([9, 1, 9, 2, 9, 3, 9, 1, 9])
    assert list(automaton.next[state_of(automaton, [9])]) == [2, 3, 1]


def test_sequences_of_one_automaton_share_their_counts() -> None:
    """Several sequences: the counts of a string cover all of them, and no string spans two of them."""
    draw = random.Random(3)
    texts = [[draw.randrange(3) for _ in range(12)] for _ in range(4)]
    automaton = Automaton([])
    for text in texts:
        automaton.separate()
        for token in text:
            automaton.add(token)
    for part in ([0], [1, 2], [2, 0, 1], texts[1][3:9], texts[3]):
        followed = {text[end] for text in texts for end in ends(text, part) if end < len(text)}
        if not any(ends(text, part) for text in texts):
            continue
        assert set(automaton.next[state_of(automaton, part)]) == followed


def test_probabilities_follow_the_match_length_the_counts_and_the_order() -> None:
    def chance(text: Text, token: int) -> float:
        automaton = Automaton(text)
        return {one: chance for one, chance, _ in following(automaton, automaton.match(), 0.0)}[token]

    short, long = [1, 2, 7, 8, 2], [1, 2, 7, 8, 1, 2]
    assert 0.2 < chance(short, 7) < chance(long, 7) < 0.6
    assert chance([0, 2, 7, 1, 2, 7, 3, 2], 7) > chance(short, 7)
    old, new = [2, 7, 2, 8, 3, 2], [2, 8, 2, 7, 3, 2]
    assert chance(new, 7) > chance(old, 7)
    assert chance(short, 7) > chance(new, 7)


@pytest.mark.parametrize("depth", [1, 3])
def test_continuations_of_shorter_suffixes_come_after(depth: int) -> None:
    """3 followed 1 2, and 4 followed another 2: both are proposed, the longer match first."""
    proposer = Suffix()
    proposer.open(0, [1, 2, 3, 5, 2, 4, 6, 1, 2])
    candidates = proposer.propose(0, depth, 8)
    first = [token for token, parent in zip(candidates.tokens, candidates.parents, strict=True) if parent == -1]
    assert first == [3, 4]


class Counting(list):
    reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.reads += 1
        return super().__getitem__(place)


def texts_of(length: int) -> dict[str, Text]:
    draw = random.Random(0)
    word = [0, 1]
    while len(word) < length:
        word = word + word[: len(word) * 5 // 8]
    return {
        "one token": [0] * length, "periodic": [i % 7 for i in range(length)], "two letters": [draw.randrange(2) for _ in range(length)],
        "like language": [int(draw.paretovariate(0.8)) % 4000 for _ in range(length)], "nested": word[:length],
        "never the same": list(range(length)), "halves": [i % (length // 2) for i in range(length)],
    }  # fmt: skip


@pytest.mark.parametrize("name", texts_of(10))
def test_a_long_text_costs_a_few_steps_a_token(name: str) -> None:
    """A step is a look at a suffix link: a bounded number per token, however long the sequence."""
    text = texts_of(20_000)[name]
    automaton = Automaton([])
    automaton.link = links = Counting(automaton.link)
    for token in text:
        automaton.add(token)
    assert links.reads <= 5 * len(text)
    assert len(automaton.link) <= 2 * len(text)
