"""Rule-based controller: grow when learning stalls, commit seeds that measurably help, prune the others.

The first rule that applies is used, per environment:

1. HOLDING: commit if the contribution is above zero by z standard errors. Prune if it is below the threshold by as
   much, if quality is lower than when the seed was planted, or when `holding_patience` is exceeded.
2. BLENDING: prune if quality without the seed would be higher by more than two points and z standard errors.
   TRAINING: prune only a seed that does not pass its gate; it cannot affect the host's quality yet.
3. Otherwise, once the host's loss has settled and its quality has stalled: plant the next blueprint that has not
   failed recently, in the free slot that was tried least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from esper.leyline.actions import BLUEPRINTS, Head, Op
from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.slot_table import HISTORY, Bools, Floats, Ints, SlotTable
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers.simple import wait_everywhere

Stage = SeedStage


class HeuristicConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Thresholds of the heuristic. Qualities are fractions (accuracy 0 to 1)."""

    plateau_epochs: int = 3
    """Learning has stalled if the best quality of this many epochs, 1 to 9, is not `plateau_gain` above the best
    before."""
    plateau_gain: float = 0.005
    """Learning counts as stalled if quality gains less than this, ≥ 0."""
    settled_epochs: int = 3
    """The loss has settled after this many consecutive epochs, 1 to 9, with a change within `settled_band`."""
    settled_band: tuple[float, float] = (-0.05, 0.03)
    """A settled validation loss changes per epoch by a fraction between these two bounds, the lower one first."""
    first_epoch: int = 5
    """Seeds may be planted from this epoch on, ≥ 0."""
    loss_of_quality: float = 0.02
    """A seed that loses this much quality, ≥ 0, is pruned: against the network without it in BLENDING, against the
    quality at germination in HOLDING."""
    training_patience: int = 20
    """A seed that has not passed its gate after this many epochs in TRAINING, ≥ 0, is pruned."""
    least_contribution: float = 0.005
    """A seed whose contribution is below this value by z standard errors is pruned; any finite number, in units of
    quality."""
    holding_patience: int = 5
    """A seed that is still undecided after this many epochs in HOLDING, ≥ 0, is pruned."""
    z: float = 2.5
    """A contribution must differ from a threshold by this many standard errors, ≥ 0."""
    penalty: float = 2.0
    """A blueprint gets this penalty, ≥ 0, per pruned seed. It halves each epoch; blueprints with 3 or more are
    skipped."""
    blueprints: tuple[str, ...] = (
        "conv_light", "conv_heavy", "attention", "norm", "depthwise",
        "mlp_small", "mlp", "lora_large", "lora",
    )  # fmt: skip
    """These built-in blueprints are tried in this order. Slots skip those that do not fit their features."""

    def __post_init__(self) -> None:
        for name in ("plateau_epochs", "settled_epochs"):
            if not 0 < getattr(self, name) < HISTORY:
                raise ConfigError(
                    f"{name} must lie in 1…{HISTORY - 1}, the length of the history; got {getattr(self, name)}"
                )
        for name in ("plateau_gain", "first_epoch", "loss_of_quality", "training_patience", "holding_patience", "z",
                     "penalty"):  # fmt: skip
            if not 0 <= getattr(self, name) < np.inf:
                raise ConfigError(f"{name} must be ≥ 0 and finite, got {getattr(self, name)}")
        if not np.isfinite(self.least_contribution):
            raise ConfigError(f"least_contribution must be a finite number, got {self.least_contribution}")
        if not self.settled_band[0] < self.settled_band[1]:
            raise ConfigError(f"settled_band must be a lower and a higher bound, got {self.settled_band}")
        for name in self.blueprints:
            if name not in BLUEPRINTS:
                raise unknown_name("blueprint", name, BLUEPRINTS)


MEMORIES = ("settled", "penalties", "tried", "slot_tries")


class Heuristic:
    """Rule-based controller.

    Stores, per environment, whether the loss has settled and which blueprints failed recently.
    """

    def __init__(self, config: HeuristicConfig | None = None) -> None:
        self.config = config or HeuristicConfig()
        self.order = [BLUEPRINTS.index(b) for b in self.config.blueprints]
        self.settled = np.zeros(0, dtype=bool)
        self.penalties = np.zeros((0, len(BLUEPRINTS)))
        self.tried = np.zeros(0, dtype=np.int64)
        self.slot_tries = np.zeros((0, 0), dtype=np.int64)

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return actions [E, 8] by the rules above."""
        self._remember(table)
        actions = wait_everywhere(table.num_envs)
        free = np.ones(table.num_envs, dtype=bool)
        for op, where in self._proposals(table):
            legal_slots = legal[:, op] & where & free[:, None]
            envs = legal_slots.any(axis=1)
            # least tried slot first
            order = np.where(legal_slots, -self.slot_tries if op == Op.GERMINATE else 0, -1000)
            actions[envs, Head.OP], actions[envs, Head.SLOT] = op, order.argmax(axis=1)[envs]
            actions[envs, Head.ALPHA_SPEED] = 0  # INSTANT
            free &= ~envs
        for e in np.nonzero(actions[:, Head.OP] == Op.GERMINATE)[0]:
            actions[e, Head.BLUEPRINT] = self._choose(int(e), table.takes[actions[e, Head.SLOT]])
            self.slot_tries[e, actions[e, Head.SLOT]] += 1
        pruned = np.nonzero(actions[:, Head.OP] == Op.PRUNE)[0]
        self.penalties[pruned, table.blueprint[pruned, actions[pruned, Head.SLOT]]] += self.config.penalty
        return actions

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, for a checkpoint."""
        return {name: getattr(self, name).copy() for name in MEMORIES}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`. Raise ConfigError if an array is missing or has another type."""
        columns = {name: np.asarray(state[name]) for name in MEMORIES if name in state}
        for name, blank in Heuristic().state_dict().items():
            if name not in columns or columns[name].dtype != blank.dtype or columns[name].ndim != blank.ndim:
                raise ConfigError(f"the state is not one of a heuristic controller: {name!r} is {columns.get(name)!r}")
        for name, memory in columns.items():
            setattr(self, name, memory.copy())

    def _proposals(self, table: SlotTable) -> list[tuple[Op, Bools]]:
        """Return the operations in the order of the rules, with the slots [E, S] they apply to."""
        c = self.config
        stage = table.stage
        holding = stage == Stage.HOLDING
        quality = table.quality[:, None]
        margin = c.z * table.contribution_se
        measured = table.contribution_age >= 0  # in HOLDING: measured at full alpha
        helpful = holding & measured & (table.contribution - margin > 0)
        worse_off = measured & (quality < table.quality_birth - c.loss_of_quality) & (table.contribution > 0)
        useless = measured & (table.contribution + margin < c.least_contribution)
        out_of_patience = measured & (table.dwell > c.holding_patience)
        harmful = (stage == Stage.BLENDING) & measured & (table.contribution + margin < -c.loss_of_quality)
        stuck = (stage == Stage.TRAINING) & (table.dwell > c.training_patience)
        prune = (holding & (useless | worse_off | out_of_patience)) | harmful | stuck
        ready = self.settled & self._stalled(table) & (table.step >= c.first_epoch)
        anywhere = np.ones_like(prune)
        return [
            (Op.FOSSILIZE, helpful & ~worse_off),
            (Op.PRUNE, prune),
            (Op.ADVANCE, anywhere),
            (Op.GERMINATE, anywhere & ready[:, None]),
        ]

    def _remember(self, table: SlotTable) -> None:
        fresh = table.step == 0
        if self.slot_tries.shape != table.stage.shape:
            fresh = np.ones(table.num_envs, dtype=bool)
            self.settled = np.zeros(table.num_envs, dtype=bool)
            self.tried = np.zeros(table.num_envs, dtype=np.int64)
            self.penalties = np.zeros((table.num_envs, len(BLUEPRINTS)))
            self.slot_tries = np.zeros(table.stage.shape, dtype=np.int64)
        missing = table.takes.shape[1] - self.penalties.shape[1]  # user-defined blueprints may be registered later
        if missing > 0:
            self.penalties = np.pad(self.penalties, ((0, 0), (0, missing)))
        self.settled[fresh] = False
        self.penalties[fresh] = 0.0
        self.tried[fresh] = 0
        self.slot_tries[fresh] = 0
        self.penalties *= 0.5
        self.penalties[self.penalties < 0.1] = 0.0
        change = self._loss_changes(table)
        low, high = self.config.settled_band
        unknown = np.isnan(table.val_loss)  # without validation losses, only the plateau counts
        self.settled |= unknown | ((change > low) & (change < high)).all(axis=1)

    def _loss_changes(self, table: SlotTable) -> Floats:
        """Return [E, settled_epochs] the relative change of the validation loss in each of the last epochs."""
        loss = table.loss_history[:, -self.config.settled_epochs - 1 :]
        return np.asarray(np.diff(loss) / np.maximum(np.abs(loss[:, :-1]), 1e-12))  # the loss may be 0

    def _stalled(self, table: SlotTable) -> Bools:
        before, recent = self._bests(table)
        return np.asarray(recent < before + self.config.plateau_gain)  # False for NaN: too few epochs

    def _bests(self, table: SlotTable) -> tuple[Floats, Floats]:
        """Return [E] the best quality before the last `plateau_epochs` epochs, and within them."""
        before, recent = np.split(table.quality_history, [-self.config.plateau_epochs], axis=1)
        return np.fmax.reduce(before, axis=1), recent.max(axis=1)

    def why_waiting(self, table: SlotTable) -> str:
        """Return which condition for planting environment 0 does not meet; empty if it meets all."""
        c = self.config
        if table.step[0] < c.first_epoch:
            return f"the heuristic plants from epoch {c.first_epoch} on (first_epoch)"
        if not self.settled[:1].all():
            low, high = c.settled_band
            latest = float(self._loss_changes(table)[0, -1])
            return (
                f"the heuristic waits until the validation loss changes by {low:+.0%} to {high:+.0%} (settled_band) in "
                f"{c.settled_epochs} epochs in a row (settled_epochs); the latest change was {latest:+.1%}"
            )
        if self._stalled(table)[0]:
            return ""
        before, recent = (float(best[0]) for best in self._bests(table))
        if np.isnan(recent - before):
            return (
                f"the heuristic compares the last {c.plateau_epochs} measured epochs with those before, and too few "
                "were measured: give grower.step() validation batches"
            )
        return (
            f"quality still improves: the best of the last {c.plateau_epochs} epochs, {recent:.4g}, is "
            f"{recent - before:.4g} above the best before, {before:.4g}; the heuristic plants once that is below "
            f"{c.plateau_gain:g} (plateau_gain)"
        )

    def _choose(self, env: int, takes: Bools) -> int:
        """Return the next blueprint that fits and has not failed recently, or else the one with the least penalty."""
        fitting: Sequence[int] = [b for b in self.order if b < len(takes) and takes[b]] or np.nonzero(takes)[0].tolist()
        turn = int(self.tried[env])
        self.tried[env] += 1
        ring = [fitting[(turn + k) % len(fitting)] for k in range(len(fitting))]
        good = [b for b in ring if self.penalties[env, b] < 3.0]
        return good[0] if good else min(ring, key=lambda b: float(self.penalties[env, b]))
