"""Clipping host and seeds by their joint norm is detected while a seed is isolated; other ways to clip are not."""

import warnings

import pytest
import torch
from torch import nn

import esper
from tests.support.grower import EASY, batch, make_body


def run(clip, *, rules=EASY, incubation="straight_through", steps=8, scale=1.0):
    """Train with a seed in "first" and return the messages of warnings about clipping."""
    body = make_body()
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    grower = esper.Grower(
        body, optimizer, rules=rules, incubation=incubation, gradient_telemetry_stride=2, controller="none"
    )
    grower.germinate("first", "conv_light")
    if rules is EASY:
        grower.advance("first")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            x, y = batch(step)
            optimizer.zero_grad()
            (scale * nn.functional.cross_entropy(body(x), y)).backward()
            if incubation == "shadow":
                grower.shadow(lambda x=x, y=y: scale * nn.functional.cross_entropy(body(x), y))
            clip(grower)
            optimizer.step()
    return [str(w.message) for w in caught if "clipped" in str(w.message)]


def jointly(grower):
    nn.utils.clip_grad_norm_(grower.body.parameters(), 0.05)


def separately(grower):
    grower.clip_grad_norm_(0.05)


def host_only(grower):
    nn.utils.clip_grad_norm_(grower.body.model.parameters(), 0.05)


def unscaled(grower):
    for p in grower.body.parameters():
        if p.grad is not None:
            p.grad /= 1024


@pytest.mark.parametrize("incubation", ["straight_through", "shadow"])
def test_joint_clipping_of_an_isolated_seed_warns_once_with_a_remedy(incubation):
    (message,) = run(jointly, incubation=incubation)
    assert "grower.clip_grad_norm_(max_norm)" in message


@pytest.mark.parametrize("clip", [separately, host_only, unscaled, lambda _: None])
def test_other_changes_of_gradients_do_not_warn(clip):
    assert run(clip, scale=1024.0 if clip is unscaled else 1.0) == []


def test_joint_clipping_with_open_birth_does_not_warn():
    assert run(jointly, rules=esper.Rules()) == []


def test_joint_clipping_changes_the_host_and_separate_clipping_does_not():
    def host_after(clip, *, planted):
        body = make_body()
        optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
        grower = esper.Grower(body, optimizer, rules=EASY, gradient_telemetry_stride=100, controller="none")
        if planted:
            grower.germinate("first", "conv_light")
            grower.advance("first")
        torch.manual_seed(1)
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(body(x), y).backward()
            clip(grower)
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in body.model.parameters()])

    assert torch.equal(host_after(separately, planted=True), host_after(separately, planted=False))
    assert not torch.equal(host_after(jointly, planted=True), host_after(jointly, planted=False))


def test_clip_grad_norm_returns_the_norm_of_the_host():
    body = make_body()
    grower = esper.Grower(body, torch.optim.SGD(body.parameters(), lr=0.1), controller="none")
    x, y = batch(0)
    nn.functional.cross_entropy(body(x), y).backward()
    expected = nn.utils.get_total_norm([p.grad for p in body.parameters()])
    torch.testing.assert_close(grower.clip_grad_norm_(0.1), expected)
