"""Test the heuristic controller (grow on a plateau, fossilise or prune by contribution) and the random one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import esper
from esper.leyline.actions import BLUEPRINTS, Head, Op
from esper.leyline.errors import EsperError
from esper.leyline.lifecycle import Rules, apply, is_legal, legal, record_contribution, record_epoch, tick
from esper.leyline.slot_table import HISTORY, SlotTable
from esper.leyline.stages import STRICT, SeedStage, Thresholds
from esper.tamiyo.controllers import Heuristic, HeuristicConfig, Random
from tests.support.random_tables import LIVELY, random_measurements, random_table
from tests.support.rules import ISOLATED

Stage = SeedStage
RULES = {
    "default": Rules(),
    "isolated": ISOLATED,
    "lively": LIVELY,
    "strict": Rules(thresholds=STRICT, max_seeds=2),
    "by hand": Rules(birth="isolated", auto_train=False, auto_blend=False, auto_hold=False, min_prune_age=0),
    "no gates": Rules(
        birth="isolated", thresholds=Thresholds(blend_dwell=0, blend_health=None, fossil_contribution=None)
    ),
}


def choose(controller: Any, table: SlotTable, rules: Rules | None = None) -> list[tuple[Op, int]]:
    """Return operation and slot per environment. Assert that they are legal and the table is unchanged."""
    rules, before = rules or Rules(), table.clone()
    actions = controller.act(table, legal(table, rules))
    assert is_legal(table, actions, rules).all()
    assert not table.diff(before)
    return [(Op(a[Head.OP]), int(a[Head.SLOT])) for a in actions]


def table_at_plateau(envs: int = 1, slots: int = 2, step: int = 10) -> SlotTable:
    """Return a table whose loss and quality have been constant for ten epochs."""
    table = SlotTable.empty(envs, slots)
    for _ in range(HISTORY):
        record_epoch(table, quality=np.full(envs, 0.5), val_loss=np.ones(envs), train_loss=np.ones(envs))
    table.step[:] = step
    return table


def hold(table: SlotTable, slot: int = 0, *, worth: float = 0.03, se: float = 0.01, birth: float = 0.5) -> SlotTable:
    """Put a seed at full alpha with one measurement into a slot. Return the table."""
    at = slice(None), slot
    table.stage[at], table.alpha[at], table.alpha_to[at], table.age[at] = Stage.HOLDING, 1, 1, 20
    table.blueprint[at], table.quality_birth[at], table.contribution_age[at] = 1, birth, 0
    table.contribution[at], table.contribution_se[at] = worth, se
    return table


def run_controller(
    table: SlotTable, rules: Rules, controller: Any, epochs: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return a controller's actions over epochs of random measurements. Assert that every action happens."""
    done = []
    for _ in range(epochs):
        actions = controller.act(table, legal(table, rules))
        assert apply(table, actions, rules).happened.all()
        tick(table, rules)
        random_measurements(table, rng)
        done.append(actions)
    return done


# -- legality


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(RULES)), st.integers(0, 1000), st.sampled_from([Heuristic, Random]))
def test_actions_are_legal_on_any_reachable_table(name: str, seed: int, kind: Any):
    table = random_table(24, 3, seed, epochs=40)
    table.enabled[::3, seed % 3] = False
    for _ in range(3):  # also with internal state
        choose(controller := kind(), table, RULES[name])
        choose(controller, table, RULES[name])


@pytest.mark.parametrize("kind", [Heuristic, Random])
@pytest.mark.parametrize("name", RULES)
def test_all_chosen_actions_happen(name: str, kind: Any):
    table, rng = SlotTable.empty(12, 3), np.random.default_rng(0)
    done = np.stack(run_controller(table, RULES[name], kind(), 80, rng))
    assert {int(Op.GERMINATE), int(Op.PRUNE)} <= set(done[..., Head.OP].ravel().tolist())


# -- when to germinate


def test_germinates_when_loss_settled_and_quality_stalled():
    assert choose(Heuristic(), table_at_plateau()) == [(Op.GERMINATE, 0)]


@pytest.mark.parametrize(("step", "op"), [(1, Op.WAIT), (4, Op.WAIT), (5, Op.GERMINATE)])
def test_does_not_germinate_before_the_first_allowed_epoch(step: int, op: Op):
    assert choose(Heuristic(), table_at_plateau(step=step))[0][0] == op


def test_does_not_germinate_while_quality_rises():
    table = table_at_plateau()
    for gain, op in ((0.004, Op.GERMINATE), (0.006, Op.WAIT)):
        table.quality_history[0, -1] = 0.5 + gain
        assert choose(Heuristic(), table)[0][0] == op
    table.quality_history[0, -1] = 0.3  # a drop is not progress
    assert choose(Heuristic(), table)[0][0] == Op.GERMINATE


def test_plateau_requires_enough_epochs():
    table = SlotTable.empty(1, 1)
    table.step[:] = 50
    for k in range(6):
        record_epoch(table, quality=np.array([0.5]), val_loss=np.array([np.nan]), train_loss=np.ones(1))
        assert choose(Heuristic(), table)[0][0] == (Op.GERMINATE if k >= 3 else Op.WAIT)


@pytest.mark.parametrize(
    ("losses", "settled"),
    [([1, 1, 1, 1], True), ([1, 0.96, 0.93, 0.9], True), ([1, 0.9, 0.9, 0.9], False), ([1, 1, 1.04, 1.04], False),
     ([0, 0, 0, 0], True), ([-1, -1.01, -1.02, -1.03], True), ([np.nan, 1, 1, 1], False)],
)  # fmt: skip
def test_does_not_germinate_before_the_loss_settles(losses: list[float], settled: bool):
    table = table_at_plateau()
    table.loss_history[0, -4:], table.val_loss[0] = losses, losses[-1]
    with np.errstate(all="raise"):
        assert (choose(Heuristic(), table)[0][0] == Op.GERMINATE) == settled


def test_settled_state_lasts_until_the_environment_resets():
    heuristic, table = Heuristic(), table_at_plateau()
    choose(heuristic, table)
    table.loss_history[0, -4:] = [1.0, 5.0, 1.0, 5.0]
    assert choose(heuristic, table)[0][0] == Op.GERMINATE
    table.step[:] = 0
    assert choose(heuristic, table)[0][0] == Op.WAIT
    table.step[:] = 10
    assert choose(heuristic, table)[0][0] == Op.WAIT  # the loss must settle again


def test_plateau_alone_decides_without_losses():
    table = table_at_plateau()
    table.val_loss[:], table.loss_history[:] = np.nan, np.nan
    assert choose(Heuristic(), table)[0][0] == Op.GERMINATE


def test_least_used_free_slot_is_next():
    heuristic, table = Heuristic(), table_at_plateau(slots=3)
    assert [choose(heuristic, table)[0][1] for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    table.stage[0, 1] = Stage.FOSSILIZED
    assert [choose(heuristic, table)[0][1] for _ in range(3)] == [2, 0, 2]


# -- blueprint choice


def planted(heuristic: Heuristic, table: SlotTable) -> str:
    actions = heuristic.act(table, legal(table, Rules()))
    assert actions[0, Head.OP] == Op.GERMINATE
    return BLUEPRINTS[actions[0, Head.BLUEPRINT]]


def test_blueprints_rotate_among_those_that_fit():
    heuristic, table = Heuristic(HeuristicConfig(blueprints=("norm", "conv_light", "mlp"))), table_at_plateau(slots=1)
    table.takes[0, BLUEPRINTS.index("conv_light")] = False
    assert [planted(heuristic, table) for _ in range(4)] == ["norm", "mlp", "norm", "mlp"]


def test_slot_without_configured_blueprints_gets_one_it_takes():
    heuristic, table = Heuristic(HeuristicConfig(blueprints=("norm",))), table_at_plateau(slots=1)
    table.takes[0] = False
    table.takes[0, BLUEPRINTS.index("flex_attention")] = True
    assert planted(heuristic, table) == "flex_attention"


def test_pruned_blueprint_is_penalised_with_decay():
    config = HeuristicConfig(blueprints=("conv_light", "norm"), penalty=14.0)
    heuristic, table = Heuristic(config), table_at_plateau(slots=2)
    hold(table, worth=-0.1)  # blueprint 1: conv_light
    assert choose(heuristic, table) == [(Op.PRUNE, 0)]
    table.blank(np.array([[True, False]]))
    assert [planted(heuristic, table) for _ in range(4)] == ["norm", "norm", "conv_light", "norm"]  # 7, 3.5, 1.8


def test_least_penalised_blueprint_is_used_if_all_are_penalised():
    heuristic, table = Heuristic(HeuristicConfig(blueprints=("conv_light", "norm"))), table_at_plateau()
    choose(heuristic, table)
    heuristic.penalties[0, [BLUEPRINTS.index("conv_light"), BLUEPRINTS.index("norm")]] = 12.0, 10.0
    assert planted(heuristic, table) == "norm"


def test_germinates_with_full_target_and_default_tempo():
    table = table_at_plateau()
    action = Heuristic().act(table, legal(table, Rules()))[0]
    assert action[[Head.STYLE, Head.TEMPO, Head.ALPHA_TARGET]].tolist() == [2, 1, 2]


# -- fossilise or prune


@pytest.mark.parametrize(
    ("worth", "se", "op"),
    [(0.03, 0.01, Op.FOSSILIZE), (0.002, 0.0, Op.FOSSILIZE), (0.02, 0.01, Op.WAIT), (0.5, 0.3, Op.WAIT),
     (0.0, 0.0, Op.PRUNE), (-0.03, 0.01, Op.PRUNE), (-0.01, 0.01, Op.WAIT), (0.004, 0.0001, Op.FOSSILIZE)],
)  # fmt: skip
@pytest.mark.parametrize("name", ["default", "no gates"])
def test_fossilises_only_if_contribution_exceeds_z_standard_errors(worth, se, op, name):
    table = hold(table_at_plateau(slots=1), worth=worth, se=se)
    assert choose(Heuristic(), table, RULES[name])[0][0] == op


@pytest.mark.parametrize("z", [0.0, 1.0, 2.5, 4.0])
@pytest.mark.parametrize("ratio", [0.5, 1.5, 3.0, 5.0])
def test_z_sets_the_required_confidence(z: float, ratio: float):
    table = hold(table_at_plateau(slots=1), worth=0.02 * ratio, se=0.02)
    committed = choose(Heuristic(HeuristicConfig(z=z)), table, RULES["no gates"])[0][0] == Op.FOSSILIZE
    assert committed == (ratio > z)


@pytest.mark.parametrize("name", ["default", "no gates"])
def test_waits_for_a_measurement_at_full_alpha(name: str):
    for worth, birth in ((0.5, 0.5), (-0.5, 0.5), (0.5, 0.9)):
        table = hold(table_at_plateau(slots=1), worth=worth, birth=birth)
        table.contribution_age[:] = -1  # measured only while blending
        table.dwell[:] = 30
        assert choose(Heuristic(), table, RULES[name])[0][0] == Op.WAIT


def test_prunes_if_quality_fell_since_germination():
    assert choose(Heuristic(), hold(table_at_plateau(slots=1), worth=0.2, birth=0.51)) == [(Op.FOSSILIZE, 0)]
    assert choose(Heuristic(), hold(table_at_plateau(slots=1), worth=0.2, birth=0.53)) == [(Op.PRUNE, 0)]


def test_undecided_seed_is_pruned_after_patience():
    table = hold(table_at_plateau(slots=1), worth=0.01, se=0.01)
    for dwell, op in ((5, Op.WAIT), (6, Op.PRUNE)):
        table.dwell[:] = dwell
        assert choose(Heuristic(), table)[0][0] == op


def test_prune_is_instant():
    table, rules = hold(table_at_plateau(slots=1), worth=-0.1), Rules()
    apply(table, Heuristic().act(table, legal(table, rules)), rules)
    assert table.stage[0, 0] == Stage.PRUNED


@pytest.mark.parametrize(("worth", "se", "op"), [(-0.03, 0.001, Op.PRUNE), (-0.03, 0.01, Op.WAIT), (-0.01, 0, Op.WAIT)])
def test_harmful_seed_at_rest_in_blending_is_pruned(worth: float, se: float, op: Op):
    table = hold(table_at_plateau(slots=1), worth=worth, se=se)
    table.stage[:], table.alpha[:], table.alpha_to[:] = Stage.BLENDING, 0.5, 0.5
    assert choose(Heuristic(), table)[0][0] == op


def test_seed_stuck_in_training_is_pruned_after_patience():
    table = hold(table_at_plateau(slots=1), worth=np.nan, se=np.nan, birth=0.9)
    table.stage[:], table.alpha[:], table.contribution_age[:], table.grad_health[:] = Stage.TRAINING, 0, -1, 0.0
    for dwell, op in ((20, Op.WAIT), (21, Op.PRUNE)):
        table.dwell[:] = dwell
        assert choose(Heuristic(), table)[0][0] == op


@pytest.mark.parametrize("auto", [True, False])
def test_seed_passes_all_stages_to_fossilised(auto: bool):
    thresholds = Thresholds(blend_dwell=3)
    rules = Rules(birth="isolated", auto_train=auto, auto_blend=auto, auto_hold=auto, thresholds=thresholds)
    heuristic, table, ops, stages = Heuristic(), table_at_plateau(slots=1), [], []
    for _ in range(25):
        (op, _), *_ = choose(heuristic, table, rules)
        ops.append(op.name)
        apply(table, heuristic.act(table, legal(table, rules)), rules)
        tick(table, rules)
        record_epoch(table, quality=np.array([0.5]), val_loss=np.ones(1), train_loss=np.ones(1))
        table.grad_health[:] = 1.0
        is_active = (table.stage == Stage.BLENDING) | (table.stage == Stage.HOLDING)
        record_contribution(table, np.where(is_active, 0.05, np.nan), np.where(is_active, 0.01, np.nan))
        stages.append(int(table.stage[0, 0]))
    advances = [] if auto else ["ADVANCE"] * 3
    assert [op for op in ops if op != "WAIT"] == ["GERMINATE", *advances, "FOSSILIZE"]
    assert stages == sorted(stages)
    assert stages[-1] == Stage.FOSSILIZED


def test_fossilise_precedes_prune_and_prune_precedes_germinate():
    table = hold(hold(table_at_plateau(slots=3), 0, worth=-0.1), 1, worth=0.1)
    assert choose(Heuristic(), table) == [(Op.FOSSILIZE, 1)]
    table.stage[0, 1] = Stage.FOSSILIZED
    assert choose(Heuristic(), table) == [(Op.PRUNE, 0)]


# -- environments, shapes, invalid settings


def test_environments_are_independent():
    rules, epochs = RULES["lively"], 150
    table, heuristic = random_table(3, 3, 5, epochs=8), Heuristic()
    alone = [Heuristic() for _ in range(3)]
    rng, ops = np.random.default_rng(1), set()
    for t in range(epochs):
        if t == 30:
            table.reset([1])
        together = heuristic.act(table, legal(table, rules))
        for e in range(3):
            one = table.rows([e])
            assert alone[e].act(one, legal(one, rules)).tolist() == [together[e].tolist()]
        ops |= set(together[:, Head.OP].tolist())
        apply(table, together, rules)
        tick(table, rules)
        random_measurements(table, rng)
    assert {Op.GERMINATE, Op.PRUNE, Op.FOSSILIZE, Op.ADVANCE} <= ops


def test_controller_accepts_tables_of_other_shapes():
    heuristic = Heuristic()
    for envs, slots in ((1, 2), (1, 4), (3, 4), (3, 2)):
        table = table_at_plateau(envs, slots)
        assert choose(heuristic, table) == [(Op.GERMINATE, 0)] * envs


def test_penalties_grow_with_new_blueprints():
    heuristic = Heuristic()
    choose(heuristic, table_at_plateau(slots=1))
    takes = np.ones((1, len(BLUEPRINTS) + 2), dtype=bool)
    table = SlotTable.empty(1, 1, takes=takes)
    hold(table, worth=-0.1)
    table.quality[:], table.step[:], table.blueprint[:] = 0.5, 9, len(BLUEPRINTS) + 1
    assert choose(heuristic, table) == [(Op.PRUNE, 0)]


@pytest.mark.parametrize(
    ("nonsense", "message"),
    [
        ({"plateau_epochs": 0}, "plateau_epochs must lie in 1…"),
        ({"plateau_epochs": HISTORY}, "plateau_epochs must lie in 1…"),
        ({"settled_epochs": HISTORY}, "settled_epochs must lie in 1…"),
        ({"plateau_gain": -0.1}, "plateau_gain must be ≥ 0 and finite, got -0.1"),
        ({"first_epoch": -1}, "first_epoch must be ≥ 0 and finite, got -1"),
        ({"loss_of_quality": float("nan")}, "loss_of_quality must be ≥ 0 and finite, got nan"),
        ({"training_patience": -1}, "training_patience must be ≥ 0"),
        ({"holding_patience": -1}, "holding_patience must be ≥ 0"),
        ({"z": -1.0}, "z must be ≥ 0"),
        ({"penalty": float("inf")}, "penalty must be ≥ 0 and finite, got inf"),
        ({"least_contribution": float("-inf")}, "least_contribution must be a finite number, got -inf"),
        ({"settled_band": (0.03, -0.05)}, "settled_band must be a lower and a higher bound"),
        ({"blueprints": ("conv_lite",)}, "no blueprint named 'conv_lite'"),
    ],
)
def test_invalid_config_is_rejected(nonsense: dict[str, Any], message: str):
    with pytest.raises(EsperError, match=message):
        HeuristicConfig(**nonsense)


def test_heuristic_grows_a_body_in_a_user_training_loop():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2)
    )
    body = esper.graft(model, at=["0", "1"], probe=torch.randn(3, 4))
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    grower = esper.Grower(body, optimizer, controller="heuristic", rules=esper.Rules(min_prune_age=2))
    x = torch.randn(96, 4)
    y = (x[:, 0] * x[:, 1] > 0).long()
    done = []
    for _ in range(45):
        for i in range(0, 64, 16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(body(x[i : i + 16]), y[i : i + 16]).backward()
            optimizer.step()
        done.append(grower.step([(x[64:], y[64:])]).op)
    assert done.index(Op.GERMINATE) >= 5
    assert {Op.FOSSILIZE, Op.PRUNE} & set(done)  # seeds are fossilised or pruned


# -- random controller


def test_random_controller_is_reproducible():
    def actions_of(seed: int) -> list[list[int]]:
        done = run_controller(SlotTable.empty(4, 3), LIVELY, Random(seed), 30, np.random.default_rng(0))
        return np.concatenate(done).tolist()

    assert actions_of(1) == actions_of(1)
    assert actions_of(1) != actions_of(2)


def test_random_controller_covers_all_legal_operations_and_slots():
    table = hold(table_at_plateau(envs=2000, slots=3), worth=0.5)
    choices = {tuple(x) for x in Random().act(table, legal(table, Rules()))[:, [Head.OP, Head.SLOT]].tolist()}
    waits = {(Op.WAIT, s) for s in range(3)}
    assert choices == waits | {(Op.GERMINATE, 1), (Op.GERMINATE, 2)} | {
        (op, 0) for op in (Op.SET_ALPHA_TARGET, Op.PRUNE, Op.FOSSILIZE)
    }
    ops = Random().act(table, legal(table, Rules()))[:, Head.OP]
    assert np.bincount(ops, minlength=6)[[0, 1, 2, 3, 4]].min() > 300  # uniform: 400 each
