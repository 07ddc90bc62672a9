"""Paired differences: intervals equal a slow implementation and have the stated coverage."""

import math
import random

import numpy as np
import pytest

from esper.leyline.paired import Difference, compare, paired


def slow_interval(differences):
    """Return mean and percentile interval of the mean: 10,000 resamples, loops only."""
    n = len(differences)
    draws = np.random.default_rng(0).integers(0, n, (10_000, n)).tolist()
    means = sorted(sum(differences[i] for i in draw) / n for draw in draws)

    def percentile(share):
        place = share * (len(means) - 1)
        below = math.floor(place)
        return means[below] + (place - below) * (means[min(below + 1, len(means) - 1)] - means[below])

    return sum(differences) / n, percentile(0.025), percentile(0.975)


@pytest.mark.parametrize("worlds", [1, 2, 7, 16])
def test_paired_difference_equals_the_slow_implementation(worlds):
    rng = random.Random(worlds)
    ours = {w: rng.random() for w in range(worlds)}
    theirs = {w: rng.random() for w in range(worlds)}

    lead = paired(ours, theirs)

    assert (lead.mean, lead.low, lead.high) == pytest.approx(slow_interval([ours[w] - theirs[w] for w in ours]))
    assert lead.wins == sum(ours[w] > theirs[w] for w in ours)


def test_pairs_are_the_common_worlds_and_a_tie_is_neither_win_nor_loss():
    lead = paired({1: 0.5, 2: 0.5, 3: 0.9, 4: 0.1}, {4: 0.2, 3: 0.3, 2: 0.5, 9: 0.0})
    assert lead.mean == pytest.approx((0.0 + 0.6 - 0.1) / 3)
    assert (lead.wins, lead.ties, lead.losses) == (1, 1, 1)
    assert paired({1: 0.5}, {2: 0.5}) is None


def test_interval_has_the_stated_coverage():
    rng = np.random.default_rng(0)
    covered = 0
    for i in range(300):
        world = rng.normal(0, 5, 20)  # what is common to both cancels out
        ours, theirs = world + rng.normal(0.3, 0.5, 20), world + rng.normal(0, 0.5, 20)
        interval = compare(ours, theirs, repeats=500, rng_seed=i)
        covered += interval.low <= 0.3 <= interval.high
    assert 0.88 <= covered / 300 <= 0.98


def test_difference_is_significant_only_if_its_interval_excludes_zero():
    assert compare(np.arange(20) + 1.0, np.arange(20)).is_sure
    assert not compare(np.array([1.0, -1.0] * 10), np.zeros(20)).is_sure
    assert compare(np.zeros(5), np.ones(5)) == Difference(-1.0, -1.0, -1.0)
