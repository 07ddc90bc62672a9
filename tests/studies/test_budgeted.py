"""Test budgets: what a branch costs, that it leaves the trunk unchanged, and that growth arms stay within budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.grower.audition import Audition, Trial
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Rules
from esper.studies.arms import Space, audition, host_macs, largest_within, structure_named, weakened
from esper.studies.budgeted import Session, few_samples, first_classes, full_structure, full_training_macs
from esper.studies.contract import Arm
from esper.studies.results import read_saved
from esper.studies.table import STUDIES
from esper.studies.trainers import TRAINERS, trainer_of
from esper.tamiyo.controllers import Schedule, Wait
from esper.tolaria.tasks import get_task
from tests.support import ROOT

SMALL = replace(get_task("digits"), epochs=10, batches_per_epoch=4, val_size=64)
LIMIT = 0.7  # share of the full structure


def session(**options: object) -> Session:
    return Session(SMALL, 0, unit=full_training_macs(SMALL), **options)


def test_one_full_training_costs_its_epochs_of_the_full_structure():
    points = session(structure=full_structure(SMALL)).run(Wait(), [0.5, 1.0])
    assert [point.epochs for point in points] == [5, 10]
    assert points[-1].train_macs == full_training_macs(SMALL)


def test_planted_network_stays_within_every_budget():
    budgets = [0.3, 0.6, 1.0]
    unit = full_training_macs(SMALL)
    points = session(rules=Rules(birth="open")).run(Schedule(["mlp"], start=2), budgets)
    for point, budget in zip(points, budgets, strict=True):
        assert 0.8 * budget * unit < point.train_macs <= budget * unit
    assert points[-1].structure == full_structure(SMALL)


@pytest.mark.parametrize("budget", [0.05, 0.1, 0.15, 0.2, 0.25])
def test_seed_is_not_planted_if_its_epochs_exceed_the_budget(budget):
    """A seed multiplies the cost of an epoch, so planting it late in a small budget would exceed the budget."""
    unit = full_training_macs(SMALL)
    grown = session(rules=Rules(birth="open"))
    small, large = grown.run(Schedule(["mlp"], start=2), [budget, 1.0])
    assert small.train_macs <= budget * unit
    assert len(small.structure) < len(large.structure) == len(full_structure(SMALL))
    (alone,) = session(rules=Rules(birth="open")).run(Schedule(["mlp"], start=2), [1.0])
    assert replace_seconds(large) == replace_seconds(alone)


@pytest.mark.parametrize("budget", [0.3, 0.7])
def test_ramp_as_a_share_of_each_budget_is_that_ramp_alone(budget, monkeypatch):
    monkeypatch.setattr("esper.studies.arms.get_task", lambda _: SMALL)
    common = {"structure": "full", "birth": "open", "start": 0}
    shared = Arm(name="shared", kind="planted", settings={**common, "ramp_share": 0.5})
    fixed = Arm(name="fixed", kind="planted", settings={**common, "open_ramp": round(5 * budget)})
    points = trainer_of(shared)(shared, "digits", 0, [0.3, 0.7])
    (expected,) = trainer_of(fixed)(fixed, "digits", 0, [budget])
    assert replace_seconds(expected) in map(replace_seconds, points)


@pytest.mark.parametrize("budget", [0.14, 0.26, 0.38, 0.5])
def test_static_network_stays_within_budget_and_wastes_less_than_an_epoch(budget):
    trunk = session(structure=full_structure(SMALL))
    (point,) = trunk.run(Wait(), [budget])
    assert 0 <= budget * trunk.unit - point.train_macs < trunk.epoch_macs


def test_branches_leave_the_trunk_unchanged():
    alone = session(structure=full_structure(SMALL)).run(Wait(), [1.0])
    branched = session(structure=full_structure(SMALL)).run(Wait(), [0.3, 0.6, 1.0])
    assert replace_seconds(branched[-1]) == replace_seconds(alone[-1])


def test_points_do_not_depend_on_how_many_samples_validate_the_epochs_between_them(monkeypatch):
    few = session(rules=Rules(birth="open")).run(Schedule(["mlp"], start=2), [0.3, 0.6])
    static = session().run(Wait(), [0.05, 0.1])
    monkeypatch.setattr("esper.studies.budgeted.WATCHED", 8)
    fewer = session(rules=Rules(birth="open")).run(Schedule(["mlp"], start=2), [0.3, 0.6])
    assert list(map(replace_seconds, fewer)) == list(map(replace_seconds, few))
    assert list(map(replace_seconds, session().run(Wait(), [0.05, 0.1]))) == list(map(replace_seconds, static))


def replace_seconds(point: object) -> dict[str, object]:
    return {name: getattr(point, name) for name in point.__struct_fields__ if name != "seconds"}


def test_before_the_change_only_the_first_classes_are_trained(monkeypatch):
    classes = {}
    minibatches = type(SMALL).minibatches

    def recorded(task, data, world, step):
        for x, y in minibatches(task, data, world, step):
            classes.setdefault(step, set()).update(y.tolist())
            yield x, y

    monkeypatch.setattr(type(SMALL), "minibatches", recorded)
    changed = session(change=3)
    changed.advance(Wait(), 5 * changed.epoch_macs)
    assert {step: max(some) for step, some in classes.items()} == {0: 4, 1: 4, 2: 4, 3: 9, 4: 9}


def test_first_classes_leave_validation_and_test_whole():
    data = SMALL.load_data()
    few = first_classes(data, 5)
    assert set(few.train.y.tolist()) == {0, 1, 2, 3, 4}
    assert (few.val, few.test) == (data.val, data.test)


def test_few_samples_are_drawn_by_the_world():
    data = SMALL.load_data()
    few, again, other = (few_samples(data, 100, world) for world in (0, 0, 1))
    assert len(few.train) == 100
    assert torch.equal(few.train.x, again.train.x)
    assert not torch.equal(few.train.x, other.train.x)
    rows = {tuple(row) for row in data.train.x.flatten(1).tolist()}
    assert rows.issuperset(map(tuple, few.train.x.flatten(1).tolist()))
    assert (few.val, few.test) == (data.val, data.test)


def test_more_samples_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="fewer than samples=99999"):
        session(samples=99_999)


def test_sessions_of_a_process_share_the_data():
    assert session().data is session().data
    assert len(session(samples=50).data.train) == 50
    assert len(session().data.train) > 50


def test_pretraining_is_not_counted():
    trained = session()
    trained.pretrain(4)
    assert trained.spent == 0
    assert trained.epochs == 4
    point = trained.run(Wait(), [0.1])[0]
    assert point.train_macs <= 0.1 * full_training_macs(SMALL)


@pytest.mark.parametrize(("kind", "settings"), [("static", {}), ("planted", {"birth": "open", "start": 0})])
def test_slots_limits_the_structure_to_the_first_ones(kind, settings, monkeypatch):
    monkeypatch.setattr("esper.studies.arms.get_task", lambda _: SMALL)
    arm = Arm(name="a", kind=kind, settings={"structure": "full", "slots": 2, **settings})
    structure = TRAINERS[kind](arm, "digits", 0, [1.0])[0].structure
    assert list(structure) == list(full_structure(SMALL))[:2]


def test_worlds_draw_the_weak_block():
    task = get_task("rescue")
    hosts = [weakened(task, world, "kernel").build_host(0) for world in range(12)]
    kernels = [[m.kernel_size[0] for m in host.modules() if isinstance(m, nn.Conv2d)] for host in hosts]
    assert {tuple(each) for each in kernels} == {(1, 3, 3), (3, 1, 3), (3, 3, 1)}
    assert weakened(task, 0, "none") is task


def test_seed_is_placed_where_it_gains_most_and_its_trials_count(monkeypatch):
    monkeypatch.setattr("esper.studies.arms.get_task", lambda _: SMALL)

    def points(**settings):
        arm = Arm(name="a", kind="placed", settings={"start": 2, **settings})
        return TRAINERS["placed"](arm, "digits", 0, [0.5, 1.0])

    slots = list(full_structure(SMALL))
    fixed = points(slot=1)
    assert [list(point.structure) for point in fixed] == [[slots[1]]] * 2
    monkeypatch.setattr(
        "esper.studies.arms.audition", lambda _, seeds, __: ({s: s[0] == slots[2] for s in seeds}, 10_000)
    )
    tried = points(trial=2)
    assert [list(point.structure) for point in tried] == [[slots[2]]] * 2
    for point in (*fixed, *tried):
        assert point.train_macs <= point.budget * full_training_macs(SMALL)


def test_epoch_limit_ends_a_cheap_host():
    points = session(max_epochs=6).run(Wait(), [0.5, 1.0])
    assert all(point.epochs <= 8 for point in points)


def test_random_structures_respect_the_limit():
    space = Space(SMALL, LIMIT)
    rng = np.random.default_rng(0)
    drawn = [space.draw(rng) for _ in range(20)]
    assert all(space.macs(structure) <= space.limit for structure in drawn)
    assert len({tuple(structure.items()) for structure in drawn}) > 5


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("random_search", {"limit": LIMIT}),
        ("halving", {"limit": LIMIT}),
        ("audition", {"limit": LIMIT, "start": 1, "trial": 0.05, "keep": 0.5}),
    ],
)
def test_searches_stay_within_limit_and_budget(kind, settings, monkeypatch):
    longer = replace(SMALL, epochs=24)
    monkeypatch.setattr("esper.studies.arms.get_task", lambda _: longer)
    points = TRAINERS[kind](Arm(name="a", kind=kind, settings=settings), "digits", 0, [1.0, 2.0])
    space = Space(longer, LIMIT)
    for point in points:
        assert point.macs_per_sample <= space.limit
        assert point.train_macs <= point.budget * space.unit


def test_audition_counts_the_compute_of_its_copies(monkeypatch):
    monkeypatch.setattr("esper.studies.arms.get_task", lambda _: SMALL)
    space = Space(SMALL, LIMIT)
    trunk = session()
    seeds = [(slot, name) for slot, names in space.choices.items() for name in names]
    gains, spent = audition(trunk, seeds, epochs=2)
    alone = [session(structure={slot: name}).epoch_macs for slot, name in gains]
    assert list(gains) == seeds
    assert spent == 2 * (trunk.epoch_macs + sum(alone))
    assert trunk.spent == 0
    settings = {"limit": LIMIT, "start": 1, "trial": 0.2, "keep": 0.5}
    arm = Arm(name="a", kind="audition", settings=settings)
    (point,) = TRAINERS["audition"](arm, "digits", 0, [4.0])
    assert point.train_macs > 4 * spent  # eight epochs per copy, and the training after them


def test_audition_of_a_study_and_the_public_one_measure_the_same_gains():
    trunk = session()
    trunk.advance(Wait(), 2 * trunk.epoch_macs)
    x = trunk.data.val.x[:32]

    def train(copy: esper.Body) -> float:
        """Train the study's copy with the seed of the given one: they differ in the seed's random weights only."""
        trained = trunk.copy({slot.name: slot.blueprint for slot in copy.slots.values() if slot.seed is not None})
        body = trained.engine.networks[0].body
        for ours, theirs in zip(body.slots.values(), copy.slots.values(), strict=True):
            assert (ours.stage, ours.amplitude, ours.operator) == (theirs.stage, theirs.amplitude, theirs.operator)
        assert [p.shape for p in body.parameters()] == [p.shape for p in copy.parameters()]
        assert torch.equal(body.eval()(x), copy.eval()(x))
        trained.advance(Wait(), trunk.spent + 2 * trained.epoch_macs)
        return trained.quality

    public = esper.audition(trunk.engine.networks[0].body, train)
    gains, _ = audition(trunk, [(trial.slot, trial.blueprint) for trial in public.trials], epochs=2)
    assert gains == {(trial.slot, trial.blueprint): trial.gain for trial in public.trials}


GAINS = {("r0c0", "mlp"): 0.4, ("r0c1", "mlp"): 0.3, ("r0c2", "lora"): 0.2, ("r0c1", "lora"): 0.1}


def test_audition_of_a_study_plants_the_plan_of_the_public_one(monkeypatch):
    monkeypatch.setattr("esper.studies.arms.get_task", lambda _: SMALL)
    monkeypatch.setattr("esper.studies.arms.audition", lambda *_: (GAINS, 10_000))
    space = Space(SMALL, 0.55)
    macs = {seed: space.macs(dict([seed])) - space.host_macs for seed in GAINS}
    public = Audition(tuple(Trial(*seed, gain, params=0, macs=macs[seed]) for seed, gain in GAINS.items()), bare=0.5)
    arm = Arm(name="a", kind="audition", settings={"limit": 0.55, "start": 1, "trial": 0.1, "keep": 0.6})
    points = TRAINERS["audition"](arm, "digits", 0, [1.0, 4.0])  # the shares kept are 0.6 and 0.6 / √4
    plans = [public.plan(limit=space.limit - space.host_macs, keep=keep) for keep in (0.6, 0.3)]
    assert [point.structure for point in points] == plans
    assert plans == [{"r0c0": "mlp"}, {"r0c0": "mlp", "r0c2": "lora"}]  # two mlp are too large


GROWING = [
    Arm(name="grown", kind="placed", settings={"start": 2, "trial": 1}),
    Arm(name="grown", kind="audition", settings={"limit": LIMIT, "start": 1, "trial": 0.1, "keep": 0.6}),
]


@pytest.mark.parametrize("grown", GROWING, ids=lambda arm: arm.kind)
def test_chosen_structure_is_trained_from_step_0_for_equal_steps_or_equal_compute(grown, monkeypatch):
    monkeypatch.setattr("esper.studies.arms.get_task", lambda _: SMALL)
    if grown.kind == "audition":
        monkeypatch.setattr("esper.studies.arms.audition", lambda *_: (GAINS, 10_000))
    budgets = [1.0, 2.0]

    def chosen(**settings):
        arm = Arm(name="chosen", kind="chosen", settings={"choice": grown.kind, **grown.settings, **settings})
        return TRAINERS["chosen"](arm, "digits", 0, budgets)

    planted = TRAINERS[grown.kind](grown, "digits", 0, budgets)
    same, steps, host = chosen(equal="compute"), chosen(equal="steps"), chosen(equal="steps", structure="none")
    for ours, compute, equal, bare in zip(planted, same, steps, host, strict=True):
        assert ours.structure == compute.structure == equal.structure != {}
        assert bare.structure == {}
        assert ours.epochs == equal.epochs == bare.epochs
        assert [point.budget for point in (compute, equal, bare)] == [ours.budget] * 3
        epoch_macs = equal.train_macs // equal.epochs
        unit = full_training_macs(SMALL) if grown.kind == "placed" else Space(SMALL, LIMIT).unit
        assert compute.train_macs == int(ours.budget * unit) // epoch_macs * epoch_macs
        assert bare.train_macs < ours.train_macs


@pytest.mark.parametrize("host", ["wider", "deeper"])
def test_larger_host_is_the_largest_within_the_limit(host):
    space = Space(get_task("rescue"), LIMIT)
    task = largest_within(space, host)
    params = task.host_params + 1
    next_larger = task.widened(params) if host == "wider" else task.deepened(params)
    assert host_macs(space.task) < host_macs(task) <= space.limit < host_macs(next_larger)
    assert largest_within(space, "own") is space.task


def test_small_host_trains_for_the_whole_budget(monkeypatch):
    monkeypatch.setattr("esper.studies.arms.get_task", lambda _: SMALL)
    arm = Arm(name="small", kind="static", settings={"structure": "none"})
    (point,) = trainer_of(arm)(arm, "digits", 0, [8.0])
    unit = full_training_macs(SMALL)
    assert point.epochs == int(8 * unit / session().epoch_macs) > 8 * SMALL.epochs
    assert 0.98 * 8 * unit < point.train_macs <= 8 * unit


@pytest.mark.parametrize("structure", ["full", "none"])
def test_arm_with_epochs_trains_for_these_at_each_budget_and_decays_at_its_end(structure, monkeypatch):
    monkeypatch.setattr("esper.studies.arms.get_task", lambda _: SMALL)
    arm = Arm(name="steps", kind="static", settings={"structure": structure, "epochs": (3, 7)})
    points = trainer_of(arm)(arm, "digits", 0, [0.2, 0.5])
    trunk = session(structure=structure_named(SMALL, structure))
    assert [(p.budget, p.epochs, p.train_macs) for p in points] == [
        (0.2, 3, 3 * trunk.epoch_macs),
        (0.5, 7, 7 * trunk.epoch_macs),
    ]
    (alone,) = trunk.run(Wait(), [(7 * trunk.epoch_macs + 1) / trunk.unit])
    assert (alone.test_quality, alone.test_loss) == (points[1].test_quality, points[1].test_loss)


def epochs_in_all(arm):
    """Return the epochs that an arm of fixed epochs has at each budget, those before the study included."""
    return tuple(arm.settings.get("pretrain", 0) + epochs for epochs in arm.settings["epochs"])


@pytest.mark.parametrize(
    "study", [study for study in STUDIES.values() if any("epochs" in arm.settings for arm in study.arms)]
)
def test_arms_of_equal_steps_have_the_epochs_of_the_grown_arm_in_saved_results(study):
    """Pairs at equal steps are points with the same number of epochs: other epochs in the table would leave none."""
    records = read_saved(ROOT / "studies" / f"{study.name}.json").records
    claims = [claim for claim in study.claims if "epochs" in study.arm(claim.against).settings]
    assert claims
    for claim in claims:
        epochs = {tuple(point.epochs for point in record.points) for record in records if record.arm == claim.arm}
        assert epochs == {epochs_in_all(study.arm(claim.against))}


def test_host_within_the_limit_trains_for_the_whole_budget_of_a_search(monkeypatch):
    monkeypatch.setattr("esper.studies.arms.get_task", lambda name: SMALL)
    arm = Arm(name="wider", kind="static", settings={"limit": LIMIT, "host": "wider"})
    unit = Space(SMALL, LIMIT).unit
    for point in trainer_of(arm)(arm, "digits", 0, [1.0, 2.0]):
        assert 0.8 * point.budget * unit < point.train_macs <= point.budget * unit


def test_copy_of_a_session_is_independent_and_changes_no_output():
    trunk = session(structure={"r0c0": "mlp"})
    trunk.advance(Wait(), 3 * trunk.epoch_macs)
    before = {name: value.clone() for name, value in trunk.engine.networks[0].body.state_dict().items()}
    same, grown = trunk.copy(), trunk.copy({"r0c1": "mlp"})
    x = trunk.data.val.x[:32]
    outputs = [s.engine.networks[0].body.eval()(x) for s in (trunk, same, grown)]
    assert torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])
    assert grown.epoch_macs > trunk.epoch_macs
    for other in (same, grown):
        other.advance(Wait(), other.spent + 2 * other.epoch_macs)
    assert trunk.epochs == 3
    assert all(torch.equal(value, before[name]) for name, value in trunk.engine.networks[0].body.state_dict().items())
    trunk.advance(Wait(), trunk.spent + 2 * trunk.epoch_macs)  # trains as its copy did
    for name, value in trunk.engine.networks[0].body.state_dict().items():
        assert torch.equal(value, same.engine.networks[0].body.state_dict()[name]), name


def test_every_arm_of_the_table_has_a_trainer():
    for study in STUDIES.values():
        for arm in study.arms:
            trainer_of(arm)


def test_structure_names():
    assert structure_named(SMALL, "none") == {}
    assert structure_named(SMALL, "full") == full_structure(SMALL)
    assert set(structure_named(SMALL, "lora").values()) == {"lora"}
