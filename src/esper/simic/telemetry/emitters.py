"""TelemetryEmitter: convert tables and results to events.

    emit = TelemetryEmitter(hub, slots=task.slots, worlds=worlds, host_params=network.host_size)
    …
    emit.step(engine.table, actions, outcome, legal)
    emit.governed(engine.alarms)
    emit.worth(engine.table, helper.process_batch(engine))

Lifecycle events are the difference between the previous and the current table. Events that no sink wants are not
built. The emitter never modifies its inputs, so telemetry cannot affect training.

Legend: E environments, S slots, O operations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from esper.kasmina.blueprints import blueprint_name
from esper.leyline import events
from esper.leyline.actions import HEAD_OPTIONS, NUM_OPS, RELEVANCE, Head, Op
from esper.leyline.errors import UnknownNameError
from esper.leyline.events import Event, EventReceiver, Level, Number
from esper.leyline.lifecycle import Outcome
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable, network_params
from esper.leyline.stages import COOLDOWN_TICKS, COOLING, NEXT_STAGES, SeedStage
from esper.simic.attribution.worth import Worth
from esper.tolaria.governor import Alarm
from esper.tolaria.rollout import PhaseTimers

PHASE_EVERY_S = 1.0
"""Minimum number of seconds between two phase profiles."""
STAGE = [stage.name for stage in SeedStage]
OPS = [op.name for op in Op]
_NAMED_HEADS = [h for h in Head if h not in (Head.SLOT, Head.BLUEPRINT, Head.OP)]


def number(value: Any) -> Number:
    """Return a number of the table; None for NaN, which means never measured."""
    as_float = float(value)
    return None if math.isnan(as_float) else as_float


def _option(names: Sequence[str], number: int) -> str:
    """Return the name of an option, or its number if there is no such option, which an action may still contain."""
    return names[number] if 0 <= number < len(names) else str(number)


def _blueprint(index: int) -> str:
    try:
        return blueprint_name(index)
    except UnknownNameError:
        return str(index)


_OPEN_BIRTH = [int(SeedStage.GERMINATED), int(SeedStage.BLENDING), int(SeedStage.HOLDING)]
"""Stages that a seed of an open birth enters in its first step, the last one only without a ramp."""


def _path(was: int, between: int, now: int, expelled: bool) -> list[int]:
    """Return the stages that a seed went through in one step, from the previous one to the last two."""
    if now == SeedStage.DORMANT or between == was:
        return [was, now]
    if was == SeedStage.DORMANT and between in _OPEN_BIRTH:
        return [was, *_OPEN_BIRTH[: _OPEN_BIRTH.index(between) + 1], now]
    # else only a seed expelled by the governor can move three times; its first move follows from the other stages
    after = NEXT_STAGES[SeedStage(was)]
    if was == SeedStage.GERMINATED:  # a seed that rests there began by isolated birth
        after -= {SeedStage.BLENDING}
    via = [int(x) for x in after if expelled and between in NEXT_STAGES[x]]
    return [was, *(via if between not in after else []), between, now]


@dataclass(slots=True)
class StepStats:
    """Policy outputs, rewards and utilities of a step, [E] each; None if there is no such number."""

    value: Floats | None = None
    log_prob: Floats | None = None
    entropy: Floats | None = None
    reward: Floats | None = None
    utility: Floats | None = None

    def at(self, name: str, env: int) -> Number:
        """Return the value of one environment; None if there is none."""
        column = getattr(self, name)
        return None if column is None else float(column[env])

    def column(self, name: str, envs: int) -> list[Number]:
        """Return the values of all environments; None each if there are none."""
        values: Floats | None = getattr(self, name)
        return [None] * envs if values is None else values.tolist()


class TelemetryEmitter:
    """Emits the events of E environments.

    envs         numbers of these environments in the run; default 0 … E−1
    worlds       world of each environment
    slots        names of the slots; an environment with fewer slots has the first ones
    host_params  parameters of each host without seeds [E], or of all hosts
    is_rank_zero whether to emit events of the run as a whole too
    """

    def __init__(
        self,
        hub: EventReceiver,
        *,
        slots: Sequence[str],
        worlds: Sequence[int],
        host_params: int | Ints,
        envs: Sequence[int] | None = None,
        level: Level = Level.NORMAL,
        is_rank_zero: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hub = hub
        self.slots = tuple(slots)
        self.worlds = list(worlds)
        self.envs = list(range(len(self.worlds))) if envs is None else list(envs)
        self.host_params = np.broadcast_to(host_params, len(self.envs))  # [E]
        self.level = level
        self.is_rank_zero = is_rank_zero
        self._clock = clock
        self._profiled = -math.inf
        self._episode = [1] * len(self.envs)
        self._before: SlotTable | None = None
        self._counts = np.zeros((len(self.envs), 3), dtype=np.int64)  # germinated, fossilised, pruned
        self._alive = np.ones(len(self.envs), dtype=bool)  # [E] which environments the last step stepped

    # -- each step

    def planted(self, table: SlotTable) -> None:
        """Set the table before the first step.

        Seeds in it were not grown in this episode and get no lifecycle events.
        """
        self._before = table.clone()

    def measured(self, table: SlotTable) -> None:
        """Take over contributions that were measured after the last step, which the next decision is based on."""
        if self._before is not None:
            self._before.contribution[:] = table.contribution
            self._before.contribution_se[:] = table.contribution_se

    @property
    def counts(self) -> Ints:
        """[E, 3] number of seeds germinated, fossilised and pruned in this episode."""
        return self._counts

    def resume(self, table: SlotTable, counts: Ints) -> None:
        """Continue an episode whose steps up to this table were emitted by another process."""
        self.planted(table)
        self._counts[:] = counts

    def step(
        self,
        table: SlotTable,
        actions: Ints,
        outcome: Outcome,
        legal: Bools | None = None,
        stats: StepStats | None = None,
        *,
        unmeasured: Collection[str] = (),
        alive: Bools | None = None,
    ) -> None:
        """Emit the decisions, lifecycle transitions and step results of all environments after a step.

        `unmeasured` names columns of the step event that are not measured: they are emitted as None instead of NaN.
        `alive` [E] excludes environments that have not been stepped.
        """
        stats = stats or StepStats()
        self._alive = np.ones(len(self.envs), dtype=bool) if alive is None else alive
        self.acted(table, actions, outcome, legal, stats)
        if self.hub.wants(events.Step):
            self._steps(table, stats, unmeasured)
        if self.hub.wants(events.Gradient):
            self._gradients(table)

    def acted(
        self,
        table: SlotTable,
        actions: Ints,
        outcome: Outcome,
        legal: Bools | None = None,
        stats: StepStats | None = None,
    ) -> None:
        """Emit the decisions and lifecycle transitions of a step."""
        before = self._before if self._before is not None else SlotTable.empty(table.num_envs, table.num_slots)
        self._decisions(table, actions, outcome, legal, stats or StepStats())
        self._transitions(before, table, actions, outcome)
        self._before = table.clone()

    def _place(self, table: SlotTable, e: int) -> dict[str, Any]:
        return {"env": self.envs[e], "episode": self._episode[e], "step": int(table.step[e])}

    def _decisions(
        self, table: SlotTable, actions: Ints, outcome: Outcome, legal: Bools | None, stats: StepStats
    ) -> None:
        if not self.hub.wants(events.Decision):
            return
        ops = actions[:, Head.OP]
        acting = np.nonzero(self._alive & ((ops != Op.WAIT) | (self.level >= Level.DEBUG)))[0]
        for e in acting.tolist():
            op = int(ops[e])
            row = actions[e].tolist()
            reads = RELEVANCE[op] if 0 <= op < NUM_OPS else RELEVANCE[Op.WAIT]
            heads: dict[str, Any] = {
                h.name.lower(): _option(HEAD_OPTIONS[h] or (), row[h]) for h in _NAMED_HEADS if reads[h]
            }
            self.hub.emit(
                events.Decision(
                    **self._place(table, e),
                    op=_option(OPS, op),
                    slot=_option(self.slots, row[Head.SLOT]) if reads[Head.SLOT] else "",
                    blueprint=_blueprint(row[Head.BLUEPRINT]) if reads[Head.BLUEPRINT] else "",
                    happened=bool(outcome.happened[e]),
                    legal_ops=() if legal is None else tuple(OPS[o] for o in np.nonzero(legal[e].any(1))[0]),
                    log_prob=stats.at("log_prob", e),
                    entropy=stats.at("entropy", e),
                    value=stats.at("value", e),
                    **heads,
                )
            )

    def _transitions(self, before: SlotTable, table: SlotTable, actions: Ints, outcome: Outcome) -> None:
        """Emit one event per stage transition.

        A slot has at most three per step: the controller's, the rules', and the governor's, which ends in PRUNED. An
        open birth adds one.
        """
        is_wanted = self.hub.wants(events.Lifecycle)
        touched = np.zeros(table.stage.shape, dtype=bool)
        acted = outcome.happened & (actions[:, Head.OP] != Op.WAIT)
        touched[np.nonzero(acted)[0], actions[acted, Head.SLOT]] = True
        rolled_back = table.rollbacks > before.rollbacks
        replaced = table.serial != before.serial
        changed = (table.stage != before.stage) | (replaced & (table.serial >= 0))
        for e, s in np.argwhere(changed).tolist():
            was, now = int(before.stage[e, s]), int(table.stage[e, s])
            expelled = rolled_back[e] and table.cooldown[e, s] == COOLDOWN_TICKS
            path = _path(was, int(table.prev_stage[e, s]), now, expelled)
            for i, (a, b) in enumerate(pairwise(path)):
                cause = "controller" if touched[e, s] and i == 0 else "rules"
                if expelled and i == len(path) - 2:
                    cause = "governor"
                self._count(e, b)
                if is_wanted:
                    self._transition(before, table, (e, s), a, b, cause, i)

    def governed(self, alarms: Sequence[Alarm]) -> None:
        """Emit the governor's alarms of this step. An alarm with a text is emitted as a health event too."""
        for alarm in alarms:
            env = self.envs[alarm.env]
            self.hub.emit(
                events.GovernorAlarm(
                    env=env, episode=self._episode[alarm.env], step=alarm.step, alarm=alarm.alarm, action=alarm.action,
                    value=alarm.value, limit=alarm.limit, restored_step=alarm.restored_step,
                )
            )  # fmt: skip
            if alarm.text:
                text = f"env {env} step {alarm.step}: {alarm.text}"
                self.hub.emit(events.Health(source="governor", severity="warning", text=text))

    def _count(self, env: int, now: int) -> None:
        which = (SeedStage.GERMINATED, SeedStage.FOSSILIZED, SeedStage.PRUNED)
        if now in which:
            self._counts[env, which.index(SeedStage(now))] += 1

    def _transition(
        self, before: SlotTable, table: SlotTable, at: tuple[int, int], was: int, now: int, cause: str, nth: int
    ) -> None:
        source = table if table.serial[at] >= 0 else before  # an emptied slot has no seed data any more
        # the contribution that was known when the move was decided: that of a new seed is measured after it
        known = before if now != SeedStage.GERMINATED and before.serial[at] == source.serial[at] else None
        self.hub.emit(
            events.Lifecycle(
                **self._place(table, at[0]),
                slot=self.slots[at[1]],
                seed=int(source.serial[at]),
                blueprint=blueprint_name(int(source.blueprint[at])),
                was=STAGE[was],
                now=STAGE[now],
                cause=cause,
                params=int((before if now in COOLING else source).params[at]),
                alpha=float(source.alpha[at]),
                dwell_epochs=0 if was == SeedStage.DORMANT or nth else int(before.dwell[at]),
                contribution=None if known is None else number(known.contribution[at]),
                contribution_se=None if known is None else number(known.contribution_se[at]),
            )
        )

    def _steps(self, table: SlotTable, stats: StepStats, unmeasured: Collection[str]) -> None:
        """Emit one step event per environment. Non-finite losses and qualities are measurements and are emitted."""
        used = np.unique(table.blueprint)
        name = np.full(int(used[-1]) + 2, "", dtype=object)  # index: blueprint + 1, since an empty slot has −1
        name[used + 1] = [blueprint_name(b) if b >= 0 else "" for b in used.tolist()]
        columns: dict[str, Iterable[Any]] = {
            "env": self.envs,
            "episode": self._episode,
            "step": table.step.tolist(),
            "world": self.worlds,
            "op": [OPS[op] for op in table.last_op.tolist()],
            "committed_quality": map(number, table.committed_quality.tolist()),
            "params": (self.host_params + table.params.sum(1)).tolist(),
            "train_macs": (macs or None for macs in table.train_macs.tolist()),
            "measure_macs": (macs or None for macs in table.measure_macs.tolist()),
            "stages": map(tuple, table.stage.tolist()),
            "alphas": map(tuple, table.alpha.tolist()),
            "blueprints": map(tuple, name[table.blueprint + 1].tolist()),
        }
        columns |= {c: getattr(table, c).tolist() for c in ("quality", "val_loss", "train_loss") if c not in unmeasured}
        columns |= {c: stats.column(c, table.num_envs) for c in ("reward", "utility", "value")}
        columns |= {c: [None] * table.num_envs for c in unmeasured}
        names = tuple(columns)
        for is_alive, row in zip(self._alive.tolist(), zip(*columns.values(), strict=True), strict=True):
            if is_alive:
                self.hub.emit(events.Step(**dict(zip(names, row))))  # noqa: B905  (strict takes a tenth of the time)

    def _gradients(self, table: SlotTable) -> None:
        growing = (table.stage >= SeedStage.TRAINING) & (table.stage <= SeedStage.HOLDING) & self._alive[:, None]
        for e, s in np.argwhere(growing & ~np.isnan(table.grad_norm)).tolist():
            self.hub.emit(
                events.Gradient(
                    **self._place(table, e),
                    slot=self.slots[s],
                    norm=float(table.grad_norm[e, s]),
                    ratio=number(table.grad_ratio[e, s]),
                    health=number(table.grad_health[e, s]),
                )
            )

    def worth(self, table: SlotTable, worths: Sequence[Worth]) -> None:
        """Emit the worth of every environment's seeds after a step."""
        if not self.hub.wants(events.SeedWorth):
            return
        for e, worth in enumerate(worths):
            if not self._alive[e]:
                continue
            for i, name in enumerate(worth.slots):
                s = self.slots.index(name)
                others = np.delete(worth.interaction[i], i)
                self._worth(
                    table, e, s,
                    committed=worth.fossils[i],
                    contribution=number(worth.contribution[i]), contribution_se=number(worth.contribution_se[i]),
                    solo=number(worth.solo[i]), solo_se=number(worth.solo_se[i]),
                    shapley=number(worth.shapley[i]), shapley_se=number(worth.shapley_se[i]),
                    interaction=float(np.nansum(others)) if np.isfinite(others).any() else None,
                )  # fmt: skip
            for name, (value, se) in worth.prospect.items():
                self._worth(table, e, self.slots.index(name), prospect=number(value), prospect_se=number(se))

    def _worth(self, table: SlotTable, e: int, s: int, **numbers: Any) -> None:
        self.hub.emit(
            events.SeedWorth(
                **self._place(table, e),
                slot=self.slots[s],
                seed=int(table.serial[e, s]),
                blueprint=blueprint_name(int(table.blueprint[e, s])),
                **numbers,
            )
        )

    # -- each episode

    def begin(
        self, worlds: Sequence[int] | None = None, episode: int | None = None, host_params: Ints | None = None
    ) -> None:
        """Start new episodes in all environments, in these worlds and with hosts of this size.

        `episode` is their number; default: the next one.
        """
        self.host_params = self.host_params if host_params is None else host_params
        if episode is not None:
            self._episode = [episode] * len(self.envs)
        elif self._before is not None:
            self._episode = [n + 1 for n in self._episode]
        self.worlds = self.worlds if worlds is None else list(worlds)
        self._before = None
        self._counts[:] = 0

    def episode(self, table: SlotTable, names: Sequence[str], **columns: Sequence[Number] | None) -> None:
        """Emit the end of every environment's episode. `columns` are further fields of the event, one value each."""
        if not self.hub.wants(events.Episode):
            return
        alive = (table.stage >= SeedStage.BLENDING) & (table.stage <= SeedStage.FOSSILIZED)
        params = network_params(table, self.host_params).tolist()
        host_params = self.host_params.tolist()
        for e in range(len(self.envs)):
            germinated, fossilized, pruned = self._counts[e].tolist()
            structure = {self.slots[s]: blueprint_name(int(table.blueprint[e, s])) for s in np.nonzero(alive[e])[0]}
            more = {name: column[e] for name, column in columns.items() if column is not None}
            self.hub.emit(
                events.Episode(
                    env=self.envs[e],
                    episode=self._episode[e],
                    world=self.worlds[e],
                    name=names[e],
                    steps=int(table.step[e]),
                    quality=float(table.quality[e]),
                    quality_best=number(table.quality_best_env[e]),
                    params=params[e],
                    host_params=host_params[e],
                    germinated=germinated,
                    fossilized=fossilized,
                    pruned=pruned,
                    rollbacks=int(table.rollbacks[e]),
                    structure=structure,
                    **more,
                )
            )

    # -- events of the run

    def run_event(self, event: Event) -> None:
        """Emit an event of the run as a whole."""
        if self.is_rank_zero:
            self.hub.emit(event)

    def phases(self, phases: PhaseTimers, *, last: bool = False) -> None:
        """Emit the time spent per phase so far; at most once a second, and once more at the end."""
        now = self._clock()
        if (
            not self.is_rank_zero
            or (now - self._profiled < PHASE_EVERY_S and not last)
            or not self.hub.wants(events.PhaseProfile)
        ):
            return
        self._profiled = now
        for name, total in phases.totals().items():
            self.hub.emit(
                events.PhaseProfile(phase=name, wall_ms=total.wall_ms, cpu_ms=total.cpu_ms, calls=total.calls)
            )
