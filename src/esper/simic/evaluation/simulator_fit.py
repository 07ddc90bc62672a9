"""Estimate the settings of simulated worlds from recorded episodes, by moments.

    recordings = play_episodes(backend, ["conv_heavy"])       # episodes of all worlds of a backend, one seed at a time
    fit(recordings, SimConfig(horizon=12))             # settings of simulated worlds that resemble them

One episode of a world has no growth; the others plant one seed in one slot after the first epoch, with open birth, and
never commit it, so that its contribution is measured until the end. Estimates:

ceiling, pace, their spreads    c and p of the curve c − (c − 0.1)·exp(−t/p), fitted to each world without growth
seed_params, seed_macs          costs of recorded seeds relative to their hosts, geometric mean over seeds
quality_noise                   second differences of the residuals in the second half of the episode
overfit, overfit_spread         1 − training loss / validation loss of the last epochs, relative to the host's maturity
settings of seeds (`FREE`)      moments of the seeds' final gains (`MOMENTS`) are matched to those of simulated worlds,
                                each weighted by its standard error; a prior around the defaults decides what they leave
                                open. room_spread stays in proportion to room

Settings that are not named keep their defaults. `fit` of episodes of the simulator itself returns its settings.

Legend: E environments, T epochs, W worlds, S slots, B blueprints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from esper.leyline.actions import BLUEPRINTS, Op
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Rules
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.simic.env import HostBackend
from esper.simic.evaluation.plan_search import Plan
from esper.simic.simulated_worlds import (
    CEILING_NOISE,
    CLASSES,
    LEARNING_RATE,
    LEAST_CEILING,
    MOST_CEILING,
    OVERFIT_NOISE,
    PACE_NOISE,
    SimConfig,
    draw_worlds,
)
from esper.simic.simulator import Simulator
from esper.tamiyo.controllers import Controller
from esper.tamiyo.policy.features import ObsContext
from esper.tolaria.rollout import rollout

HANDFUL = ("conv_light", "attention", "norm", "conv_heavy")
"""Blueprints that are recorded where more are allowed."""
LAST = 3
"""Number of last epochs over which a final quality or loss is the mean."""
LEAST_WORLDS, LEAST_EPOCHS = 4, 8
START = 1.0 / CLASSES
"""Quality before the first epoch in simulated worlds."""
NOTABLE = 0.01
"""Gain or harm of a seed, as a fraction of quality, that is counted."""
MODEL_WORLDS = 512
"""Number of simulated worlds over which the moments of a candidate are computed."""


# ---- recording ---------------------------------------------------------------------------------------------------


class SeedEpisode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An episode with one seed: values after each epoch, None where not measured."""

    slot: int
    blueprint: str
    params: float  # parameters of the seed, relative to the host's
    macs: float  # multiply-adds of the seed on one sample, relative to the host's
    quality: list[float]
    contribution: list[float | None]
    contribution_se: list[float | None]


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Episodes of one world: without growth, and with one seed each."""

    world: int
    slots: int
    quality: list[float]
    train_loss: list[float]
    val_loss: list[float]
    seeds: list[SeedEpisode]


class Uncommitted:
    """The controller of a plan without its commits: seeds stay measured until the end of the episode."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return the actions [E, 8] of the controller as if no commit were legal."""
        legal = legal.copy()
        legal[:, Op.FOSSILIZE] = False
        return self.controller.act(table, legal)


def play_episodes(backend: HostBackend | Simulator, blueprints: Sequence[str]) -> list[Recording]:
    """Return the episodes of all worlds of a backend: without growth, and each blueprint in each slot that takes it."""
    table = backend.table
    worlds = list(backend.worlds)
    quality, train_loss, val_loss = _curves(backend, Plan(), ("quality", "train_loss", "val_loss"))
    seeds: list[list[SeedEpisode]] = [[] for _ in worlds]
    for name in blueprints:
        number = BLUEPRINTS.index(name)
        params, macs = _relative_costs(backend.context, number)
        for slot in np.flatnonzero(table.takes[:, number]).tolist():
            backend.reset(worlds)
            columns = _curves(backend, Plan(number, 1, first=slot), ("quality", "contribution", "contribution_se"))
            for row, grown, worth, se in zip(seeds, *columns, strict=True):
                curves = _plain(grown), _plain_or_none(worth), _plain_or_none(se)
                row.append(SeedEpisode(slot, name, params[slot], macs[slot], *curves))
    return [
        Recording(world, table.num_slots, _plain(quality[e]), _plain(train_loss[e]), _plain(val_loss[e]), seeds[e])
        for e, world in enumerate(worlds)
    ]


def _relative_costs(context: ObsContext, blueprint: int) -> tuple[list[float], list[float]]:
    """Return parameters and multiply-adds of a blueprint in each slot, relative to the host's."""
    return (
        _plain(context.slot_params[:, blueprint] / context.host_params),
        _plain(context.slot_macs[:, blueprint] / context.host_macs),
    )


def _curves(backend: HostBackend | Simulator, plan: Plan, names: Sequence[str]) -> list[Floats]:
    """Return columns of the table after each epoch, [E, T], of the planted slot where a column has slots."""
    history: dict[str, list[Floats]] = {name: [] for name in names}
    for _ in rollout(backend, Uncommitted(plan.controller(backend.horizon)), backend.horizon):
        for name, rows in history.items():
            column = getattr(backend.table, name)
            rows.append((column if column.ndim == 1 else column[:, plan.first]).astype(np.float64))
    return [np.stack(rows, axis=1) for rows in history.values()]


def _plain(values: Floats) -> list[float]:
    return [round(float(value), 5) for value in values]


def _plain_or_none(values: Floats) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), 5) for value in values]


def simulate(config: SimConfig, worlds: Sequence[int], like: Sequence[Recording] = ()) -> list[Recording]:
    """Return recordings of simulated worlds, with the blueprints and the numbers of slots of the recordings `like`."""
    names = sorted({seed.blueprint for each in like for seed in each.seeds}) or list(HANDFUL)
    names = [name for name in names if BLUEPRINTS.index(name) in config.allowed]
    counts = [each.slots for each in like] or [config.slots]
    return [
        msgspec.structs.replace(each, seeds=[s for s in each.seeds if s.slot < counts[i % len(counts)]])
        for i, each in enumerate(play_episodes(Simulator(config, worlds, Rules()), names))
    ]


# ---- estimates ---------------------------------------------------------------------------------------------------


def final(values: Sequence[float]) -> float:
    """Return the mean of the last epochs."""
    return float(np.mean(values[-LAST:]))


def final_gain(recording: Recording, seed: SeedEpisode) -> float:
    """Return the final quality with a seed minus that of the same world without growth."""
    return final(seed.quality) - final(recording.quality)


def fit_curve(quality: Sequence[float]) -> tuple[float, float]:
    """Return ceiling c and time constant p of c − (c − 0.1)·exp(−t/p) by least squares.

    p is sought between 0.3 epochs and the length of the episode, c lies in the range of simulated worlds.
    """
    measured = np.asarray(quality)
    t = np.arange(1, len(quality) + 1)
    paces = np.geomspace(0.3, len(measured), 400)
    left = np.exp(-t / paces[:, None])  # [P, T] share of the way that is left
    ceilings = ((measured - START * left) * (1 - left)).sum(axis=1) / ((1 - left) ** 2).sum(axis=1)
    ceilings = np.clip(ceilings, LEAST_CEILING, MOST_CEILING)
    errors = ((measured - ceilings[:, None] + (ceilings[:, None] - START) * left) ** 2).sum(axis=1)
    best = int(errors.argmin())
    return float(ceilings[best]), float(paces[best])


def epoch_noise(quality: Sequence[float]) -> float:
    """Return the standard deviation of quality from epoch to epoch in the second half of an episode.

    Second differences of the residuals remove what the curve does not explain, if it is smooth.
    """
    ceiling, pace = fit_curve(quality)
    residual = np.asarray(quality) - ceiling + (ceiling - START) * np.exp(-np.arange(1, len(quality) + 1) / pace)
    return float(np.sqrt(np.mean(np.diff(residual[len(residual) // 2 - 1 :], n=2) ** 2) / 6.0))


def loss_gap(recording: Recording) -> float:
    """Return the fraction by which training loss lies below validation loss in the last epochs."""
    return 1.0 - final(recording.train_loss) / final(recording.val_loss)


def gain_matrix(recordings: Sequence[Recording]) -> Floats:
    """Return the final gains [W, S, B] of seeds by world, slot and blueprint; NaN where none was planted."""
    names = sorted({seed.blueprint for each in recordings for seed in each.seeds})
    gains = np.full((len(recordings), max(each.slots for each in recordings), len(names)), np.nan)
    for w, each in enumerate(recordings):
        for seed in each.seeds:
            gains[w, seed.slot, names.index(seed.blueprint)] = final_gain(each, seed)
    return gains


MOMENTS = {
    "mean": 0.002, "worlds": 0.002, "slots": 0.002, "blueprints": 0.002, "rest": 0.002, "best": 0.002,
    "best_spread": 0.002, "worst": 0.002, "gainful": 0.02, "harmful": 0.02, "with_quality": 0.05, "with_pace": 0.05,
}  # fmt: skip
"""Moments of final gains, with the least standard error that is assumed: their mean; standard deviations between
worlds, within worlds between slots and between blueprints, and of the rest; mean and standard deviation of the best
seed of a world, mean of the worst; shares above 0.01 and below −0.01; correlations of a world's mean gain with its
quality without growth and with the logarithm of its time constant."""


def moments(gains: Floats, quality: Floats, log_pace: Floats) -> Floats:
    """Return the moments of final gains [W, S, B] in the order of `MOMENTS`; quality and log_pace are [W]."""
    world = _mean_of_numbers(gains, axis=(1, 2))
    centred = gains - world[:, None, None]
    slot, blueprint = _mean_of_numbers(centred, axis=2), _mean_of_numbers(centred, axis=1)
    rest = centred - slot[:, :, None] - blueprint[:, None, :]
    best, worst = np.nanmax(gains, axis=(1, 2)), np.nanmin(gains, axis=(1, 2))
    there = gains[np.isfinite(gains)]
    spreads = (np.sqrt(np.nanmean(part**2)) for part in (slot, blueprint, rest))
    shares = (there > NOTABLE).mean(), (there < -NOTABLE).mean()
    related = (correlation(world, of) for of in (quality, log_pace))
    return np.array([world.mean(), world.std(), *spreads, best.mean(), best.std(), worst.mean(), *shares, *related])


def _mean_of_numbers(values: Floats, axis: int | tuple[int, ...]) -> Floats:
    """Return the mean over an axis without NaN; NaN where there is no number, such as in a slot a world lacks."""
    count = np.isfinite(values).sum(axis=axis)
    return np.where(count > 0, np.nansum(values, axis=axis) / np.maximum(count, 1), np.nan)


def correlation(a: Floats, b: Floats) -> float:
    """Return the correlation of two columns; 0 where one is constant."""
    return float(np.corrcoef(a, b)[0, 1]) if len(a) > 2 and a.std() > 1e-9 and b.std() > 1e-9 else 0.0


def predicted_gains(config: SimConfig, names: Sequence[str], counts: Sequence[int]) -> tuple[Floats, Floats, Floats]:
    """Return final gains [W, S, B] of single seeds, final quality and log pace without growth [W] in simulated worlds.

    Gains have the noise of a difference of two runs. They are formulas of `Simulator` for a seed planted after the
    first epoch with open birth.
    """
    truth = draw_worlds(range(MODEL_WORLDS), config)
    numbers = [BLUEPRINTS.index(name) for name in names]
    epoch = np.full(MODEL_WORLDS, config.horizon - LAST // 2)  # the middle of the last epochs
    host = truth.host_quality(epoch)
    maturity = ((host - truth.start) / (truth.ceiling - truth.start))[:, None, None]
    room = truth.room[:, None, None]
    skill = 1.0 - (1.0 - LEARNING_RATE[numbers]) ** (config.horizon - LAST // 2 - 1)
    raw = truth.potential[:, :, numbers] * skill
    gains = maturity * np.where(raw > 0, room * -np.expm1(-np.maximum(raw, 0.0) / room), raw)
    gains = np.clip(host[:, None, None] + gains, 0.01, 0.99) - host[:, None, None]
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(gains.shape) + rng.standard_normal((MODEL_WORLDS, 1, 1))
    gains = gains + config.quality_noise / np.sqrt(LAST) * noise
    gains[np.arange(config.slots) >= np.resize(counts, MODEL_WORLDS)[:, None]] = np.nan
    return gains, host, np.log(truth.pace)


FREE = {
    "gain": (1.5, 1e-4, 2.0), "gain_spread": (0.7, 0.0, 3.0), "kind_spread": (1.0, 0.0, 4.0),
    "slot_spread": (0.5, 0.0, 2.0), "surprise": (0.35, 0.0, 2.0), "bad_share": (0.12, 0.0, 0.6),
    "room": (0.7, 0.02, 0.8),
}  # fmt: skip
"""Settings that moments of gains determine: standard deviation of the prior around the default, least and largest
value. Those of `gain` and `room` are for logarithms."""
IN_LOGARITHMS = ("gain", "room")


def fit(recordings: Sequence[Recording], base: SimConfig) -> SimConfig:
    """Return the settings of simulated worlds that resemble recorded ones. `base` has the settings of the task."""
    if len(recordings) < LEAST_WORLDS:
        raise ConfigError(f"a fit needs recordings of at least {LEAST_WORLDS} worlds, got {len(recordings)}")
    for each in recordings:
        if not each.seeds or not np.isfinite(each.quality).all() or len(each.quality) < LEAST_EPOCHS:
            raise ConfigError(
                f"the recording of world {each.world} must have seeds and a finite quality in at least {LEAST_EPOCHS} "
                "epochs"
            )
    ceilings, paces = np.array([fit_curve(each.quality) for each in recordings]).T
    maturity = np.array([1 - np.exp(-len(e.quality) / p) for e, p in zip(recordings, paces, strict=True)])
    overfit = np.array([loss_gap(each) for each in recordings]) / maturity
    noise = np.sqrt(np.mean([epoch_noise(each.quality) ** 2 for each in recordings]))
    curves = msgspec.structs.replace(
        base,
        ceiling=float(np.clip(ceilings.mean(), LEAST_CEILING, MOST_CEILING)),
        ceiling_spread=_without(ceilings.std(ddof=1), CEILING_NOISE),
        pace=float(np.exp(np.log(paces).mean())),
        pace_spread=_without(np.log(paces).std(ddof=1), PACE_NOISE),
        overfit=float(np.clip(overfit.mean(), -1.0, 0.5)),
        overfit_spread=_without(overfit.std(ddof=1), OVERFIT_NOISE),
        quality_noise=float(noise),
        seed_params=_factor(recordings, base, "params"),
        seed_macs=_factor(recordings, base, "macs"),
    )
    return rounded(_fit_gains(curves, recordings, np.log(paces)))


def _factor(recordings: Sequence[Recording], base: SimConfig, cost: str) -> float:
    """Return the geometric mean of relative costs of recorded seeds over those of simulated ones; 1 without costs."""
    context = Simulator(base, [0]).context
    ratios = []
    for seed in (seed for each in recordings for seed in each.seeds):
        costs = dict(zip(("params", "macs"), _relative_costs(context, BLUEPRINTS.index(seed.blueprint)), strict=True))
        if getattr(seed, cost) > 0 and costs[cost][seed.slot] > 0:
            ratios.append(getattr(seed, cost) / costs[cost][seed.slot])
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else 1.0


def _without(spread: float, other: float) -> float:
    """Return the standard deviation that, with an independent one, gives `spread`; at least 0."""
    return float(np.sqrt(max(spread**2 - other**2, 0.0)))


def _fit_gains(base: SimConfig, recordings: Sequence[Recording], log_pace: Floats) -> SimConfig:
    gains = gain_matrix(recordings)
    quality = np.array([final(each.quality) for each in recordings])
    names = sorted({seed.blueprint for each in recordings for seed in each.seeds})
    goal = moments(gains, quality, log_pace)
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(recordings), (200, len(recordings)))
    errors = np.std([moments(gains[some], quality[some], log_pace[some]) for some in picks], axis=0)
    errors = np.maximum(errors, list(MOMENTS.values()))
    counts = [each.slots for each in recordings]

    def candidate(deviations: Floats) -> SimConfig:
        values = {}
        for (name, (width, least, most)), deviation in zip(FREE.items(), deviations, strict=True):
            default = getattr(SimConfig(), name)
            value = default * np.exp(width * deviation) if name in IN_LOGARITHMS else default + width * deviation
            values[name] = float(np.clip(value, least, most))
        spread = values["room"] * SimConfig().room_spread / SimConfig().room
        return msgspec.structs.replace(base, **values, room_spread=spread)

    def cost(deviations: Floats) -> float:
        predicted = moments(*predicted_gains(candidate(deviations), names, counts))
        return float((((predicted - goal) / errors) ** 2).sum() + (deviations**2).sum())

    return candidate(lowest(cost, len(FREE)))


def lowest(cost: Callable[[Floats], float], size: int, tries: int = 100, starts: int = 4) -> Floats:
    """Return where a function of `size` numbers is lowest, as a search from the best of `tries` normal draws finds it.

    The search goes along one axis at a time; steps are halved when none helps.
    """
    rng = np.random.default_rng(0)
    points = [np.zeros(size), *(rng.standard_normal((tries, size)))]
    minima = [_descended(cost, point) for _, point in sorted(((cost(p), p) for p in points), key=_first)[:starts]]
    return min(minima, key=_first)[1]


def _first(pair: tuple[float, Floats]) -> float:
    return pair[0]


def _descended(cost: Callable[[Floats], float], here: Floats) -> tuple[float, Floats]:
    value = cost(here)
    step = 1.0
    while step > 0.03:
        before = value
        for axis in np.eye(len(here)):
            for point in (here + step * axis, here - step * axis):
                if (there := cost(point)) < value:
                    here, value = point, there
        if not value < before:
            step /= 2
    return value, here


def rounded(config: SimConfig) -> SimConfig:
    """Return the settings with four significant digits, as they are written."""
    values = msgspec.structs.asdict(config).items()
    return msgspec.structs.replace(config, **{k: float(f"{v:.4g}") for k, v in values if isinstance(v, float)})
