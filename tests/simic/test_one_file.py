"""`examples/ppo_one_file.py` implements the package's algorithm: it must give the same update, and learn."""

from __future__ import annotations

import ast
import importlib.util
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.simic.agent.advantages import gae_rows
from esper.simic.agent.ppo import PPO, PPOConfig, losses
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.env import GrowthVectorEnv
from esper.simic.simulator import SimConfig, Simulator
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork
from esper.tamiyo.policy.action_masks import forced
from esper.tamiyo.policy.features import num_features

FILE = Path(__file__).parents[2] / "examples" / "ppo_one_file.py"


@pytest.fixture(scope="module")
def one():
    """Import the example as a module."""
    spec = importlib.util.spec_from_file_location("ppo_one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ppo_one_file"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["ppo_one_file"]


def package_config(settings):
    return PPOConfig(
        lr=settings.lr, gamma=settings.gamma, gae_lambda=settings.lam, clip_ratio=settings.clip,
        epochs=settings.epochs, minibatches=settings.minibatches, target_kl=settings.target_kl,
        value_coef=settings.value_coef, entropy_coef=settings.entropy_coef, entropy_final=settings.entropy_final,
        max_grad_norm=settings.max_grad_norm,
    )  # fmt: skip


def as_buffer(data, layout):
    """Return the example's rollout as a package buffer."""
    steps, envs = data["rewards"].shape
    buffer = TamiyoRolloutBuffer(steps=steps, envs=envs, features=num_features(layout.slots), masks=layout.size)
    for name, field in vars(buffer).items():
        if isinstance(field, torch.Tensor) and field.is_floating_point():
            setattr(buffer, name, field.to(torch.get_default_dtype()))
    none = torch.zeros(envs, dtype=torch.bool)
    for t in range(steps):
        row = {name: x[t] for name, x in data.items()}
        buffer.add(**row, truncated=none, forced=forced(row["masks"], layout))
    return buffer.finish()


def test_settings_equal_the_packages_defaults(one):
    ours, theirs, settings = PPOConfig(), NetworkConfig(), one.Settings()
    result = package_config(settings)
    assert result == ours
    for name in ("width", "patience", "epsilon"):
        assert getattr(settings, name) == getattr(theirs, name), name


def test_weights_have_the_packages_names_and_shapes(one):
    settings = one.Settings()
    ours, theirs = TamiyoNetwork().state_dict(), one.Policy(settings).state_dict()
    assert {k: x.shape for k, x in ours.items()} == {k: x.shape for k, x in theirs.items()}


class Float64Env(GrowthVectorEnv):
    """An environment with observations and rewards in float64, so that rounding cannot decide a comparison."""

    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs.astype(np.float64), info

    def step(self, actions):
        obs, paid, *rest = super().step(actions)
        return obs.astype(np.float64), paid.astype(np.float64), *rest


@pytest.fixture
def float64():
    """Compute in float64: Adam turns a rounding difference of a gradient near 0 into a step of full size."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("fixed", [None, {}], ids=["usual heads", "free heads"])
def test_three_updates_give_the_packages_weights(one, fixed):
    settings = one.Settings(envs=8, minibatches=3, width=24, patience=0.5, rounds=3, target_kl=3e-4, gamma=0.9, lam=0.6)
    torch.manual_seed(0)
    network = TamiyoNetwork(NetworkConfig(width=24, patience=0.5))
    policy = one.Policy(settings)
    policy.load_state_dict(network.state_dict())
    env = Float64Env(Simulator(SimConfig(horizon=20), range(8)), lambda n: range(8 * n, 8 * n + 8), fixed=fixed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.lr, eps=1e-5, weight_decay=0.0)
    ppo = PPO(network, env.layout, package_config(settings), rounds=3)
    scale, chance = one.ReturnScale(), torch.Generator().manual_seed(1)
    orders = [torch.Generator().manual_seed(2) for _ in range(2)]
    passes = []
    close = partial(torch.testing.assert_close, atol=1e-9, rtol=1e-7)

    for _ in range(3):
        data = one.rollout(env, policy, settings, chance)
        buffer = as_buffer(data, env.layout)
        coef = ppo.entropy_coef
        result = ppo.update(buffer, orders[0])
        theirs = one.update(policy, optimizer, env.layout, settings, scale, data, coef, orders[1])
        passes.append(result.epochs)
        close(data["advantages"], buffer.advantages)
        close(data["returns"], buffer.returns)
        assert theirs["kl"] == pytest.approx(result.kl, rel=1e-6, abs=1e-12)
        for name, x in network.state_dict().items():
            close(policy.state_dict()[name], x, msg=lambda m, n=name: f"{n}: {m}")
        assert orders[0].get_state().equal(orders[1].get_state())  # as many passes
    assert min(passes) < settings.epochs  # the target KL did stop some


def test_loss_and_gradients_equal_the_packages_where_ratios_are_clipped(one):
    torch.manual_seed(0)
    settings = one.Settings(envs=6, width=24, patience=0.5)
    policy, network = one.Policy(settings), TamiyoNetwork(NetworkConfig(width=24, patience=0.5))
    network.load_state_dict(policy.state_dict())
    env = GrowthVectorEnv(Simulator(SimConfig(horizon=20), range(6)), range(6), fixed={})
    data = one.rollout(env, policy, settings, torch.Generator().manual_seed(1))
    buffer, config = as_buffer(data, env.layout), package_config(settings)
    _, data["returns"] = buffer.compute_advantages_and_returns(config.gamma, config.gae_lambda)
    buffer.advantages.normal_(generator=torch.Generator().manual_seed(4))
    data["advantages"], data["free"] = buffer.advantages, ~buffer.forced
    data["log_probs"] += 0.5 * torch.randn(data["log_probs"].shape, generator=torch.Generator().manual_seed(2))
    buffer.log_probs.copy_(data["log_probs"])

    batch = next(iter(buffer.minibatches(1, torch.Generator().manual_seed(3))))
    ours, result = losses(network, env.layout, config, batch, 0.03)
    theirs, numbers = one.loss_of(policy, env.layout, settings, {k: x.flatten(0, 1) for k, x in data.items()}, 0.03)
    ours.backward()
    theirs.backward()
    assert result["clip_fraction"] > 0.3
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-5)
    assert numbers["kl"] == pytest.approx(result["kl"], rel=1e-4)
    for (name, p), q in zip(policy.named_parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_advantages_equal_the_packages_with_ends_anywhere(one):
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 30, 7)).astype(np.float32)
    done = rng.random((30, 7)) < 0.2
    done[-1] = True
    expected, _ = gae_rows(rewards, values, done, np.zeros_like(done), np.zeros_like(rewards), np.full(7, 30), 0.9, 0.8)
    result = one.advantages_of(*map(torch.from_numpy, (rewards, values, done)), 0.9, 0.8)
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-5)


def test_example_imports_no_learner_code_from_the_package():
    tree = ast.parse(FILE.read_text())
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module.startswith("esper")}
    assert imported == {"esper.leyline.actions", "esper.simic.env", "esper.simic.simulator", "esper.tamiyo.policy"}
    assert len(FILE.read_text().splitlines()) <= 300


def run(*arguments):
    """Run the example from the command line and return the returns it prints."""
    done = subprocess.run([sys.executable, FILE, *arguments], capture_output=True, text=True, check=True, timeout=600)
    assert not done.stderr
    return returns_in(done.stdout)


def returns_in(printed):
    return [float(number) for number in re.findall(r"return ([+-]\S+)", printed)]


def test_command_line_run_prints_a_finite_return_each_round():
    returns = run("--rounds", "2", "--envs", "4")
    assert len(returns) == 2
    assert all(math.isfinite(r) for r in returns)


@pytest.mark.slow
def test_returns_rise_and_the_same_seed_gives_the_same_run(one, capsys):
    returns = run("--rounds", "24", "--envs", "32")
    one.train(one.Settings(rounds=1, envs=32))
    assert returns_in(capsys.readouterr().out) == returns[:1]
    first, last = returns[:8], returns[-8:]
    assert sum(last) / 8 > sum(first) / 8 + 0.004
