"""The governor: sees that a host is sick, and takes it back to when it was sound.

    governor.guard(env, act, …)          an error in one environment is that environment's trouble alone
    governor.judge(table, …) → sick      what losses and weights say of all environments at once
    governor.roll_back(env, table)       its snapshot again, exactly; whatever grew since is gone; time goes on

An error in a rollback or in the first snapshot stays in its environment, too. It does not train and stands as its
snapshot remembers it until a rollback succeeds; every step tries again, and the penalty is paid once.

Errors, and numbers that are not finite, are undone at once. A loss far above what guessing costs (divergence), or back
at it after doing better (collapse), is undone when it lasts and training shows it, too: who only validates badly
is finding the way after a change of structure. Sick losses never enter the history that later ones are judged by.

Legend: E environments, S slots, W losses remembered.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.forking import ForkPoint, Norm
from esper.kasmina.lifecycle import Effect, EffectKind, expel
from esper.leyline.errors import ConfigError, TrainingError
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.leyline.stages import SeedStage
from esper.tolaria.weight_average import WeightAverage

if TYPE_CHECKING:
    from esper.tolaria.host_network import HostNetwork

P = ParamSpec("P")
R = TypeVar("R")
ALARMS = ("", "exception", "nonfinite_loss", "nonfinite_weights", "divergence", "collapse")
"""What an alarm is called; the first is none, and the last two may pass by themselves."""
DIVERGENCE = ALARMS.index("divergence")
MAD_TO_SD = 1.4826
"""The median distance from the median, times this, is the standard deviation of bell-shaped numbers."""
TIME_GOES_ON = ("step", "next_serial", "last_op", "rollbacks")
"""Columns of an environment that a rollback leaves as they are: what has been done was done."""


class GovernorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a host counts as sick. Losses are validation losses; chance is the loss of guessing, ln(classes)."""

    window: int = 20
    """Sound losses remembered."""
    enough: int = 5
    """So many of them before their median and spread are believed."""
    spreads: float = 6.0
    """Divergence: a loss so many spreads above the median …"""
    above_chance: float = 1.25
    """… and above so many times chance."""
    early: float = 4.0
    """Divergence before there are enough losses: above so many times chance."""
    lead_spreads: float = 3.0
    """A host that was better than chance by so many spreads can collapse …"""
    least_lead: float = 0.02
    """… if it was so by this share of chance: nearer to chance a loss may just be finding its way …"""
    clear_lead: float = 0.4
    """… and whatever the spread if it was so by this share: losses that fall fast are widely spread, too."""
    lead_left: float = 0.1
    """Collapse: no more than this share of that lead is left."""
    patience: int = 3
    """Divergences and collapses in a row until the environment is rolled back."""
    snapshot_every: int = 5
    """Steps between snapshots of a sound environment."""
    give_up: int = 3
    """Steps in a row with an error in *every* environment: a fault of the program or the machine, so the run ends."""

    def __post_init__(self) -> None:
        for name in ("window", "enough", "patience", "snapshot_every", "give_up"):
            if getattr(self, name) < 1:
                raise ConfigError(f"governor.{name} must be ≥ 1, got {getattr(self, name)}")
        if self.enough > self.window:
            raise ConfigError(f"governor.enough must be ≤ window ({self.window}), got {self.enough}")
        for name in ("spreads", "lead_spreads", "least_lead", "clear_lead"):
            if not 0.0 <= getattr(self, name) < inf:
                raise ConfigError(f"governor.{name} must be ≥ 0, got {getattr(self, name)}")
        for name in ("above_chance", "early"):
            if not 1.0 <= getattr(self, name) < inf:
                raise ConfigError(f"governor.{name} must be ≥ 1, got {getattr(self, name)}")
        if self.least_lead > self.clear_lead:
            raise ConfigError(f"governor.least_lead must be ≤ clear_lead ({self.clear_lead}), got {self.least_lead}")
        if not 0.0 <= self.lead_left < 1.0:
            raise ConfigError(f"governor.lead_left must lie in [0, 1), got {self.lead_left}")


@dataclass(frozen=True, slots=True)
class Alarm:
    """What the governor saw in one environment, and did."""

    env: int
    step: int
    alarm: str
    """One of `ALARMS`."""
    action: str
    """"seen" (training is sound), "counted", "rolled back" or "not restored" (the rollback failed and is retried)."""
    value: float | None = None
    limit: float | None = None
    restored_step: int | None = None
    text: str = ""
    """Of an error that has not been told before: what it was, and where."""


class Verdict(NamedTuple):
    alarm: Ints  # [E] index into ALARMS
    value: Floats  # [E] the number that was judged
    limit: Floats  # [E] what it was judged by; NaN where there is no limit


def _medians(rows: Floats, counts: Ints) -> Floats:
    """[E] of the numbers in each row [E, W], NaN being none; NaN of a row without numbers."""
    ordered = np.sort(rows, axis=1)  # NaN goes last
    every, last = np.arange(len(rows)), np.maximum(counts - 1, 0)
    return np.asarray((ordered[every, last // 2] + ordered[every, (last + 1) // 2]) / 2.0)


def typical(losses: Floats) -> tuple[Ints, Floats, Floats]:
    """[E] each: how many losses there are in [E, W], their median, and their spread, which outliers do not widen."""
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
) -> Verdict:
    """What is wrong with each environment, by its sound losses so far [E, W] and this epoch's numbers [E]."""
    counts, median, spread = typical(losses)
    known = counts >= config.enough
    usual = np.fmax(config.above_chance * chance, median + config.spreads * spread)
    diverged = np.where(known, usual, config.early * chance)
    lead = chance - median
    needed = np.clip(config.lead_spreads * spread, config.least_lead * chance, config.clear_lead * chance)
    collapsed = np.where(known & (lead > needed), chance - config.lead_left * lead, inf)
    bad_loss, nothing = np.where(np.isfinite(val_loss), train_loss, val_loss), np.full(len(val_loss), np.nan)
    found = [failed, ~np.isfinite(bad_loss), ~np.isfinite(vital), val_loss > diverged, val_loss >= collapsed]
    alarm = np.zeros(len(val_loss), dtype=np.int64)
    value, limit = np.full((2, len(val_loss)), np.nan)
    for number, where in reversed([*enumerate(found, 1)]):  # the gravest is written last
        if where.any():
            alarm[where] = number
            value[where] = (bad_loss, bad_loss, vital, val_loss, val_loss)[number - 1][where]
            limit[where] = (nothing, nothing, nothing, diverged, collapsed)[number - 1][where]
    return Verdict(alarm, value, limit)


class Snapshot:
    """One environment as it was when it was sound: host and fossils with all that belongs to them.

    It holds on to the very tensors it was taken of and writes back into them, so whoever refers to them (optimiser,
    average, hooks) sees what was restored. Live seeds are not part of it: a rollback drops them.
    """

    def __init__(self, network: HostNetwork) -> None:
        self.network = network
        self.tensors: list[Tensor] = []
        self.copies: list[Tensor] = []

    @property
    def is_taken(self) -> bool:
        return bool(self.tensors)

    @torch.no_grad()
    def take(self) -> None:
        """Remember how it is now, in the memory of the snapshot before if nothing was committed since.

        Raises if anything is not finite; the snapshot before stays.
        """
        body, optimizer, average = self.network.body, self.network.optimizer, self.network.average
        fossils = [slot.name for slot in body.slots.values() if slot.stage == SeedStage.FOSSILIZED]
        kept = [body.model, *(body.slots[name] for name in fossils)]
        params = [p for module in kept for p in module.parameters()]
        state = {p: dict(optimizer.state[p]) for p in params if p in optimizer.state}
        averages = dict(zip(average.params, average.average, strict=True))
        tensors = [*params, *(b for module in kept for b in module.buffers()), *(averages[p] for p in params)]
        tensors += state_tensors(optimizer, params)
        if not bool(largest(tensors).isfinite()):  # sync: once per snapshot
            raise TrainingError("weights, statistics of norms or optimiser state are not finite: no snapshot is taken")
        options = [_options(group) for group in optimizer.param_groups]
        if len(tensors) == len(self.tensors) and all(a is b for a, b in zip(tensors, self.tensors, strict=True)):
            torch._foreach_copy_(self.copies, tensors)
        else:
            copies = [t.detach().clone() for t in tensors]
            self.tensors, self.copies = tensors, copies
        self.params, self.state, self.updates = params, state, average.updates
        self.fossils, self.options = fossils, options
        self.forking = body.cannot_fork, set(body.proven_forks)

    @torch.no_grad()
    def restore(self) -> None:
        """Bit by bit as it was; asks for no memory, since there may be none."""
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
        body.cannot_fork, body.proven_forks = self.forking[0], set(self.forking[1])

    def state_dict(self) -> dict[str, Any]:
        """Return what was remembered. The optimiser's tensors are among `copies`; here stand their names."""
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
        """Remember what another process remembered, of a network that has loaded that process's state."""
        body, optimizer, average = self.network.body, self.network.optimizer, self.network.average
        self.fossils = list(state["fossils"])
        kept = [body.model, *(body.slots[name] for name in self.fossils)]
        self.params = [p for module in kept for p in module.parameters()]
        self.state = {
            p: {k: optimizer.state[p][k] if v is None else v[0] for k, v in values.items()}
            for p, values in zip(self.params, state["state"], strict=True)
            if values is not None
        }
        averages = dict(zip(average.params, average.average, strict=True))
        self.tensors = [*self.params, *(b for m in kept for b in m.buffers()), *(averages[p] for p in self.params)]
        self.tensors += [v for each in self.state.values() for v in each.values() if isinstance(v, Tensor)]
        self.copies = [torch.empty_like(t).copy_(c) for t, c in zip(self.tensors, state["copies"], strict=True)]
        self.updates, self.options = state["updates"], [dict(options) for options in state["options"]]
        self.forking = state["forking"][0], {ForkPoint(*point) for point in state["forking"][1]}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What an optimiser's group is told: everything but its parameters."""
    told = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in told.items()}


class Governor:
    """Watches over the environments of one engine."""

    def __init__(self, networks: Sequence[HostNetwork], table: SlotTable, config: GovernorConfig, classes: int) -> None:
        self.config, self.chance = config, log(max(classes, 1))
        self.losses: Floats = np.full((len(networks), config.window), np.nan)  # [E, W] sound ones, the newest last
        self.counted = np.zeros(len(networks), dtype=np.int64)  # [E] divergences and collapses in a row
        self.alarms: list[Alarm] = []
        """Of the last step."""
        self.snapshots = [Snapshot(network) for network in networks]
        self._rows, self._losses = table.clone(), self.losses.copy()  # table and history as of each snapshot
        self._failures: dict[int, Exception] = {}  # of this step
        self._broken: dict[int, Exception] = {}  # environments whose rollback failed, until one succeeds
        self._told: set[tuple[str, str]] = set()
        self._streak: list[Exception] = []  # the first error of each step on which every environment failed
        self._sound = np.ones(len(networks), dtype=bool)  # [E] when last judged
        self._begun = False

    # -- each step

    def begin(self, table: SlotTable) -> None:
        """A step begins; before the first, everything as it stands is what there is to go back to."""
        self.alarms, self._failures = [], dict(self._broken)
        if not self._begun:
            envs = range(len(self.snapshots))
            self._rows.restore(table, list(envs))
            for env in envs:
                self.guard(env, self.keep, env, table)
            self._begun = True

    def guard(self, env: int, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Do something for one environment, unless it has failed in this step; an error is its own trouble."""
        if env in self._failures:
            return None
        try:
            return act(*args, **kwargs)
        except Exception as error:
            _let_go(error)
            self._failures[env] = error
            return None

    def keep(self, env: int, table: SlotTable) -> None:
        """What this environment would go back to from now on; not while something looks wrong."""
        if self._sound[env]:
            self.snapshots[env].take()
            self._rows.restore(table, [env])
            self._losses[env] = self.losses[env]

    def judge(self, table: SlotTable, val_loss: Floats, train_loss: Floats, vital: Floats) -> list[int]:
        """Who must be rolled back; the losses of the sound enter their history."""
        failed = np.array([env in self._failures for env in range(len(self.snapshots))])
        verdict = judge(self.losses, val_loss, train_loss, vital, failed, chance=self.chance, config=self.config)
        sound, passing = verdict.alarm == 0, verdict.alarm >= DIVERGENCE
        counts = passing & (train_loss >= verdict.limit)
        self.counted = np.where(counts, self.counted + 1, 0)
        sick = ~sound & (~passing | (self.counted >= self.config.patience))
        self.losses[sound, :-1] = self.losses[sound, 1:]
        self.losses[sound, -1] = val_loss[sound]
        for env in np.nonzero(~sound)[0].tolist():
            action = "rolled back" if sick[env] else "counted" if counts[env] else "seen"
            self._raise(env, table, ALARMS[verdict.alarm[env]], action, verdict.value[env], verdict.limit[env])
        self._give_up_if_everybody_failed()
        self._sound = sound
        return np.nonzero(sick)[0].tolist()

    def end(self, table: SlotTable) -> None:
        """A step has ended, and all of it is written down: now and then the sound are what there is to go back to."""
        due = self._sound & (table.step % self.config.snapshot_every == 0)
        for env in np.nonzero(due)[0].tolist():
            self.guard(env, self.keep, env, table)
            if env in self._failures:
                self._raise(env, table, "exception", "seen")  # it goes on, with the snapshot before

    def roll_back(self, env: int, table: SlotTable) -> list[Effect]:
        """This environment as its snapshot has it, but for time; what grew since is expelled and cools down.

        An error leaves it broken: it has failed in this step and in all that follow until a rollback succeeds.
        """
        fossils = self._rows.stage[env] == SeedStage.FOSSILIZED  # [S]
        self._restore_row(env, table, fossils)
        newer = np.zeros(table.stage.shape, dtype=bool)
        newer[env] = ~fossils
        effects = expel(table, newer, fossils=True)
        self.losses[env], self.counted[env] = self._losses[env], 0
        self._failures.pop(env, None)
        self._broken.pop(env, None)
        self.guard(env, self._restore_network, env, table, fossils)
        if env in self._failures:
            self._broken[env] = self._failures[env]
            self._tell_broken(env, table)
        return effects

    def _restore_network(self, env: int, table: SlotTable, fossils: Bools) -> None:
        """Drop what grew since the snapshot, then write it back; where none could be taken yet, take it now."""
        snapshot, network = self.snapshots[env], self.snapshots[env].network
        # by what the slots hold, not by what the table says: surgery may have failed half-way
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
        """Of the slots only fossils go back: an empty one stays empty, and a cooldown runs on."""
        now = table.rows([env])
        table.restore(self._rows, [env])
        for f in fields(SlotTable):
            column, before = getattr(table, f.name), getattr(now, f.name)
            if f.name in TIME_GOES_ON:
                column[env] = before[0]
            elif f.metadata["seed"]:
                column[env, ~fossils] = before[0, ~fossils]
        table.rollbacks[env] += env not in self._broken  # tried again: still the same one

    @property
    def is_failing(self) -> bool:
        """Whether every environment failed in the last step. The errors themselves are no part of `state_dict`."""
        return bool(self._streak)

    def state_dict(self) -> dict[str, Any]:
        """Return what it knows between two steps."""
        return {
            "losses": self.losses,
            "counted": self.counted,
            "sound": self._sound,
            "told": sorted(self._told),
            "begun": self._begun,
            "rows": self._rows.arrays(),
            "row_losses": self._losses,
            "snapshots": [snapshot.state_dict() for snapshot in self.snapshots] if self._begun else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the governor did that returned `state`; the networks have loaded their own states."""
        self.losses[...], self._losses[...] = state["losses"], state["row_losses"]
        self.counted, self._sound = state["counted"].copy(), state["sound"].copy()
        self._told, self._begun = set(state["told"]), state["begun"]
        for f in fields(SlotTable):
            getattr(self._rows, f.name)[...] = state["rows"][f.name]
        for snapshot, kept in zip(self.snapshots, state["snapshots"], strict=self._begun):
            snapshot.load_state_dict(kept)

    # -- what is told

    def _tell_broken(self, env: int, table: SlotTable) -> None:
        text = self._tell_once(self._failures[env], env, int(table.step[env]))
        self.alarms = [
            replace(a, action="not restored", restored_step=None, text=a.text or text) if a.env == env else a
            for a in self.alarms
        ]

    def _raise(
        self, env: int, table: SlotTable, alarm: str, action: str, value: float = np.nan, limit: float = np.nan
    ) -> None:
        step, error = int(table.step[env]), self._failures.get(env)
        self.alarms.append(
            Alarm(
                env=env,
                step=step,
                alarm=alarm,
                action=action,
                value=float(value) if error is None else None,
                limit=None if np.isnan(limit) else float(limit),
                restored_step=int(self._rows.step[env]) if action == "rolled back" else None,
                text="" if error is None else self._tell_once(error, env, step),
            )
        )

    def _tell_once(self, error: Exception, env: int, step: int) -> str:
        text, kind = briefly(error), (type(error).__name__, _places(error))
        if kind in self._told:
            return ""
        self._told.add(kind)
        warnings.warn(f"an error in environment {env}, step {step}; the others go on: {text}", stacklevel=2)
        return text

    def _give_up_if_everybody_failed(self) -> None:
        if len(self._failures) < len(self.snapshots):
            self._streak = []
            return
        self._streak.append(self._failures[min(self._failures)])
        if len(self._streak) >= self.config.give_up:
            first = self._streak[0]
            raise TrainingError(
                f"every environment failed, {len(self._streak)} steps in a row; this is no sickness of one host. "
                f"The first error: {briefly(first)}"
            ) from first


def briefly(error: BaseException) -> str:
    """An error in one line: what it was, and the innermost places it came from."""
    said = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {said} ({_places(error)})"


def _places(error: BaseException) -> str:
    innermost = traceback.extract_tb(error.__traceback__)[-3:]
    return " > ".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in innermost)


def _let_go(error: BaseException | None) -> None:
    """Forget what the frames of an error hold: after an out-of-memory error that may be most of the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def vital_tensors(felt: Sequence[nn.Module], average: WeightAverage, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What must stay finite: weights, their averages, the optimiser's state of them, and the statistics of norms."""
    averages = dict(zip(average.params, average.average, strict=True))
    params = [p for module in felt for p in module.parameters()]
    norms = [m for module in felt for m in module.modules() if isinstance(m, Norm)]
    found = [*params, *(averages[p] for p in params), *state_tensors(optimizer, params)]
    return found + [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]


def state_tensors(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """The tensors that an optimiser keeps for these parameters."""
    return [v for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]


@torch.no_grad()
def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude among them; NaN if any is NaN. On the device."""
    numbers = [t for t in tensors if t.is_floating_point() and t.numel()]
    return torch.stack([n.float() for n in torch._foreach_norm(numbers, inf)]).max()
