"""Test the weight average against its formula, and that applying it is undone completely."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.leyline.errors import ConfigError
from esper.tolaria.growing_network import WeightAverage, estimated_statistics, norm_statistics


def make_module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)


def add_noise(module: nn.Module, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=noise))


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.98])
def test_average_matches_the_formula_with_warm_up(decay):
    module = make_module()
    average = WeightAverage(module, decay)
    slow = [p.detach().double() for p in module.parameters()]
    for n in range(1, 40):
        add_noise(module, n)
        average.update()
        d = min(decay, (1 + n) / (10 + n))
        slow = [d * a + (1 - d) * p.detach().double() for a, p in zip(slow, module.parameters(), strict=True)]
    for a, b in zip(average.average, slow, strict=False):
        assert torch.allclose(a.double(), b, atol=1e-5)


def test_resync_keeps_averages_and_adds_new_parameters():
    module = make_module()
    average = WeightAverage(module)
    add_noise(module, 1)
    average.update()
    averages = {t: a.clone() for t, a in average.by_tensor().items()}

    module.append(nn.Linear(2, 2))
    del module[0]
    average.resync()

    assert [id(t) for t in average.tensors] == [id(t) for t in (*module.parameters(), *norm_statistics(module))]
    for p, a in zip(average.tensors, average.average, strict=True):
        assert torch.equal(a, averages.get(p, p))
        assert a is not p
    add_noise(module, 2)
    average.update()
    assert average.updates == 2


def test_restart_resets_the_average_and_the_warm_up():
    module = make_module()
    average = WeightAverage(module)
    for n in range(3):
        add_noise(module, n)
        average.update()
    average.restart()
    assert average.updates == 0
    assert all(torch.equal(a, p) for a, p in zip(average.average, average.tensors, strict=True))


def test_applied_restores_the_weights_after_an_exception():
    module = make_module()
    average = WeightAverage(module)
    add_noise(module, 1)
    average.update()
    params = list(module.parameters())
    weights, mean = [p.detach().clone() for p in params], [a.clone() for a in average.average]

    def fail() -> None:
        with average.applied():
            assert all(torch.equal(t, a) for t, a in zip(average.tensors, mean, strict=True))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert list(module.parameters()) == params  # the same objects, as the optimiser holds them
    assert all(torch.equal(p, w) for p, w in zip(params, weights, strict=True))
    assert all(torch.equal(a, m) for a, m in zip(average.average, mean, strict=True))
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_statistics_of_batches_are_averaged_like_the_weights():
    module = make_module()
    average = WeightAverage(module, 0.9)
    slow = [b.double() for b in norm_statistics(module)]
    for n in range(1, 20):
        x = torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(n))
        with torch.no_grad():
            features = module[0](x).double()
        module(x)
        average.update()
        d = min(0.9, (1 + n) / (10 + n))
        batch = features.mean((0, 2, 3)), features.var((0, 2, 3))  # unbiased, as running statistics are
        slow = [d * a + (1 - d) * b for a, b in zip(slow, batch, strict=True)]
    live = [b.clone() for b in norm_statistics(module)]
    with average.applied():
        for b, a in zip(norm_statistics(module), slow, strict=True):
            assert torch.allclose(b.double(), a, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(live, norm_statistics(module), strict=True))


def test_statistics_of_a_frozen_norm_stay():
    module = make_module()
    module(torch.randn(4, 1, 5, 5))
    average = WeightAverage(module, 0.9)
    module.eval()
    module(torch.randn(4, 1, 5, 5))
    average.update()
    with average.applied():
        averaged = [b.clone() for b in norm_statistics(module)]
    assert all(torch.allclose(a, b) for a, b in zip(averaged, norm_statistics(module), strict=True))


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_decay_outside_its_range_is_rejected(decay):
    with pytest.raises(ConfigError, match="decay of the weight average"):
        WeightAverage(nn.Linear(1, 1), decay)


def test_estimated_statistics_are_those_of_the_inputs_and_leave_no_trace():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2), nn.BatchNorm1d(2))
    frozen = module[4].eval()  # the user froze this norm: its statistics stay
    x = torch.randn(32, 3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [m.training for m in module.modules()]

    with estimated_statistics(module, lambda: x):
        hidden = module[0](x)
        assert torch.allclose(module[1].running_mean, hidden.mean(0))
        assert torch.allclose(module[1].running_var, hidden.var(0))
        assert torch.equal(frozen.running_mean, before["4.running_mean"])
        assert not any(m.training for m in module.modules())
        estimated = module(x)
        module.train()  # modes are restored even if they are changed within the context
        frozen.train()

    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [m.training for m in module.modules()] == modes
    assert module[1].momentum == 0.1
    expected = module[4](module[3]((hidden - hidden.mean(0)) / (hidden.var(0) + module[1].eps).sqrt()))
    assert torch.allclose(estimated, expected, atol=1e-5)


def test_statistics_are_restored_after_an_error():
    module = nn.Sequential(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="no"), estimated_statistics(module, lambda: torch.randn(8, 2)):
        raise ValueError("no")
    assert torch.equal(module[0].running_mean, torch.zeros(2))
    assert module.training


def test_inputs_are_not_drawn_without_norms():
    with estimated_statistics(nn.Linear(2, 2), lambda: pytest.fail("drawn")):
        pass
