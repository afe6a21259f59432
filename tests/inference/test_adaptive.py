"""How much is drafted and verified, on simulated machines, with simulated heads: against the best fixed tree and against plain decoding."""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from families import backbone, prompts, say
from simulated import MACHINES, SMOLLM2, TASKS, Clock, Decoding, Heads, Machine, SimulatedSource, Step, Task, best_fixed, rate, simulating
from torch import Tensor
from torch.nn import Module

from headstart import Backbone, SpeculativeModel
from headstart.inference.engine.acceptance import TEXT_SPREAD, Acceptance, Offset, best_tree
from headstart.inference.engine.proposer import Candidates, Proposer
from headstart.inference.engine.source import Rows
from headstart.inference.engine.tree import Pool, TreeShape
from headstart.inference.latency import PASS, Costs
from headstart.inference.measure import said
from headstart.inference.policy import Draft, Policy

CHAT, MATHS, RAG, CODE, TRANSLATION, USELESS, PERFECT = TASKS
SLOW = [pytest.param(machine, marks=pytest.mark.slow) if number % 2 else machine for number, machine in enumerate(MACHINES)]
by_name = pytest.mark.parametrize("machine", SLOW, ids=lambda machine: machine.name)


def decoded(
    machine: Machine, tasks: Iterable[Task], tokens: int, seed: int = 0, busy: Callable[[int], bool] = lambda step: False
) -> list[list[Step]]:
    """Texts one after the other, in a process that knows nothing of the machine."""
    with simulating() as clock:
        decoding = Decoding(machine, Heads(chance=random.Random(seed)), clock, busy)
        return [decoding.text(task, tokens) for task in tasks]


def times_plain(machine: Machine, steps: Iterable[Step]) -> float:
    """The speed in autoregressive decoding's."""
    return rate(steps) * machine.of_pass(1)


@by_name
def test_in_the_long_run_it_is_the_best_fixed_tree(machine: Machine) -> None:
    """At most 5 % slower than that for each task, with what timing and trials cost; 8 % where times vary by a quarter."""
    for task in TASKS:
        (steps,) = decoded(machine, [task], 1000)
        assert rate(steps) >= (0.95 if machine.noise < 0.2 else 0.92) * best_fixed(machine, task, Heads()), task.name
        assert times_plain(machine, steps) >= 0.97, task.name


@by_name
def test_within_32_tokens_of_another_text_it_is_nearly_the_best_fixed_tree(machine: Machine) -> None:
    """Tasks take turns, so each text is of another one than the last."""
    order = [CHAT, TRANSLATION, MATHS, CODE, TRANSLATION, RAG] * 3
    texts = [text for seed in range(3) for text in decoded(machine, order, 96, seed)]
    for task in (CHAT, TRANSLATION, MATHS, CODE, RAG):
        own = [step for of, text in zip(order * 3, texts, strict=True) if of is task for step in text]
        late = [step for step in own if step.before >= 32]
        assert rate(late) >= (0.9 if machine.noise < 0.2 else 0.88) * best_fixed(machine, task, Heads()), task.name
        assert times_plain(machine, own) >= 0.965, task.name


@by_name
def test_a_first_text_is_not_slower_for_what_is_not_known_yet(machine: Machine) -> None:
    """The machine, the heads and the text are unknown, and the first step drafts."""
    for task in (TRANSLATION, USELESS, CHAT):
        texts = [decoded(machine, [task], 128, seed)[0] for seed in range(3)]
        assert all(text[0].depths and text[0].nodes > 1 for text in texts)
        assert times_plain(machine, [step for text in texts for step in text]) >= (0.92 if machine.name.startswith("CPU") else 0.95)


def test_a_slow_start_does_not_last() -> None:
    """In the first steps code is loaded; what they took is not what later ones take."""
    slow = Machine("slow", tuple((nodes, seconds * (12 if nodes > 1 else 3)) for nodes, seconds in SMOLLM2.passes), 12.0, 6.0)
    with simulating() as clock:
        decoding = Decoding(slow, Heads(chance=random.Random(0)), clock)
        decoding.text(CHAT, 12)
        decoding.machine = decoding.source.machine = SMOLLM2
        steps = decoding.text(CHAT, 1000)
    assert rate(step for step in steps if step.before >= 500) >= 0.95 * best_fixed(SMOLLM2, CHAT, Heads())


@by_name
def test_single_slow_passes_change_nothing(machine: Machine) -> None:
    """One step in 25 takes ten times as long: another program ran for a moment."""
    for task in (CHAT, CODE, TRANSLATION):
        (steps,) = decoded(machine, [task], 1000, busy=lambda step: step % 25 == 24)
        assert rate(steps) >= (0.94 if machine.noise < 0.2 else 0.9) * best_fixed(machine, task, Heads()), task.name
        assert times_plain(machine, steps) >= 0.95, task.name


@pytest.mark.parametrize("length", [pytest.param(10, marks=pytest.mark.slow), 40])
@by_name
def test_a_machine_that_was_busy_is_decoded_on_as_before(machine: Machine, length: int) -> None:
    """Ten times slower for a stretch of steps; 120 later at the latest, trees are what they would have been."""
    for task in (CHAT, CODE, TRANSLATION, PERFECT):
        (steps,) = decoded(machine, [task], 1200, busy=lambda step: 60 <= step < 60 + length)
        after = steps[60 + length + (20 if length == 10 else 120) :]
        assert rate(after) >= (0.94 if machine.noise < 0.2 else 0.9) * best_fixed(machine, task, Heads()), task.name
        assert times_plain(machine, after) >= 0.95, task.name


def test_drafts_that_are_never_accepted_are_rarely_made() -> None:
    steps = [step for text in decoded(SMOLLM2, [USELESS] * 10, 96) for step in text]
    assert times_plain(SMOLLM2, steps) >= 0.97
    assert sum(step.depths > 0 for step in steps[-480:]) <= 0.1 * 480, "trials, of one depth"
    assert sum(step.depths for step in steps[-480:]) <= 1.2 * sum(step.depths > 0 for step in steps[-480:])


def test_heads_rest_only_in_steps_in_which_n_grams_are_sure() -> None:
    """Texts repeat themselves here and there: the next step may have no n-gram."""
    with simulating() as clock:
        heads = SimulatedSource(Heads(), SMOLLM2, clock)
    policy, costs, rows, found = Policy([heads]), Costs(), Rows([0], [40], [0]), Pool(0)
    for nodes, seconds in SMOLLM2.passes * 2:
        costs.add(PASS, 1, nodes, seconds)
    for node in range(12):
        found.add("suffix", node, 1, -0.01, 0.97)
    for share, depths in ((0.5, True), (0.02, False)):
        heads.acceptance.levels, policy.budgets[heads] = [[share]], 0.0
        policy.begin([0])
        assert not policy.plan(Draft(rows, costs, [found]), heads).depths
        assert bool(policy.plan(Draft(rows, costs, [Pool(0)]), heads).depths) is depths


def test_deep_drafts_are_tried_again() -> None:
    """A depth that is not drafted shows nothing of its worth: heads that were bad at it have become good."""
    with simulating() as clock:
        decoding = Decoding(SMOLLM2, Heads(chance=random.Random(0)), clock)
        decoding.text(Task("shallow", 0.8, 0.02), 400)
        steps = decoding.text(PERFECT, 400)
    late = [step.depths for step in steps if step.before >= 200]
    assert sum(late) / len(late) > 3


def test_the_best_tree_has_the_most_tokens_a_second() -> None:
    passes, probs = {1: 1.0, 2: 1.2, 3: 1.5, 4: 2.4}, [0.3, 0.5, 0.4]
    assert best_tree(0, 0.0, [[]], passes).nodes == 1 == best_tree(0, 0.1, [[0.05]], passes).nodes
    for drafting in (0.0, 0.2, 9.0):
        rates = {n: (1 + sum(sorted(probs)[::-1][: n - 1])) / (drafting + seconds) for n, seconds in passes.items()}
        choice = best_tree(2, drafting, [probs], passes)
        assert (choice.depths, choice.nodes) == (2, max(rates, key=rates.__getitem__))
        assert choice.cost == pytest.approx(1 / max(rates.values())) and choice.seconds == drafting + passes[choice.nodes]
    assert best_tree(2, 0.2, [probs], passes).nodes < 4 == best_tree(2, 9.0, [probs], passes).nodes, "what a draft took is spent"


def test_an_offset_is_learned_from_few_drafts_and_fades() -> None:
    offset = Offset(0.0)
    for _ in range(4):
        offset.learn(0.6, False)
    assert offset.mean < -1.2
    known = offset.precision
    for _ in range(400):
        offset.fade()
    assert known > offset.precision == pytest.approx(TEXT_SPREAD**-2, rel=0.05)
    for _ in range(400):
        offset.learn(1e-9, True)
    assert offset.mean == 6.0, "bounded"


def test_rows_have_offsets_of_their_own_and_a_new_text_begins_with_their_mean() -> None:
    acceptance = Acceptance(levels=[[0.5, 0.1], [0.4]])
    assert acceptance.expected(3, []) == [[0.5, 0.1], [pytest.approx(0.24)], [pytest.approx(0.096)]]
    low, high = acceptance.offset(0), acceptance.offset(1)
    low.mean, high.mean = -2.0, 2.0
    assert acceptance.prob(0, 0, -0.7) < 0.2 < 0.8 < acceptance.prob(1, 0, -0.7)
    assert sum(acceptance.expected(1, [0])[0]) < 0.2 < sum(acceptance.expected(1, [0, 1])[0]) < sum(acceptance.expected(1, [1])[0])


# Sources that draft and back off in whole calls of generate, on a clock whose time passes only where a test says so.


@pytest.fixture
def clock() -> Iterator[Clock]:
    def tick(layer: Module, states: tuple[Tensor, ...]) -> None:
        """A forward pass takes 2 ms, and 2 % more for each further node."""
        clock.let_pass(2e-3 * (1 + 0.02 * (states[0].shape[1] - 1)))

    with simulating() as clock, backbone("shallow").layers[0].register_forward_pre_hook(tick):
        yield clock


class Parrot(Proposer):
    """Proposes the continuation it was given: always right, or always wrong."""

    def __init__(self, clock: Clock, truths: list[list[int]], right: bool, delay: float = 0.0) -> None:
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
        self.clock.let_pass(self.delay)
        text = self.texts[row]
        truth = next(t for t in self.truths if t[: len(text)] == text)
        coming = truth[len(text) : len(text) + min(depth, 6)]
        tokens = coming if self.right else [(token + 1) % 61 for token in coming]
        return Candidates(tokens, list(range(-1, len(tokens) - 1)), [-0.1] * len(tokens))


OPTIONS: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}


def decoded_plainly() -> tuple[Backbone, dict[str, Tensor], list[list[int]]]:
    on, rows = backbone("shallow"), {"input_ids": prompts((9,))[0][None]}
    return on, rows, say(SpeculativeModel(on), rows, **OPTIONS | {"max_new_tokens": 150}).sequences.tolist()


def test_a_proposer_that_is_right_is_verified_and_one_that_is_wrong_backs_off(clock: Clock) -> None:
    on, rows, truths = decoded_plainly()
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


def test_drafts_that_rest_are_counted_and_said(clock: Clock) -> None:
    on, rows, truths = decoded_plainly()
    for right in (True, False):
        out = say(SpeculativeModel(on, proposers=[Parrot(clock, truths, right, delay=5e-3 * (not right))]), rows, **OPTIONS)
        plain = sum(count == 0 for count in out.drafted[0])
        assert plain - 1 <= out.rested <= plain, "a last token needs no draft"
        assert (out.tally.rested_share > 0.8) is not right
        assert said(out.tau, out.tally.rested_share).startswith("1.00 (drafts rested in 9") is not right
    fixed = say(SpeculativeModel(on, proposers=[Parrot(clock, truths, False)]), rows, tree=TreeShape(4, 1), **OPTIONS)
    assert fixed.tau == 1.0 and fixed.rested == 0, "they were drafted and are bad"
    assert say(SpeculativeModel(on), rows, **OPTIONS).rested == 0, "there are none"


def test_of_two_sources_that_draft_the_same_one_backs_off(clock: Clock) -> None:
    """The second one has nothing to add to what the first has drafted."""
    on, rows, truths = decoded_plainly()
    both = [Parrot(clock, truths, True, delay=5e-3), Parrot(clock, truths, True, delay=5e-3)]
    of = SpeculativeModel(on, proposers=both)
    for _ in range(3):
        out = say(of, rows, **OPTIONS)
        assert out.tau > 3
    assert min(one.asked for one in both) < 8 and max(one.asked for one in both) > 20


def test_a_source_that_pauses_with_one_row_is_tried_with_eight(clock: Clock) -> None:
    on, rows, truths = decoded_plainly()
    of = SpeculativeModel(on, proposers=[Parrot(clock, truths, False, delay=5e-3)])
    say(of, rows, **OPTIONS)
    asked = of.proposers[0].asked
    say(of, {"input_ids": rows["input_ids"].expand(8, -1)}, **OPTIONS | {"max_new_tokens": 2})
    assert of.proposers[0].asked == asked + 8
