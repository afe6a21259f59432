"""The balance of a source of drafts: when it backs off, and for how long."""

from __future__ import annotations

import random

import pytest

from headstart.inference.sources.source_stats import MAX_BACKOFF, MAX_BALANCE, MIN_BACKOFF, SourceStats


def test_a_source_that_costs_more_than_it_brings_backs_off_longer_each_time() -> None:
    source_stats, pauses, passes = SourceStats(), [], 0
    for _ in range(6000):
        if source_stats.active():
            source_stats.note(-0.5)
            passes += 1
            if source_stats.standing < 0:
                source_stats.back_off(1)
                pauses.append(source_stats.paused)
    assert pauses[:2] == [350, 350] and passes < 0.022 * 6000, "each trial loses 3.5 steps, 1 % of 350"
    little, pauses = SourceStats(), []
    for _ in range(6):
        little.balance = -0.01
        little.trial = None   # as if it had paid before
        little.back_off(1)
        pauses.append(little.paused)
    assert pauses == [16, 32, 64, 128, 256, 512] and MIN_BACKOFF == 16


def test_a_trial_ends_when_it_has_lost_three_autoregressive_steps() -> None:
    """Random heads take about a step's time for no accepted token."""
    useless, passes = SourceStats(), 0
    while useless.standing >= 0:
        useless.note(-1.2)
        passes += 1
    assert passes == 3
    useless.back_off(1)
    assert useless.paused == 360, "3.6 steps"
    while useless.standing >= 0:
        useless.note(-1.2)
    useless.back_off(3)
    assert useless.paused == MAX_BACKOFF, "three sources share what trials may lose: 1,080"


def test_a_source_that_pays_is_not_paused_for_unlucky_passes_but_soon_after_it_stops_paying() -> None:
    """Its tokens vary by a step's worth from pass to pass and bring a fifth of a step on average: 2 % of these passes at most rest."""
    generator, rested = random.Random(0), 0
    for _ in range(10):
        source_stats = SourceStats()
        for _ in range(60):
            source_stats.note(0.5)
        for _ in range(2000):
            if not source_stats.active():
                rested += 1
                continue
            source_stats.note(generator.gauss(0.2, 1.0))
            if source_stats.standing < 0:
                source_stats.back_off(1)
    assert rested <= 0.02 * 20_000
    passes = 0
    while source_stats.balance >= 0:
        source_stats.note(-0.5)
        passes += 1
    assert passes <= 2 * MAX_BALANCE + 1
    source_stats.back_off(1)
    assert source_stats.paused == MIN_BACKOFF, "short, since it has paid before"


def test_one_slow_pass_does_not_end_a_trial() -> None:
    source_stats = SourceStats()
    source_stats.note(-500.0)
    assert source_stats.balance > 0


def test_tokens_are_worth_what_decoding_without_their_source_takes() -> None:
    alone, beside, rate = SourceStats(), SourceStats(), 0.0
    for _ in range(100):   # a pass of 3 tokens in 2 steps, of which this source took one
        assert alone.rate_without(1.0, 5e-3, rows=1, step=5e-3) == pytest.approx(200), "autoregressive decoding"
        rate = beside.rate_without(2.5, 5e-3, rows=1, step=5e-3)   # others drafted most of them
    assert rate == pytest.approx(500, rel=0.01)
    assert SourceStats().rate_without(1.0, 1e-2, 1, 5e-3) > 180, "one slow pass counts little"
    assert 0 < SourceStats().rate_without(-0.5, -1e-3, 1, 5e-3) <= 200, "a pass credited with more than it brought has a rate too"
    assert SourceStats().rate_without(13.0, 5e-3, 1, 5e-3) < 250, "and one in which others found a repeated text counts little too"


def test_few_trials_of_a_source_that_pays_end_by_chance() -> None:
    """It brings a third of a step a pass, and its tokens vary by more than a step: of such trials, a fifth would lose three steps."""
    generator, ended, lost = random.Random(0), 0, 0
    for _ in range(500):
        source_stats, lowest = SourceStats(), 0.0
        while source_stats.trial is not None and source_stats.standing >= 0:
            source_stats.note(generator.gauss(0.36, 1.2))
            lowest = min(lowest, source_stats.balance)
        ended += source_stats.standing < 0
        lost += lowest < 0
    assert ended <= 0.03 * 500 and lost >= 0.08 * 500
