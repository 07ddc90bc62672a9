"""Try seeds on copies of a model: the model does not change, trials are paired, and the plan respects its limits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import esper
from esper.grower.audition import Audition, Trial
from esper.leyline.errors import ConfigError, UnknownNameError
from esper.leyline.planning import planned

DATA = esper.load_data("digits")


def make_body():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                          nn.Flatten(), nn.Linear(8, 10))  # fmt: skip
    return esper.graft(model, at=["1", "3"], probe=DATA.train.x[:4])


def train(body, epochs=10):
    """Train on random batches of torch's own generator and return the accuracy on validation data."""
    optimizer = torch.optim.AdamW(body.parameters(), lr=2e-2)
    for _ in range(epochs):
        for batch in torch.randperm(len(DATA.train.x)).split(128):
            optimizer.zero_grad()
            x, y = DATA.train.take(batch)
            nn.functional.cross_entropy(body(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        return (body.eval()(DATA.val.x).argmax(1) == DATA.val.y).float().mean().item()


def test_convolutions_gain_most_where_the_host_sees_single_pixels():
    body = make_body()
    before = {name: value.clone() for name, value in body.state_dict().items()}
    torch.manual_seed(0)
    audition = esper.audition(body, train, blueprints=["conv_light", "norm"])
    best = audition.trials[0]
    assert {(t.slot, t.blueprint) for t in audition.trials} == {(s, b) for s in "13" for b in ("conv_light", "norm")}
    assert best.blueprint == "conv_light"
    assert best.gain > 0.1
    assert [t.gain for t in audition.trials] == sorted((t.gain for t in audition.trials), reverse=True)
    assert best.macs == body.costs()[best.slot]["conv_light"].macs
    assert set(audition.plan().values()) == {"conv_light"}
    after = body.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    lines = str(audition).splitlines()
    assert lines[1].startswith(f"{best.slot}     conv_light")
    assert lines[5] == f"gain: quality of a copy trained with the seed minus {audition.bare:.4f}, that without it"
    assert max(map(len, lines)) <= 80


def test_grower_plants_a_plan_and_nothing_else():
    body = make_body()
    trials = (Trial("1", "conv_light", 0.2, 9, 9), Trial("3", "norm", 0.2, 9, 9), Trial("1", "norm", 0.1, 9, 9))
    plan = Audition(trials, 0.1).plan()
    grower = esper.Grower(body, torch.optim.AdamW(body.parameters(), lr=1e-2), controller=plan)
    batches = [(torch.randn(64, 1, 8, 8), torch.arange(64) % 3)]
    for _ in range(6):
        grower.step(batches)
    assert {name: slot.blueprint for name, slot in grower.slots.items()} == plan == {"1": "conv_light", "3": "norm"}


@pytest.mark.parametrize(
    ("plan", "message"),
    [({"nowhere": "norm"}, "no slot named 'nowhere'"), ({"1": "mlp"}, "no blueprint for slot '1' named")],
)
def test_plan_that_does_not_fit_is_refused_before_the_optimiser_changes(plan, message):
    body = make_body()
    optimizer = torch.optim.AdamW(body.parameters(), lr=1e-2)
    with pytest.raises(UnknownNameError, match=message):
        esper.Grower(body, optimizer, controller=plan)
    assert len(optimizer.param_groups) == 1


def test_trials_are_paired_and_the_random_state_is_kept():
    draws = []

    def draw(_body):
        draws.append(torch.rand(()).item())
        return 0.5

    body = make_body()
    state = torch.get_rng_state()
    audition = esper.audition(body, draw)
    assert len(draws) == 1 + len(audition.trials) > 3
    assert len(set(draws)) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert audition.plan() == {}


def test_a_slot_that_holds_a_seed_is_not_tried():
    body = make_body()
    esper.Grower(body, torch.optim.AdamW(body.parameters(), lr=1e-2), controller="none").germinate("1", "norm")
    audition = esper.audition(body, lambda copy: float(len(list(copy.parameters()))), blueprints=["norm", "conv_light"])
    assert {trial.slot for trial in audition.trials} == {"3"}


def test_seeds_are_planned_by_gain_within_the_limit():
    gains = {("a", "small"): 0.3, ("b", "large"): 0.5, ("b", "small"): 0.4, ("c", "small"): 0.1, ("c", "large"): -0.1}
    costs = {"small": 1, "large": 10}

    def plan(limit, keep):
        return planned(gains, lambda seeds: sum(costs[name] for name in seeds.values()) <= limit, keep)

    assert plan(12, 0.0) == {"b": "large", "a": "small", "c": "small"}
    assert plan(12, 0.5) == {"b": "large", "a": "small"}
    assert plan(11, 0.0) == {"b": "large", "a": "small"}
    assert plan(9, 0.0) == {"b": "small", "a": "small", "c": "small"}
    assert plan(0, 0.0) == {}
    assert planned({seed: -gain for seed, gain in gains.items()}, lambda _: True) == {"c": "large"}
    assert planned({}, lambda _: True) == {}


@pytest.mark.parametrize("keep", [-0.1, 1.1])
def test_a_share_outside_0_to_1_is_refused(keep):
    with pytest.raises(ConfigError, match="from 0 to 1"):
        Audition((), 0.0).plan(keep=keep)


def test_a_blueprint_that_fits_nowhere_is_refused():
    with pytest.raises(ConfigError, match=r"fits no empty slot of this model\. Fitting ones: .*conv_light"):
        esper.audition(make_body(), train, blueprints=["lora"])


def test_a_quality_that_is_not_finite_is_refused():
    with pytest.raises(ConfigError, match="returned nan for the copy without a seed"):
        esper.audition(make_body(), lambda _: float("nan"))
