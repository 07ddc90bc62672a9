"""Worth from coalitions: on hand-made tables, on a grown residual net, and in the training loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import esper
from esper.kasmina.blueprints import blueprint_index
from esper.kasmina.body import Body
from esper.leyline.actions import Operator
from esper.leyline.lifecycle import Effect, EffectKind
from esper.leyline.stages import SeedStage
from esper.simic.attribution import CounterfactualEngine, CounterfactualHelper, Worth, report
from esper.simic.attribution.counterfactual import exact_weights
from esper.tamiyo.controllers import wait_everywhere
from esper.tolaria.coalitions import Coalitions, Config, evaluate, step_configs
from esper.tolaria.engine import Engine
from esper.tolaria.tasks import Task
from tests.support.models import ZOO, grow, main_output

NAN = float("nan")


def coalitions(configs: Sequence[Config], players: int, scores: Any) -> Coalitions:
    names = tuple(f"slot{i}" for i in range(len(configs[0])))
    return Coalitions(names, players, list(configs), torch.as_tensor(scores))


def full_table(n: int) -> list[Config]:
    """Return every coalition, by bitmask."""
    return [tuple(bool(m >> i & 1) for i in range(n)) for m in range(2**n)]


def paired(a: Any, b: Any) -> tuple[float, float]:
    """Return a mean and its standard error, computed sample by sample (the slow reference)."""
    d = [float(x) - float(y) for x, y in zip(a, b, strict=True)]
    mean = sum(d) / len(d)
    return mean, (sum((x - mean) ** 2 for x in d) / (len(d) - 1) / len(d)) ** 0.5


def fields_of(worth: Worth) -> dict[str, Any]:
    return {name: getattr(worth, name) for name in Worth.__slots__}


# -- which coalitions


@pytest.mark.parametrize("n", range(7))
def test_few_players_get_the_complete_table(n: int):
    configs = CounterfactualEngine.coalitions(n)
    assert len(configs) == 2**n
    assert set(configs) == set(product((False, True), repeat=n))


def test_more_players_get_a_budget_and_prospects_are_off():
    configs = CounterfactualEngine.coalitions(12, 3)
    assert len(configs) == len(set(configs)) == 200
    assert not any(any(c[12:]) for c in configs)
    assert {len(c) for c in configs} == {15}
    assert configs != CounterfactualEngine.coalitions(12, 3, rng_seed=1)
    assert len(CounterfactualEngine.coalitions(7)) == 128


@pytest.mark.parametrize(
    ("n", "budget", "count"), [(8, 0, 18), (8, 3, 18), (8, 100, 100), (8, 1000, 256), (3, 2, 8), (5, 20, 20)]
)
def test_budget_includes_every_player_alone_and_left_out(n: int, budget: int, count: int):
    configs = CounterfactualEngine.coalitions(n, budget=budget)
    assert len(configs) == count
    for i in range(n):
        assert tuple(j == i for j in range(n)) in configs
        assert tuple(j != i for j in range(n)) in configs


# -- from scores to worth


def test_two_players_match_values_computed_by_hand():
    # none          first         second        both
    scores = [[0, 0, 1, 0], [1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1]]
    worth = CounterfactualEngine.worth(coalitions(full_table(2), 2, np.array(scores, dtype=np.float32)))
    assert worth.slots == ("slot0", "slot1")
    assert worth.fossils == (False, False)
    assert (worth.quality, worth.committed, worth.evaluations) == (1.0, 0.25, 4)
    assert worth.quality_se == 0.0
    assert worth.contribution.tolist() == [0.5, 0.5]
    assert worth.solo.tolist() == [0.25, 0.25]
    assert worth.interaction[0, 1] == worth.interaction[1, 0] == 0.25  # an interaction exists for two players too
    assert worth.shapley.tolist() == [0.375, 0.375]
    assert worth.shapley_design_se.tolist() == [0.0, 0.0]
    np.testing.assert_allclose(worth.contribution_se, (1 / 3) ** 0.5 / 2)
    np.testing.assert_allclose(worth.solo_se, 0.25)
    np.testing.assert_allclose(worth.interaction_se[0, 1], 0.25)
    assert worth.prospect == {}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_every_number_equals_the_slow_reference(n: int):
    configs = [(*c, False) for c in full_table(n)]
    configs.append((*(True,) * n, True))
    rng = np.random.default_rng(n)
    order = rng.permutation(len(configs))
    scores = rng.normal(size=(len(configs), 50)) + rng.normal(size=50)  # samples differ in difficulty
    at = dict(zip(configs, scores, strict=True))
    worth = CounterfactualEngine.worth(coalitions([configs[k] for k in order], n, scores[order]))

    def on(*who: int) -> Config:
        return (*(i in who for i in range(n)), False)

    everyone = on(*range(n))
    for i in range(n):
        without = on(*(j for j in range(n) if j != i))
        assert (worth.contribution[i], worth.contribution_se[i]) == pytest.approx(paired(at[everyone], at[without]))
        assert (worth.solo[i], worth.solo_se[i]) == pytest.approx(paired(at[on(i)], at[on()]))
        for j in range(n):
            if i != j:
                both = paired(at[on(i, j)] - at[on(i)], at[on(j)] - at[on()])
                assert (worth.interaction[i, j], worth.interaction_se[i, j]) == pytest.approx(both)
        share = exact_weights(n)[i] @ scores[:-1]
        assert (worth.shapley[i], worth.shapley_se[i]) == pytest.approx(paired(share, np.zeros(50)))
    assert worth.shapley.sum() == pytest.approx(worth.quality - worth.committed)
    assert worth.prospect == {f"slot{n}": pytest.approx(paired(at[(*(True,) * n, True)], at[everyone]))}
    assert worth.quality == pytest.approx(at[everyone].mean())
    assert worth.committed == pytest.approx(at[on()].mean())


def test_first_of_several_scores_is_the_quality():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(4, 10, 2))
    a = CounterfactualEngine.worth(coalitions(full_table(2), 2, scores))
    b = CounterfactualEngine.worth(coalitions(full_table(2), 2, scores[..., 0]))
    np.testing.assert_equal(fields_of(a), fields_of(b))


def test_five_players_have_contributions_and_no_interactions():
    configs = step_configs(5, 1)
    scores = np.random.default_rng(0).normal(size=(len(configs), 20))
    worth = CounterfactualEngine.worth(coalitions(configs, 5, scores))
    assert np.isfinite(worth.contribution).all()
    assert np.isfinite(worth.contribution_se).all()
    assert np.isfinite(worth.committed)
    for unknown in (
        worth.solo,
        worth.solo_se,
        worth.shapley,
        worth.shapley_se,
        worth.interaction,
        worth.interaction_se,
    ):
        assert np.isnan(unknown).all()
    assert list(worth.prospect) == ["slot5"]


def test_unevaluated_coalitions_are_unknown():
    worth = CounterfactualEngine.worth(coalitions([(True, True, False), (True, False, False)], 2, np.ones((2, 5))))
    assert np.isnan(worth.contribution).tolist() == [True, False]
    assert np.isnan(worth.committed)
    assert np.isnan(worth.shapley).all()
    assert worth.prospect == {}


def test_one_sample_gives_no_error():
    worth = CounterfactualEngine.worth(coalitions(full_table(2), 2, np.arange(4.0)[:, None]))
    assert worth.contribution.tolist() == [1.0, 2.0]
    assert worth.shapley.tolist() == [1.0, 2.0]
    for se in (worth.contribution_se, worth.shapley_se, worth.solo_se, worth.interaction_se, worth.quality_se):
        assert np.isnan(se).all()


def test_body_without_players_has_quality_and_prospects():
    worth = CounterfactualEngine.worth(coalitions([(False,), (True,)], 0, np.array([[0.0, 1.0], [1.0, 1.0]])))
    assert (worth.slots, worth.quality, worth.committed) == ((), 0.5, 0.5)
    assert worth.prospect == {"slot0": (0.5, 0.5)}


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("n", [3, 7])
def test_diverged_network_has_no_numbers_and_raises_nothing(n: int, bad: float):
    configs = CounterfactualEngine.coalitions(n, budget=40)
    scores = np.random.default_rng(0).normal(size=(len(configs), 10))
    scores[1] = bad  # with all on
    with np.errstate(all="ignore"):
        worth = CounterfactualEngine.worth(coalitions(configs, n, scores))
    assert not np.isfinite(worth.quality)
    assert not np.isfinite(worth.shapley).any()
    assert np.isfinite(worth.solo).all()
    json.dumps(worth.to_dict(), allow_nan=False)
    str(worth)


def test_ten_players_within_a_budget_add_up():
    configs = CounterfactualEngine.coalitions(10, budget=80)
    member = np.array(configs, dtype=float)
    scores = (np.random.default_rng(0).random(300) < np.tanh(0.1 + 0.15 * member.sum(1))[:, None]).astype(float)
    worth = CounterfactualEngine.worth(coalitions(configs, 10, scores))
    assert worth.evaluations == 80
    assert worth.shapley.sum() == pytest.approx(worth.quality - worth.committed)
    assert (worth.shapley_se > 0).all()
    assert (worth.shapley_design_se > 0).all()
    assert np.isfinite(worth.contribution).all()
    assert np.isfinite(worth.solo).all()


# -- error estimates


def test_stated_95_percent_intervals_have_95_percent_coverage():
    """Simulate answers of three seeds' coalitions on the same samples, correlated as on real networks."""
    n, samples, repeats = 3, 200, 1500
    rng = np.random.default_rng(0)
    inside = np.array(full_table(n), dtype=float)
    effect = inside @ [0.25, 0.15, 0.0] - 0.15 * inside[:, 0] * inside[:, 1]  # [8]

    def population(count: int) -> np.ndarray:
        """Return [8, count] correct or not: ability against a difficulty shared by all coalitions, plus own noise."""
        hard = rng.normal(size=count)
        return (0.4 + effect[:, None] + 0.6 * rng.normal(size=(8, count)) > hard).astype(float)

    truth = CounterfactualEngine.worth(coalitions(full_table(n), n, population(400_000)))
    scores = population(samples * repeats).reshape(8, repeats, samples)
    covered: dict[str, list[Any]] = {"contribution": [], "solo": [], "shapley": [], "interaction": []}
    for r in range(repeats):
        worth = CounterfactualEngine.worth(coalitions(full_table(n), n, scores[:, r]))
        for what, hits in covered.items():
            miss = np.abs(getattr(worth, what) - getattr(truth, what))
            is_finite = np.isfinite(miss)
            hits.append((miss <= 1.96 * getattr(worth, what + "_se"))[is_finite])
    for what, hits in covered.items():
        share = np.mean(hits, axis=0)
        assert 0.93 <= share.min() <= share.max() <= 0.97, (what, share)


def test_unpaired_error_is_larger():
    rng = np.random.default_rng(0)
    hard = rng.normal(size=500)
    scores = np.stack([hard > 0, hard > -0.1]).astype(float)
    worth = CounterfactualEngine.worth(coalitions([(False,), (True,)], 1, scores))
    unpaired = np.sqrt(scores.var(1, ddof=1).sum() / 500)
    assert worth.contribution_se[0] < 0.5 * unpaired


# -- on a grown net


def hand_switched(body: Body, x: Tensor, on: set[str]) -> Tensor:
    """Run one plain pass with only these seeds on."""
    content = {name: (slot.stage, slot.amplitude) for name, slot in body.slots.items()}
    for name, slot in body.slots.items():
        if name not in on and slot.seed is not None:
            body.set_slot(slot, content[name][0], 0.0)
    try:
        with torch.no_grad():
            return main_output(body(x))
    finally:
        for name, slot in body.slots.items():
            body.set_slot(slot, *content[name])


def score(output: Any, target: Tensor) -> Tensor:
    """Return the log-probability of the target."""
    return main_output(output).log_softmax(1)[torch.arange(len(target)), target]


def residual_without_norms() -> tuple[Body, Tensor]:
    """Return a grown residual net whose norms keep their statistics whichever seeds are on."""
    body = ZOO["residual"].body()
    body.norms = []
    return body, ZOO["residual"].batch(24)


@pytest.mark.parametrize("stage", [SeedStage.HOLDING, SeedStage.FOSSILIZED])
def test_report_of_a_residual_net_equals_switching_by_hand(stage: SeedStage):
    body, x = residual_without_norms()
    first, second, third = body.slots
    grow(body, first, alpha=0.4, seed=1)
    grow(body, second, operator=Operator.GATE, alpha=1.0, stage=stage, seed=2)
    grow(body, third, alpha=0.7, seed=3)
    y = torch.arange(24) % 5

    worth = report(body, [(x[:10], y[:10]), (x[10:], y[10:])], score)

    value = {}
    for config in full_table(3):
        on = {name for name, is_on in zip(body.slots, config, strict=True) if is_on}
        value[config] = score(hand_switched(body, x, on), y).double().numpy()
    table = np.array(list(value.values()))  # [8, N]
    assert worth.slots == tuple(body.slots)
    assert worth.fossils == (False, stage == SeedStage.FOSSILIZED, False)
    assert worth.quality == pytest.approx(table[7].mean(), abs=1e-5)
    assert worth.committed == pytest.approx(table[0].mean(), abs=1e-5)
    np.testing.assert_allclose(worth.shapley, exact_weights(3) @ table.mean(1), atol=1e-5)
    for i in range(3):
        mean, se = paired(table[7], table[7 ^ 1 << i])
        assert (worth.contribution[i], worth.contribution_se[i]) == pytest.approx((mean, se), abs=1e-5)
        assert worth.solo[i] == pytest.approx((table[1 << i] - table[0]).mean(), abs=1e-5)
    pair = table[3] - table[1] - table[2] + table[0]
    assert worth.interaction[0, 1] == pytest.approx(pair.mean(), abs=1e-5)
    assert abs(worth.contribution).min() > 1e-4  # the seeds do have an effect


@pytest.mark.parametrize("name", ["residual", "cnn_host", "transformer_host"])
def test_fossil_is_switched_like_a_live_seed_norms_included(name: str):
    """Switching of live seeds is tested configuration by configuration in test_coalitions."""
    body, x = ZOO[name].body(), ZOO[name].batch(16)
    for i, slot in enumerate(body.slots):
        grow(body, slot, stage=SeedStage.HOLDING, alpha=1.0, seed=i)
    calibration = ZOO[name].batch(16)
    content = []
    for stage in (SeedStage.HOLDING, SeedStage.FOSSILIZED):
        for slot in body.slots.values():
            body.set_slot(slot, stage, 1.0)
        content.append(report(body, [(x, torch.zeros(16).long())], score, calibration=calibration))
    live, fossil = (fields_of(w) for w in content)
    assert live.pop("fossils") == (False,) * 3
    assert fossil.pop("fossils") == (True,) * 3
    np.testing.assert_equal(fossil, live)
    assert np.abs(content[0].contribution).min() > 1e-4


def test_on_keeps_a_seed_at_its_current_alpha():
    contributions = []
    for alpha in (0.3, 0.3, 1.0):
        body, x = residual_without_norms()
        grow(body, next(iter(body.slots)), alpha=alpha)
        worth = report(body, [(x, torch.arange(24) % 5)], score)
        with torch.no_grad():
            assert worth.quality == pytest.approx(score(body(x), torch.arange(24) % 5).mean().item(), abs=1e-5)
        contributions.append(worth.contribution[0])
    assert contributions[0] == contributions[1] != contributions[2]


def test_fossils_are_players_in_reports_only():
    body, x = residual_without_norms()
    first, second, third = body.slots
    grow(body, first, stage=SeedStage.FOSSILIZED, alpha=1.0)
    grow(body, second, stage=SeedStage.HOLDING, alpha=1.0, seed=2)
    grow(body, third, stage=SeedStage.TRAINING, alpha=0.0, seed=3)
    batches = [(x, torch.arange(24) % 5)]

    content = report(body, batches, score)
    steps = CounterfactualEngine.worth(evaluate(body, batches, score))

    assert content.slots == (first, second)
    assert content.fossils == (True, False)
    assert steps.slots == (second,)
    assert steps.fossils == (False,)
    assert list(content.prospect) == list(steps.prospect) == [third]
    assert content.prospect[third] == pytest.approx(steps.prospect[third], abs=1e-6)
    assert steps.committed == pytest.approx(steps.quality - steps.contribution[0])
    assert content.committed == pytest.approx(steps.committed - content.solo[0], abs=1e-5)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_eight_seeds_are_reported_within_their_budget():
    torch.manual_seed(0)
    body = esper.graft(Deep(), at=[f"layers.{i}" for i in range(8)], probe=torch.randn(4, 6))
    for i, name in enumerate(body.slots):
        grow(body, name, alpha=1.0, seed=i + 1, scale=0.3)
    batches = [(torch.randn(40, 6), torch.arange(40) % 3)]
    part, whole = (report(body, batches, score, budget=budget) for budget in (60, 256))
    assert (part.evaluations, whole.evaluations) == (60, 256)
    np.testing.assert_allclose(part.contribution, whole.contribution, atol=1e-5)
    assert part.shapley.sum() == pytest.approx(whole.shapley.sum(), abs=1e-5)
    assert np.abs(part.shapley - whole.shapley).mean() < 0.25 * np.abs(whole.shapley).mean()
    assert (whole.shapley_design_se == 0).all()


# -- in the loop


def make_engine(live: Sequence[int], worlds: int = 2) -> Engine:
    """Return an engine whose first environment holds blending seeds in these slots."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(160, 6, generator=noise)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    task = Task.from_tensors("quarters", x, y, host_kwargs={"width": 8, "layers": 5}, batch=16, batches_per_epoch=3,
                             lr=0.02, seed_lr=0.02)  # fmt: skip
    engine = Engine(task, range(worlds))
    plant(engine, live)
    return engine


def plant(engine: Engine, live: Sequence[int]) -> None:
    table = engine.table
    for s in live:
        table.stage[0, s], table.alpha[0, s], table.alpha_to[0, s] = SeedStage.BLENDING, 0.7, 0.7
        table.blueprint[0, s], table.operator[0, s], table.serial[0, s] = blueprint_index("mlp_small"), Operator.ADD, s
    engine.apply_effects([Effect(EffectKind.BUILD, 0, s) for s in live])
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for slot in engine.networks[0].body.slots.values():
            for p in slot.parameters():
                p.add_(torch.randn(p.shape, generator=noise), alpha=0.2)
    engine.networks[0].average.restart()


@pytest.mark.parametrize("live", [(0, 2), (0, 1, 3)])
def test_loop_call_writes_interactions_into_the_table(live: tuple[int, ...]):
    engine = make_engine(live)
    engine.step(wait_everywhere(2))
    before = engine.table.clone()
    worth, other = CounterfactualHelper().process_batch(engine)

    names = [engine.task.slots[s] for s in live]
    assert worth.slots == tuple(names)
    assert other.slots == ()
    result = engine.coalitions[0]
    accuracy = result.scores[..., 0].double().mean(1).tolist()
    value = {frozenset(n for n, on in zip(result.slots, c, strict=True) if on): v
             for c, v in zip(result.configs, accuracy, strict=True)}  # fmt: skip
    for s, i in zip(live, names, strict=True):
        pairs = (value[frozenset({i, j})] - value[frozenset({i})] - value[frozenset({j})] + value[frozenset()]
                 for j in names if j != i)  # fmt: skip
        assert engine.table.interaction[0, s] == pytest.approx(sum(pairs), abs=1e-6)
    assert set(engine.table.diff(before)) == {"interaction"}
    assert np.isfinite(engine.table.interaction).sum() == len(live)
    np.testing.assert_allclose(worth.contribution, engine.table.contribution[0, list(live)], atol=1e-6)
    np.testing.assert_allclose(worth.contribution_se, engine.table.contribution_se[0, list(live)], atol=1e-6)


def test_interactions_with_a_removed_seed_are_dropped():
    engine = make_engine((0, 2))
    engine.step(wait_everywhere(2))
    CounterfactualHelper().process_batch(engine)
    assert np.isfinite(engine.table.interaction[0, 0])
    engine.table.blank(np.arange(engine.table.num_slots)[None] == [[2], [2]])
    engine.apply_effects([Effect(EffectKind.DROP, 0, 2)])
    engine.step(wait_everywhere(2))
    (worth, _) = CounterfactualHelper().process_batch(engine)
    assert len(worth.slots) == 1
    assert np.isnan(engine.table.interaction).all()
