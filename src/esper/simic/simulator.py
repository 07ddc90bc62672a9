"""Simulator of growing hosts: table, rules and measurements of the engine, with learning curves given by formulas.

    sim = Simulator(SimConfig(), worlds=range(128))
    sim.step(actions)             # apply, tick, learn, measure; vectorised over all environments

It runs tens of thousands of steps per second, so that learners, rewards and controllers can be tested in seconds, and
the optimum is known (`evaluation/sim_oracle.py`). Properties kept from real hosts:

    a TRAINING seed learns with diminishing returns and affects the host only through alpha; fossils keep learning
    neighbours complement or duplicate each other, and the gain of a host is limited by its `room`
    moving alpha costs some quality temporarily; pruning loses what the seed had learnt
    contributions and prospects are the true values plus noise of the stated standard error

An environment does not depend on the others: its noise is keyed by (world, purpose, step).

Legend: E environments, S slots, B blueprints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from esper.leyline.actions import BLUEPRINTS, Operator
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Outcome, Rules, apply, legal, record_contribution, record_epoch, tick
from esper.leyline.rng import bell, random_bits
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable, live_costs
from esper.leyline.stages import NUM_STAGES, SeedStage
from esper.simic.attribution import Worth
from esper.simic.env import Part
from esper.simic.simulated_worlds import (
    CLASSES,
    GATED_HARM,
    INTERACTION,
    LEARNING_RATE,
    OPERATOR_FIT,
    SimConfig,
    Worlds,
    draw_worlds,
    host_shape,
)
from esper.tamiyo.policy.features import ObsContext
from esper.tolaria.governor import Alarm

__all__ = ["SimConfig", "Simulator"]

Stage = SeedStage
LEARNING_SHARE = np.zeros(NUM_STAGES)
LEARNING_SHARE[[Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED]] = 0.7, 1.0, 1.0, 1.0
"""Fraction of an epoch that a seed learns from. A TRAINING seed has a shadow pass on every other batch only."""
TRAINING_PASSES = 3
"""Multiply-adds of a training pass as a multiple of a forward pass: the backward pass takes about two."""
SAMPLES = 1280
"""Training samples per epoch, as in the tasks of the presets."""
SHOCK_KEEP = 0.5
"""Fraction of a disturbance that remains after one epoch."""
SAME_SPLIT = 0.5
"""Fraction of a measurement's variance that is due to the samples in the split: constant from epoch to epoch."""

LOSS_NOISE, INTERACTION_NOISE = 0.003, 0.002


class Simulator:
    """E simulated environments and their table: thousands of steps per second, without training a network.

    Args:
        config: How worlds vary.
        worlds: The world of each environment.
        rules: Lifecycle settings; None is `Rules()`.

    Example:
        >>> simulator = esper.Simulator(esper.SimConfig(), worlds=[0, 1])
        >>> simulator.legal.shape  # environments, operations, slots
        (2, 6, 3)
    """

    def __init__(self, config: SimConfig, worlds: Sequence[int], rules: Rules | None = None) -> None:
        self.config = config
        self.rules = rules or Rules()
        self.shape = host_shape(config)
        self.slots = tuple(f"r0c{column}" for column in range(config.slots))
        self.data_hash = "simulated"
        self.worth: list[Worth] = []  # no coalitions are evaluated
        self.on_pause: Callable[[], None] = lambda: None  # never called
        self.alarms: list[Alarm] = []  # there is no governor
        self.context = ObsContext(
            horizon=config.horizon,
            host_params=self.shape.host_params,
            host_macs=self.shape.host_macs,
            slot_width=self.shape.width,
            slot_params=self.shape.params,
            slot_macs=self.shape.macs,
            slot_depth=np.arange(config.slots) / max(1, config.slots - 1),  # as for real hosts
            chance_loss=float(np.log(CLASSES)),
            thresholds=self.rules.thresholds,
        )
        takes = np.zeros((config.slots, len(BLUEPRINTS)), dtype=bool)
        takes[:, config.allowed] = True
        self.table = SlotTable.empty(len(worlds), config.slots, takes=takes)
        self.reset(worlds)

    @property
    def horizon(self) -> int:
        """Steps of an episode."""
        return self.config.horizon

    @property
    def parts(self) -> list[Part]:
        """All environments: they share one host structure."""
        return [Part(self.table, self.context, self.baseline_quality)]

    @property
    def host_params(self) -> Ints:
        """[E] parameters of each host without seeds."""
        return np.full(self.table.num_envs, self.shape.host_params)

    def baseline_curves(self) -> dict[int, list[float]]:
        """Return an empty dict: no-growth baselines are formulas and need no cache."""
        return {}

    def add_baselines(self, curves: Mapping[int, list[float]]) -> None:
        """Ignore the curves: no-growth baselines are formulas."""

    def reset(self, worlds: Sequence[int] | None = None) -> None:
        """Restart all environments.

        Args:
            worlds: Their worlds; None keeps them.

        Raises:
            ConfigError: The number of worlds is not that of the environments.
        """
        if worlds is not None:
            if len(worlds) != self.table.num_envs:
                raise ConfigError(
                    f"this simulator has {self.table.num_envs} environments, not the {len(worlds)} of these worlds; "
                    "build another"
                )
            self.worlds = list(worlds)
            self.truth: Worlds = draw_worlds(self.worlds, self.config)
        self.table.reset()
        envs = self.table.num_envs
        shape = self.table.stage.shape
        self.skill = np.zeros(shape)  # [E, S] fraction of its potential that a seed has learnt
        self.applied_alpha = np.zeros(shape)  # [E, S] alpha after the last step
        self.shock = np.zeros(envs)  # [E] quality lost to moving alphas
        self.true_quality: Floats = np.full(envs, np.nan)  # [E] without noise
        self.baseline_quality: Floats = np.full(envs, np.nan, np.float32)  # [E] measured, of the no-growth baseline

    @property
    def legal(self) -> Bools:
        """[E, O, S] operations that are legal now."""
        return legal(self.table, self.rules)

    @property
    def macs(self) -> Ints:
        """[E] multiply-adds per sample of the host and all seeds that affect the output."""
        return live_costs(self.table, self.context)[1]

    def step(self, actions: Ints) -> Outcome:
        """Apply actions, tick, learn for an epoch, measure and record.

        Args:
            actions: `[E, 8]`, columns as in `esper.leyline.actions.Head`.

        Returns:
            Which actions were carried out, and the structural changes.
        """
        table = self.table
        outcome = apply(table, actions, self.rules)
        new_seeds = self._alive() & (table.age == 0)
        self.skill[new_seeds] = 0.0
        self.applied_alpha[new_seeds] = table.alpha[new_seeds]  # Δ = 0: an open birth does not disturb the host
        each = self.shape.params[np.arange(table.num_slots), np.maximum(table.blueprint, 0)]  # [E, S]
        table.params[new_seeds] = each[new_seeds]
        ticked = tick(table, self.rules)
        table.train_macs[:] += TRAINING_PASSES * self.macs * SAMPLES
        table.host_train_macs[:] += TRAINING_PASSES * self.context.host_macs * SAMPLES
        self._learn()
        self._measure()
        return Outcome(outcome.happened, outcome.effects + ticked)

    def _alive(self) -> Bools:
        return np.asarray((self.table.stage >= Stage.GERMINATED) & (self.table.stage <= Stage.FOSSILIZED))

    def _of_blueprint(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the entries [E, S] of `values` [E, S, B] for the current seeds."""
        chosen = np.maximum(self.table.blueprint, 0).astype(np.intp)
        return np.take_along_axis(values, chosen[:, :, None], axis=2)[:, :, 0]

    def _learn(self) -> None:
        table = self.table
        rate = LEARNING_RATE[table.blueprint] * LEARNING_SHARE[table.stage] * ~table.frozen
        self.skill += (1.0 - self.skill) * rate * ~self._of_blueprint(self.truth.stillborn)
        moved = table.alpha.astype(np.float64) - self.applied_alpha
        self.applied_alpha = table.alpha.astype(np.float64)
        self.shock = SHOCK_KEEP * self.shock + self.config.shock * (moved**2).sum(axis=1)

    def strength(self) -> Floats:
        """Return what each seed would currently add alone at alpha = 1.

        Returns:
            `[E, S]`.
        """
        table = self.table
        operator, blueprint = np.maximum(table.operator, 0), np.maximum(table.blueprint, 0)
        worth = self._of_blueprint(self.truth.potential)
        fit = OPERATOR_FIT[operator, blueprint]
        fit = np.where((operator == Operator.GATE) & (worth < 0), GATED_HARM, fit)
        return np.where(self._alive(), worth * fit * self.skill, 0.0)

    def _pairs(self, left: Floats, right: Floats) -> Floats:
        """Return [E, S−1] the interactions of neighbours, from the strengths of each pair."""
        blueprint = np.maximum(self.table.blueprint, 0)
        both = INTERACTION[blueprint[:, :-1], blueprint[:, 1:]]
        return both * np.maximum(np.minimum(left, right), 0.0)

    def _touching(self, mine: Floats, others: Floats) -> Floats:
        """Return [E, S] the interactions of each slot, at strength `mine`, with its neighbours at strength `others`."""
        total = np.zeros(mine.shape)
        total[:, :-1] += self._pairs(mine[:, :-1], others[:, 1:])
        total[:, 1:] += self._pairs(others[:, :-1], mine[:, 1:])
        return total

    def _sum(self, strengths: Floats) -> Floats:
        """Return [E] the combined strength of all seeds, before the limit by `room`."""
        return np.asarray(strengths.sum(axis=1) + self._pairs(strengths[:, :-1], strengths[:, 1:]).sum(axis=1))

    def _value(self, raw: Floats, maturity: Floats) -> Floats:
        """Convert combined strengths [E] or [E, S] to quality, with diminishing returns towards `room`.

        A seed builds on features that the host must have learnt first: its gain is proportional to the host's
        maturity.
        """
        room, maturity = (a if raw.ndim == 1 else a[:, None] for a in (self.truth.room, maturity))
        return maturity * np.where(raw > 0, room * -np.expm1(-np.maximum(raw, 0.0) / room), raw)

    def _measure(self) -> None:
        """Record what a validation pass would measure after this epoch."""
        truth = self.truth
        envs, slots = self.table.stage.shape
        host = truth.host_quality(self.table.step)
        maturity = (host - truth.start) / (truth.ceiling - truth.start)
        draws = bell(random_bits(truth.keys, "measurements", 4 + 5 * slots, self.table.step))
        self._record_quality(host, maturity, draws[:, :4].T)
        self._record_seeds(maturity, draws[:, 4:].reshape(envs, 5, slots).transpose(1, 0, 2))

    def _record_quality(self, host: Floats, maturity: Floats, draws: Floats) -> None:
        config = self.config
        table = self.table
        shared_noise, own_noise, val_noise, train_noise = config.noise * draws
        now = self.strength() * self.applied_alpha
        value = self._value(self._sum(now), maturity)
        committed = self._value(self._sum(np.where(table.stage == Stage.FOSSILIZED, now, 0.0)), maturity)
        divergence = np.minimum(self.applied_alpha.sum(axis=1), 1.0)  # a host with alpha > 0 diverges from its baseline

        self.true_quality = np.clip(host + value - self.shock, 0.01, 0.99)
        self.baseline_quality = np.clip(host + config.quality_noise * shared_noise, 0.0, 1.0).astype(np.float32)
        quality = np.clip(self.true_quality + config.quality_noise * (shared_noise + divergence * own_noise), 0.0, 1.0)
        missing = np.log(CLASSES) * (1.0 - quality) / (1.0 - 1.0 / CLASSES)
        val_loss = missing * (1.0 + LOSS_NOISE * val_noise)
        train_loss = missing * (1.0 - self.truth.overfit * maturity) * (1.0 + LOSS_NOISE * train_noise)
        record_epoch(table, quality=quality, val_loss=val_loss, train_loss=train_loss)
        table.committed_quality[:] = np.clip(quality - value + committed, 0.0, 1.0)

    def _record_seeds(self, maturity: Floats, draws: Floats) -> None:
        table = self.table
        live = (table.stage <= Stage.HOLDING) & (self.applied_alpha > 0)
        training = table.stage == Stage.TRAINING
        full = self.strength()
        now = full * self.applied_alpha
        raw = self._sum(now)[:, None]
        value = self._value(raw, maturity)
        without = self._value(raw - now - self._touching(now, now), maturity)
        switched_on = self._value(raw + full + self._touching(full, now), maturity)

        contribution, se = self._measured(value - without, draws[0], "contribution")
        record_contribution(table, np.where(live, contribution, np.nan), np.where(live, se, np.nan))
        prospect, se = self._measured(switched_on - value, draws[1], "prospect")
        table.prospect[training], table.prospect_se[training] = prospect[training], se[training]
        several = live & (live.sum(axis=1) > 1)[:, None]
        among_live = self._touching(now, np.where(live, now, 0.0)) + self.config.noise * INTERACTION_NOISE * draws[2]
        table.interaction[several] = among_live[several]
        self._record_gradients(training | live, *(self.config.noise * draws[3:]))

    def _measured(self, true: Floats, fresh: Floats, purpose: str) -> tuple[Floats, Floats]:
        """Return a difference in quality as measured on a split of finite size, and its paired standard error."""
        table = self.table
        config = self.config
        number = np.maximum(table.serial, 0) * table.num_slots + np.arange(table.num_slots)
        lasting = bell(random_bits(self.truth.keys, purpose, number))
        share = np.abs(true) + 0.01  # fraction of samples whose prediction changes
        se = config.noise * np.sqrt(share / config.val_samples)
        return true + se * (np.sqrt(SAME_SPLIT) * lasting + np.sqrt(1.0 - SAME_SPLIT) * fresh), se

    def _record_gradients(self, where: Bools, first: Floats, second: Floats) -> None:
        """Record gradient statistics.

        Norms fall with skill and grow with the slot's need; stillborn seeds have dead tensors.
        """
        table = self.table
        dead = self._of_blueprint(self.truth.stillborn)
        pull = self.truth.need * (1.0 - 0.9 * self.skill)
        norm = np.where(dead, 1e-3, 0.5 * pull) * (1.0 + 0.1 * first)
        ratio = np.where(dead, 0.02, pull) * (1.0 + 0.1 * second)
        health = np.where(dead, 0.6, 0.95) + 0.02 * np.clip(second, -2.0, 2.0)
        for column, value in ((table.grad_norm, norm), (table.grad_ratio, ratio), (table.grad_health, health)):
            column[where] = value[where]
