"""Frontiers and verdicts equal results worked out by hand."""

import pytest

from esper.studies.contract import Claim
from esper.studies.statistics import frontier_height, summarize
from tests.support.example_studies import example_study, point


def test_frontier_keeps_the_best_point_by_validation_and_weighs_doublings_equally():
    points = [
        point(0.25, 0.2, val_quality=0.6),
        point(0.5, 0.9, val_quality=0.5),  # better on the test split, but not chosen
        point(2.0, 0.4, val_quality=0.7),
    ]
    # heights 0.2, 0.2, 0.4 at log2 budgets -2, -1, 1
    assert frontier_height(points, "test_quality") == pytest.approx((1 * 0.2 + 2 * 0.3) / 3)
    assert frontier_height(points[:1], "test_quality") == 0.2


def results(study, better, worse, worlds=4):
    """Return results of two arms by functions of world and budget that return the fields of a point."""
    return {
        ("rescue", arm, world): tuple(point(b, **fields(world, b)) for b in study.budgets)
        for arm, fields in (("better", better), ("worse", worse))
        for world in range(100, 100 + worlds)
    }


def verdict(claim, better, worse, worlds=4, **changes):
    study = example_study(claims=(claim,), **changes)
    return [v.outcome for v in summarize(study, results(study, better, worse, worlds), study.metric).verdicts]


def constant(quality, **fields):
    return lambda _world, _budget: {"quality": quality, **fields}


def noisy(world, _budget):
    return {"quality": 0.5 + 0.1 * (-1) ** world}


CLAIM = Claim(arm="better", against="worse", budget=1.0)


def test_verdict_follows_the_interval_and_the_direction():
    lower = Claim(arm="better", against="worse", budget=1.0, direction="lower")
    assert verdict(CLAIM, constant(0.6), constant(0.5)) == ["won"]
    assert verdict(CLAIM, constant(0.4), constant(0.5)) == ["lost"]
    assert verdict(CLAIM, noisy, constant(0.5)) == ["undecided"]
    assert verdict(CLAIM, constant(0.5), constant(0.5)) == ["undecided"]
    assert verdict(lower, constant(0.4), constant(0.5)) == ["won"]
    assert verdict(lower, constant(0.6), constant(0.5), metric="test_loss") == ["won"]


def test_claim_without_budget_has_one_verdict_per_budget_and_a_frontier_has_one():
    every = Claim(arm="better", against="worse")
    frontier = Claim(arm="better", against="worse", at="frontier area")

    def late(_world, budget):
        return {"quality": 0.6 if budget == 1.0 else 0.3}

    assert verdict(every, late, constant(0.5)) == ["lost", "won"]
    assert verdict(frontier, late, constant(0.5)) == ["lost"]  # (0.3 + 0.6) / 2 < 0.5


def test_verdict_is_refused_for_too_few_worlds_or_more_compute():
    assert verdict(CLAIM, constant(0.6), constant(0.5), worlds=4, min_worlds=5) == ["refused"]
    assert verdict(CLAIM, constant(0.6), constant(0.5), worlds=5, min_worlds=5) == ["won"]
    assert verdict(CLAIM, constant(0.6, train_macs=1060), constant(0.5, train_macs=1000)) == ["refused"]
    assert verdict(CLAIM, constant(0.6, train_macs=1040), constant(0.5, train_macs=1000)) == ["won"]
    assert verdict(CLAIM, constant(0.6, train_macs=500), constant(0.5, train_macs=1000)) == ["won"]


def test_equal_steps_pairs_points_with_the_same_number_of_epochs():
    claim = Claim(arm="better", against="worse", budget=0.5, at="equal steps")

    def full(_world, budget):
        return {"quality": 0.2 if budget == 0.5 else 0.8, "epochs": round(40 * budget)}

    assert verdict(claim, constant(0.5, epochs=40), full) == ["lost"]  # against 0.8, the point with 40 epochs
    assert verdict(claim, constant(0.5, epochs=20), full) == ["won"]
    assert verdict(claim, constant(0.5, epochs=30), full) == ["refused"]


def test_claim_with_two_budgets_compares_each_arm_at_its_own_budget_whatever_the_compute():
    def rising(_world, budget):
        return {"quality": 0.3 if budget == 0.5 else 0.7, "train_macs": 1000 if budget == 0.5 else 4000}

    cheaper = Claim(arm="better", against="worse", budget=0.5, against_budget=1.0)
    costlier = Claim(arm="better", against="worse", budget=1.0, against_budget=0.5)
    assert verdict(cheaper, constant(0.6), rising) == ["lost"]  # 0.6 − 0.7
    assert verdict(cheaper, constant(0.8), rising) == ["won"]  # 0.8 − 0.7
    assert verdict(costlier, rising, constant(0.6, train_macs=1000)) == ["won"]  # 0.7 − 0.6, with 4 × the compute
    assert verdict(cheaper, constant(0.8), rising, worlds=4, min_worlds=5) == ["refused"]
    study = example_study(claims=(cheaper,))
    lead = summarize(study, results(study, noisy, rising), "test_quality").verdicts[0].lead
    assert lead.mean == pytest.approx(-0.2)  # 0.6 and 0.4 by turns, against 0.7
    assert (lead.wins, lead.ties, lead.losses) == (0, 0, 4)


def test_rows_state_compute_in_full_trainings_of_the_reference_and_leads_over_it():
    study = example_study()
    data = results(study, constant(0.6, train_macs=600, params=10), constant(0.5))

    rows = summarize(study, data, "test_quality").rows

    assert [(r.budget, r.arm) for r in rows] == [
        (0.5, "worse"), (0.5, "better"), (1.0, "worse"), (1.0, "better"), (None, "worse"), (None, "better"),
    ]  # fmt: skip
    assert [r.full_trainings for r in rows] == [0.5, 0.6, 1.0, 0.6, 1.0, 0.6]
    assert [r.lead and round(r.lead.mean, 6) for r in rows] == [None, 0.1] * 3
    assert {r.params for r in rows if r.arm == "better"} == {10}
    assert {r.worlds for r in rows} == {4}


def test_arm_without_a_point_at_a_budget_has_no_row_there():
    study = example_study()
    data = results(study, constant(0.6), constant(0.5))
    data = {key: points[1:] if key[1] == "better" else points for key, points in data.items()}

    summary = summarize(study, data, "test_quality")

    assert [r.budget for r in summary.rows if r.arm == "better"] == [1.0]
    assert [v.outcome for v in summary.verdicts] == ["refused", "won", "refused"]
