"""Loops in which seeds cannot learn cause a warning with the way out; other loops do not."""

import warnings

import pytest
import torch
from torch import nn

import esper
from tests.support.grower import EASY, batch, make_body


def train(body, optimizer, steps=3):
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(body(x), y).backward()
        optimizer.step()


def planted(*, rules=None):
    """Return a grower with a seed in "first"; with the rules EASY it is TRAINING."""
    body = make_body()
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    grower = esper.Grower(body, optimizer, rules=rules, controller="none", gradient_telemetry_stride=2)
    grower.germinate("first", "conv_light")
    if rules is EASY:
        grower.advance("first")
    return grower


def warnings_of(grower, optimizer=None, growth_steps=3):
    """Return the warnings of training and growth steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(growth_steps):
            train(grower.body, optimizer or grower.optimizer)
            grower.step([batch(9)])
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("rules", [None, EASY], ids=["open", "isolated"])
def test_usual_loop_does_not_warn(rules):
    assert warnings_of(planted(rules=rules)) == []


def test_growth_steps_without_training_do_not_warn():
    grower = planted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            grower.step([batch(9)])


def test_isolated_seed_of_a_model_in_eval_mode_warns_once():
    grower = planted(rules=EASY)
    grower.body.eval()
    (message,) = warnings_of(grower)
    assert "the seed in 'first' gets no gradient" in message
    assert "Call body.train()" in message


def test_training_with_another_optimiser_warns_once():
    grower = planted()
    other = torch.optim.SGD(grower.body.model.parameters(), lr=0.1)
    (message,) = warnings_of(grower, other)
    assert "Train with the optimiser that the grower was given" in message


def frozen(controller):
    """Return a grower of a frozen model, whose optimiser holds trainable parameters only, as Trainer's does."""
    body = make_body()
    body.model.requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": [p for p in body.parameters() if p.requires_grad]}], lr=1e-2)
    return esper.Grower(body, optimizer, controller=controller)


def test_seed_of_a_frozen_host_is_trained_if_it_is_planted_first():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grower = frozen("none")
        grower.germinate("first", "conv_light")
        before = {name: p.clone() for name, p in grower.body.model.named_parameters()}
        train(grower.body, grower.optimizer)
        grower.step([batch(9)])
    assert grower.body.slots["first"].seed[-1].weight.abs().sum() > 0
    assert all(torch.equal(p, before[name]) for name, p in grower.body.model.named_parameters())


def test_frozen_host_without_a_seed_warns_before_the_first_backward_pass():
    with pytest.warns(UserWarning, match="Plant a seed before it: grower.germinate"):
        frozen("schedule")
