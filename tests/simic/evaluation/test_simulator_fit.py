"""The fit of simulated worlds to recorded episodes: it recovers settings, and refuses what it cannot use."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from esper.leyline.errors import ConfigError
from esper.simic.env import HostBackend
from esper.simic.evaluation.simulator_fit import (
    Recording,
    final_gain,
    fit,
    fit_curve,
    gain_matrix,
    lowest,
    moments,
    play_episodes,
    predicted_gains,
    simulate,
)
from esper.simic.simulated_worlds import SimConfig
from esper.simic.simulator import Simulator
from esper.tolaria.families import Family

BASE = SimConfig(horizon=12, slots=4, val_samples=600, blueprints=("conv_heavy", "norm"))
TRUE = msgspec.structs.replace(
    BASE, gain=0.15, gain_spread=0.6, ceiling=0.6, ceiling_spread=0.08, pace=2.5, pace_spread=0.3, overfit=0.1,
    overfit_spread=0.05, quality_noise=0.004, room=0.3, room_spread=0.3 * 0.03 / 0.16, bad_share=0.05,
    seed_params=4.0, seed_macs=0.5,
)  # fmt: skip
NAMES = ["conv_heavy", "norm"]


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return play_episodes(Simulator(TRUE, range(48)), NAMES)


@pytest.fixture(scope="module")
def fitted(recordings: list[Recording]) -> SimConfig:
    return fit(recordings, BASE)


def test_every_blueprint_is_recorded_in_every_slot(recordings):
    assert [each.world for each in recordings] == list(range(48))
    for each in recordings:
        assert [(seed.blueprint, seed.slot) for seed in each.seeds] == [(n, s) for n in NAMES for s in range(4)]
        assert {len(curve) for curve in (each.quality, each.train_loss, each.val_loss)} == {12}


def test_gains_are_differences_to_the_same_world_without_growth(recordings):
    gains = gain_matrix(recordings)
    assert gains.shape == (48, 4, 2)
    seed = recordings[7].seeds[5]
    expected = np.mean(seed.quality[-3:]) - np.mean(recordings[7].quality[-3:])
    assert gains[7, seed.slot, 1] == final_gain(recordings[7], seed) == pytest.approx(expected, abs=1e-12)


def test_fit_recovers_the_settings_of_simulated_episodes(fitted):
    for name in ("gain", "gain_spread", "ceiling", "ceiling_spread", "pace", "pace_spread", "overfit",
                 "overfit_spread", "quality_noise", "room", "seed_params", "seed_macs"):  # fmt: skip
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=0.3), name
    assert (fitted.horizon, fitted.slots, fitted.val_samples, fitted.blueprints) == (12, 4, 600, BASE.blueprints)


def test_fitted_worlds_resemble_the_recorded_ones_more_than_the_defaults_do(recordings, fitted):
    goal = gain_matrix(recordings).mean()
    distance = [abs(gain_matrix(simulate(c, range(256), recordings)).mean() - goal) for c in (fitted, BASE)]
    assert distance[0] < 0.3 * distance[1]


def test_predicted_gains_equal_those_of_episodes():
    """The fast formula against episodes of the simulator, in its mean over worlds."""
    predicted = predicted_gains(TRUE, NAMES, [4])[0]
    played = gain_matrix(play_episodes(Simulator(TRUE, range(512)), NAMES))
    assert predicted.mean() == pytest.approx(played.mean(), abs=0.1 * played.std())
    assert predicted.std() == pytest.approx(played.std(), rel=0.2)


@pytest.mark.parametrize(("ceiling", "pace"), [(0.8, 2.0), (0.5, 6.0), (0.9, 0.5)])
def test_curve_without_noise_is_fitted_exactly(ceiling, pace):
    t = np.arange(1, 13)
    fitted = fit_curve(ceiling - (ceiling - 0.1) * np.exp(-t / pace))
    assert fitted == pytest.approx((ceiling, pace), rel=0.02)


def test_moments_of_a_table_worked_out_by_hand():
    gains = np.array([[[0.0, 0.2], [0.2, 0.4]], [[-0.1, -0.1], [-0.1, -0.1]]])
    values = moments(gains, np.array([0.5, 0.6]), np.array([0.0, 0.0]))
    mean, worlds, slots, blueprints, rest, best, best_spread, worst, gainful, harmful, *_ = values
    assert (mean, worlds) == pytest.approx((0.05, 0.15))
    assert (slots, blueprints) == pytest.approx((0.1 / np.sqrt(2), 0.1 / np.sqrt(2)))
    assert rest == pytest.approx(0.0, abs=1e-9)
    assert (best, best_spread, worst) == pytest.approx((0.15, 0.25, -0.05))
    assert (gainful, harmful) == pytest.approx((3 / 8, 4 / 8))


def test_search_finds_the_lowest_point():
    assert lowest(lambda p: float(((p - [0.5, -1.0, 0.0]) ** 2).sum()), 3) == pytest.approx([0.5, -1, 0], abs=0.05)


def test_few_worlds_and_non_finite_recordings_are_refused(recordings):
    with pytest.raises(ConfigError, match="at least 4 worlds, got 3"):
        fit(recordings[:3], BASE)
    broken = msgspec.structs.replace(recordings[5], quality=[float("nan")] * 12)
    with pytest.raises(ConfigError, match="the recording of world 5 must have seeds and a finite quality"):
        fit([*recordings[:5], broken], BASE)


def test_real_hosts_are_recorded():
    family = Family(name="few", datasets=("digits",), widths=(2,), blocks=(2,), batch=(8,), epochs=(3,),
                    batches_per_epoch=1, val_size=16, blueprints=("norm",))  # fmt: skip
    backend = HostBackend(family.task(1))
    backend.reset([1])
    (recording,) = play_episodes(backend, ["norm"])
    assert [seed.slot for seed in recording.seeds] == list(range(recording.slots))
    assert all(len(seed.quality) == 3 and seed.contribution[-1] is not None for seed in recording.seeds)
