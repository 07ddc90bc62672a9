"""The governor: detect a failing environment and roll it back to its last snapshot.

    governor.guard(env, act, …)          call act(…); an error affects this environment only
    governor.judge(table, …) → envs      the environments to roll back, by their losses and weights
    governor.roll_back(env, table)       restore the snapshot exactly; drop newer seeds; keep the step counter

An error in a rollback or in the first snapshot affects its environment only, too. That environment does not train and
reports the values of its snapshot until a rollback succeeds. Every step retries; the penalty is charged once.

Errors and numbers that are not finite cause a rollback at once. A loss far above chance (divergence), or back at chance
after being better (collapse), causes one when it lasts and the training loss shows it, too: a validation loss alone may
be high for a while after a structural change. Alarming losses do not enter the history that later ones are compared to.

Legend: E environments, S slots, W losses in the history.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.forking import ForkPoint
from esper.leyline.errors import TrainingError
from esper.leyline.lifecycle import Effect, EffectKind, expel
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.leyline.stages import SeedStage
from esper.tolaria.engine_config import GovernorConfig
from esper.tolaria.growing_network import largest, state_tensors

if TYPE_CHECKING:
    from esper.tolaria.engine import HostNetwork

P = ParamSpec("P")
R = TypeVar("R")
ALARMS = ("", "exception", "nonfinite_loss", "nonfinite_weights", "divergence", "collapse")
"""Names of the alarms. The first means no alarm; the last two may be transient."""
DIVERGENCE = ALARMS.index("divergence")
MAD_TO_SD = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""
NOT_RESTORED = ("step", "next_serial", "last_op", "rollbacks", "train_macs", "host_train_macs", "measure_macs")
"""Columns of the table that a rollback does not restore."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm in one environment and the governor's reaction."""

    env: int
    step: int
    alarm: str
    """One of `ALARMS`."""
    action: str
    """"seen" (no consequence), "counted", "rolled back" or "not restored" (the rollback failed and is retried)."""
    value: float | None = None
    limit: float | None = None
    restored_step: int | None = None
    text: str = ""
    """Type, message and location of an error that was not reported before; otherwise empty."""


class Judgment(NamedTuple):
    """The alarm of each environment."""

    alarm: Ints  # [E] index into ALARMS
    value: Floats  # [E] the number that caused the alarm
    limit: Floats  # [E] the limit that it exceeds; NaN where there is none


def _medians(rows: Floats, counts: Ints) -> Floats:
    """Return the median [E] of the numbers in each row [E, W]. NaN is skipped; a row without numbers gives NaN."""
    ordered = np.sort(rows, axis=1)  # NaN is sorted last
    every = np.arange(len(rows))
    last = np.maximum(counts - 1, 0)
    return np.asarray((ordered[every, last // 2] + ordered[every, (last + 1) // 2]) / 2.0)


def typical(losses: Floats) -> tuple[Ints, Floats, Floats]:
    """Return number, median and spread of the losses in each row [E, W]; the spread is robust against outliers."""
    counts = np.isfinite(losses).sum(axis=1)
    median = _medians(losses, counts)
    return counts, median, MAD_TO_SD * _medians(np.abs(losses - median[:, None]), counts)


def judge(
    losses: Floats,
    val_loss: Floats,
    train_loss: Floats,
    vital: Floats,
    failed: Bools,
    *,
    chance: float,
    config: GovernorConfig,
) -> Judgment:
    """Return the alarm of each environment, from its history of losses [E, W] and this epoch's numbers [E]."""
    counts, median, spread = typical(losses)
    has_history = counts >= config.enough
    usual = np.fmax(config.above_chance * chance, median + config.spreads * spread)
    diverged = np.where(has_history, usual, config.early * chance)
    lead = chance - median
    needed = np.clip(config.lead_spreads * spread, config.least_lead * chance, config.clear_lead * chance)
    collapsed = np.where(has_history & (lead > needed), chance - config.lead_left * lead, inf)
    bad_loss = np.where(np.isfinite(val_loss), train_loss, val_loss)
    alarm = np.zeros(len(val_loss), dtype=np.int64)
    value, limit = np.full((2, len(val_loss)), np.nan)
    causes = (  # condition, value and limit of each alarm after the first, in the order of `ALARMS`
        (failed, bad_loss, None),
        (~np.isfinite(bad_loss), bad_loss, None),
        (~np.isfinite(vital), vital, None),
        (val_loss > diverged, val_loss, diverged),
        (val_loss >= collapsed, val_loss, collapsed),
    )
    for number, (where, values, limits) in reversed([*enumerate(causes, 1)]):  # the most severe is written last
        alarm[where] = number
        value[where] = values[where]
        limit[where] = np.nan if limits is None else limits[where]
    return Judgment(alarm, value, limit)


class Governor:
    """Guards, judges and rolls back the environments of one engine."""

    def __init__(self, networks: Sequence[HostNetwork], table: SlotTable, config: GovernorConfig, classes: int) -> None:
        self.config = config
        self.chance = log(max(classes, 1))
        self.losses: Floats = np.full((len(networks), config.window), np.nan)  # [E, W] without alarm, newest last
        self.counted = np.zeros(len(networks), dtype=np.int64)  # [E] divergences and collapses in a row
        self.alarms: list[Alarm] = []
        """The alarms of the last step."""
        self.snapshots = [Snapshot(network) for network in networks]
        # table and history as of each snapshot
        self._rows, self._losses = table.clone(), self.losses.copy()
        self._failures: dict[int, Exception] = {}  # the error of each environment that failed in this step
        self._broken: dict[int, Exception] = {}  # environments whose rollback failed, until one succeeds
        self._reported: set[tuple[str, str]] = set()  # type and location of errors that were warned about
        self._streak: list[Exception] = []  # the first error of each step on which every environment failed
        self._sound = np.ones(len(networks), dtype=bool)  # [E] whether it had no alarm when last judged
        self._begun = False

    # -- each step

    def begin(self, table: SlotTable) -> None:
        """Start a step; before the first one, take a snapshot of every environment."""
        self.alarms = []
        self._failures = dict(self._broken)
        if not self._begun:
            envs = range(len(self.snapshots))
            self._rows.restore(table, list(envs))
            for env in envs:
                self.guard(env, self.keep, env, table)
            self._begun = True

    def guard(self, env: int, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Return act(…), or None if it raises or the environment has already failed in this step."""
        if env in self._failures:
            return None
        try:
            return act(*args, **kwargs)
        except Exception as error:
            _release_frames(error)
            self._failures[env] = error
            return None

    def keep(self, env: int, table: SlotTable) -> None:
        """Take a snapshot of an environment and of its table row, unless it had an alarm when last judged."""
        if self._sound[env]:
            self.snapshots[env].take()
            self._rows.restore(table, [env])
            self._losses[env] = self.losses[env]

    def judge(self, table: SlotTable, val_loss: Floats, train_loss: Floats, vital: Floats) -> list[int]:
        """Return the environments to roll back. Add the losses of those without alarm to their history."""
        failed = np.array([env in self._failures for env in range(len(self.snapshots))])
        judgment = judge(self.losses, val_loss, train_loss, vital, failed, chance=self.chance, config=self.config)
        sound, transient = judgment.alarm == 0, judgment.alarm >= DIVERGENCE
        counts = transient & (train_loss >= judgment.limit)
        self.counted = np.where(counts, self.counted + 1, 0)
        failing = ~sound & (~transient | (self.counted >= self.config.patience))
        self.losses[sound, :-1] = self.losses[sound, 1:]
        self.losses[sound, -1] = val_loss[sound]
        for env in np.nonzero(~sound)[0].tolist():
            action = "rolled back" if failing[env] else "counted" if counts[env] else "seen"
            self._raise(env, table, ALARMS[judgment.alarm[env]], action, judgment.value[env], judgment.limit[env])
        self._give_up_if_all_failed()
        self._sound = sound
        return np.nonzero(failing)[0].tolist()

    def end(self, table: SlotTable) -> None:
        """End a step, after its results were recorded: take the snapshots that are due."""
        due = self._sound & (table.step % self.config.snapshot_every == 0)
        for env in np.nonzero(due)[0].tolist():
            self.guard(env, self.keep, env, table)
            if env in self._failures:
                self._raise(env, table, "exception", "seen")  # training continues with the previous snapshot

    def roll_back(self, env: int, table: SlotTable) -> list[Effect]:
        """Restore an environment from its snapshot, except `NOT_RESTORED`; expel newer seeds; return the effects.

        After an error the environment counts as failed in this and every following step until a rollback succeeds.
        """
        fossils = self._rows.stage[env] == SeedStage.FOSSILIZED  # [S]
        self._restore_row(env, table, fossils)
        newer = np.zeros(table.stage.shape, dtype=bool)
        newer[env] = ~fossils
        effects = expel(table, newer, fossils=True)
        self.losses[env] = self._losses[env]
        self.counted[env] = 0
        self._failures.pop(env, None)
        self._broken.pop(env, None)
        self.guard(env, self._restore_network, env, table, fossils)
        if env in self._failures:
            self._broken[env] = self._failures[env]
            text = self._report_once(self._failures[env], env, int(table.step[env]))
            self.alarms = [
                replace(a, action="not restored", restored_step=None, text=a.text or text) if a.env == env else a
                for a in self.alarms
            ]
        return effects

    def _restore_network(self, env: int, table: SlotTable, fossils: Bools) -> None:
        """Drop newer seeds and restore the snapshot, or take one if there is none yet."""
        snapshot, network = self.snapshots[env], self.snapshots[env].network
        # use the slots, not the table: they differ if a structural change failed half-way
        held = [slot.seed is not None for slot in network.body.slots.values()]
        drops = [Effect(EffectKind.DROP, env, s) for s in np.nonzero(held & ~fossils)[0].tolist()]
        network.apply_effects(drops, table, env)
        network.average.resync()
        if snapshot.is_taken:
            snapshot.restore()
        else:
            snapshot.take()
        for name in network.body.slots:
            network.meter.forget(name)

    def _restore_row(self, env: int, table: SlotTable, fossils: Bools) -> None:
        """Restore the table row. Of the slots only fossils are restored: cooldowns continue."""
        now = table.rows([env])
        table.restore(self._rows, [env])
        for f in fields(SlotTable):
            column = getattr(table, f.name)
            before = getattr(now, f.name)
            if f.name in NOT_RESTORED:
                column[env] = before[0]
            elif f.metadata["seed"]:
                column[env, ~fossils] = before[0, ~fossils]
        table.rollbacks[env] += env not in self._broken  # a retry is not counted again

    @property
    def is_failing(self) -> bool:
        """Whether every environment failed in the last step. The errors themselves are not in `state_dict`."""
        return bool(self._streak)

    def state_dict(self) -> dict[str, Any]:
        """Return the governor's state between two steps."""
        return {
            "losses": self.losses,
            "counted": self.counted,
            "sound": self._sound,
            "reported": sorted(self._reported),
            "begun": self._begun,
            "rows": self._rows.arrays(),
            "row_losses": self._losses,
            "snapshots": [snapshot.state_dict() for snapshot in self.snapshots] if self._begun else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. The networks must have loaded their own states before."""
        self.losses[...], self._losses[...] = state["losses"], state["row_losses"]
        self.counted, self._sound = state["counted"].copy(), state["sound"].copy()
        self._reported = set(state["reported"])
        self._begun = state["begun"]
        self._rows.restore(SlotTable(**state["rows"]))
        for snapshot, saved in zip(self.snapshots, state["snapshots"], strict=self._begun):
            snapshot.load_state_dict(saved)

    # -- reporting

    def _raise(
        self, env: int, table: SlotTable, alarm: str, action: str, value: float = np.nan, limit: float = np.nan
    ) -> None:
        step, error = int(table.step[env]), self._failures.get(env)
        self.alarms.append(
            Alarm(
                env, step, alarm, action,
                value=float(value) if error is None else None,
                limit=None if np.isnan(limit) else float(limit),
                restored_step=int(self._rows.step[env]) if action == "rolled back" else None,
                text="" if error is None else self._report_once(error, env, step),
            )
        )  # fmt: skip

    def _report_once(self, error: Exception, env: int, step: int) -> str:
        text, kind = briefly(error), (type(error).__name__, _location(error))
        if kind in self._reported:
            return ""
        self._reported.add(kind)
        warnings.warn(f"an error in environment {env}, step {step}; the others continue: {text}", stacklevel=2)
        return text

    def _give_up_if_all_failed(self) -> None:
        if len(self._failures) < len(self.snapshots):
            self._streak = []
            return
        self._streak.append(self._failures[min(self._failures)])
        if len(self._streak) >= self.config.give_up:
            first = self._streak[0]
            raise TrainingError(
                f"every environment failed in {len(self._streak)} steps in a row, so the cause is not one host. "
                f"The first error: {briefly(first)}"
            ) from first


def briefly(error: BaseException) -> str:
    """Return an error as one line: type, message and innermost frames."""
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message} ({_location(error)})"


def _location(error: BaseException) -> str:
    innermost = traceback.extract_tb(error.__traceback__)[-3:]
    return " > ".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in innermost)


def _release_frames(error: BaseException | None) -> None:
    """Clear the frames of an error: after an out-of-memory error they may hold most of the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Snapshot:
    """A copy of one environment's host and fossils with their optimiser state and averages.

    `restore` writes into the tensors that the snapshot was taken of, so references to them (optimiser, average, hooks)
    stay valid. Live seeds are not part of it: a rollback drops them.
    """

    def __init__(self, network: HostNetwork) -> None:
        self.network = network
        self.tensors: list[Tensor] = []
        self.copies: list[Tensor] = []

    @property
    def is_taken(self) -> bool:
        """Whether there is a snapshot to restore."""
        return bool(self.tensors)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the current state, into the previous snapshot's memory if nothing was committed since.

        Raise TrainingError if anything is not finite; the previous snapshot is kept then.
        """
        body = self.network.body
        optimizer = self.network.optimizer
        average = self.network.average
        fossils = [slot.name for slot in body.slots.values() if slot.stage == SeedStage.FOSSILIZED]
        params, tensors = self._host_tensors(fossils)
        state = {p: dict(optimizer.state[p]) for p in params if p in optimizer.state}
        tensors += state_tensors(optimizer, params)
        if not bool(largest(tensors).isfinite()):  # sync: once per snapshot
            raise TrainingError("no snapshot is taken: weights, norm statistics or optimiser state are not finite")
        options = [_options(group) for group in optimizer.param_groups]
        if len(tensors) == len(self.tensors) and all(a is b for a, b in zip(tensors, self.tensors, strict=True)):
            torch._foreach_copy_(self.copies, tensors)
        else:
            self.tensors = tensors
            self.copies = [t.detach().clone() for t in tensors]
        self.params = params
        self.state = state
        self.updates = average.updates
        self.fossils = fossils
        self.options = options
        self.forking = body.forking.failure, set(body.forking.proven)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state bit for bit. Allocates next to no memory, because there may be none left."""
        body, optimizer = self.network.body, self.network.optimizer
        torch._foreach_copy_(self.tensors, self.copies)
        for p in self.params:
            if p in self.state:
                optimizer.state[p] = dict(self.state[p])
            else:
                optimizer.state.pop(p, None)
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(_options(options))
        self.network.average.updates = self.updates
        body.forking.failure = self.forking[0]
        body.forking.proven = set(self.forking[1])

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshot. Tensors of the optimiser state are in `copies`; `state` has None in their place."""
        return {
            "fossils": list(self.fossils),
            "copies": list(self.copies),
            "state": [
                {k: None if isinstance(v, Tensor) else (v,) for k, v in self.state[p].items()}
                if p in self.state
                else None
                for p in self.params
            ],
            "updates": self.updates,
            "options": [dict(options) for options in self.options],
            "forking": (self.forking[0], tuple((p.at_input, p.name) for p in sorted(self.forking[1]))),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned in another process. The network must have loaded its own state before."""
        optimizer = self.network.optimizer
        self.fossils = list(state["fossils"])
        self.params, self.tensors = self._host_tensors(self.fossils)
        self.state = {
            p: {k: optimizer.state[p][k] if v is None else v[0] for k, v in values.items()}
            for p, values in zip(self.params, state["state"], strict=True)
            if values is not None
        }
        self.tensors += [v for each in self.state.values() for v in each.values() if isinstance(v, Tensor)]
        self.copies = [torch.empty_like(t).copy_(c) for t, c in zip(self.tensors, state["copies"], strict=True)]
        self.updates = state["updates"]
        self.options = [dict(options) for options in state["options"]]
        self.forking = state["forking"][0], {ForkPoint(*point) for point in state["forking"][1]}

    def _host_tensors(self, fossils: Sequence[str]) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Return the parameters of host and fossils, and these with their buffers and averages."""
        body, average = self.network.body, self.network.average
        modules = [body.model, *(body.slots[name] for name in fossils)]
        params = [p for module in modules for p in module.parameters()]
        averages = average.by_tensor()
        live: list[Tensor] = [*params, *(b for module in modules for b in module.buffers())]
        return params, [*live, *(averages[t] for t in live if t in averages)]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an optimiser group: everything but its parameters."""
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
