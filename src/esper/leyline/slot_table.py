"""SlotTable: the only owner of lifecycle truth, one numpy array per field.

Legend: E environments, S slots, B blueprints, W epochs of history. NaN (or −1) means never measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from esper.leyline.actions import BLUEPRINTS
from esper.leyline.stages import SeedStage

NAN = float("nan")
HISTORY = 10
"""Epochs of loss and quality kept per environment."""

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]
Rows = slice | list[int] | Ints


def _slot(dtype: type, blank: float) -> Any:
    """A column [E, S]: one number per slot, `blank` where no seed lives."""
    return field(metadata={"axes": "ES", "dtype": dtype, "blank": blank, "seed": True})


def _env(dtype: type, blank: float, axes: str = "E") -> Any:
    """A column of an environment, [E] unless `axes` says more."""
    return field(metadata={"axes": axes, "dtype": dtype, "blank": blank, "seed": False})


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """Every slot of every environment. Rules change it in place; modules never mirror it."""

    # where each seed stands
    stage: Ints = _slot(np.int8, SeedStage.DORMANT)
    prev_stage: Ints = _slot(np.int8, SeedStage.DORMANT)
    dwell: Ints = _slot(np.int32, 0)  # epochs in this stage
    prev_dwell: Ints = _slot(np.int32, 0)  # epochs spent in the stage before
    age: Ints = _slot(np.int32, 0)  # epochs since germination
    cooldown: Ints = _slot(np.int16, 0)  # ticks until a pruned slot is empty again
    serial: Ints = _slot(np.int32, -1)  # which seed of its environment, counted from 0
    # what it is
    blueprint: Ints = _slot(np.int16, -1)
    operator: Ints = _slot(np.int8, -1)
    tempo: Ints = _slot(np.int16, 0)  # epochs of the first ramp
    params: Ints = _slot(np.int64, 0)
    # how much of it the host feels: a closed form of the next five (see kasmina.alpha)
    alpha: Floats = _slot(np.float32, 0.0)
    alpha_from: Floats = _slot(np.float32, 0.0)
    alpha_to: Floats = _slot(np.float32, 0.0)
    ramp_len: Ints = _slot(np.int16, 0)
    ramp_pos: Ints = _slot(np.int16, 0)
    curve: Ints = _slot(np.int8, 0)
    # what it has been worth
    quality_birth: Floats = _slot(np.float32, NAN)
    quality_stage: Floats = _slot(np.float32, NAN)  # when this stage began
    quality_best: Floats = _slot(np.float32, NAN)
    contribution: Floats = _slot(np.float32, NAN)  # quality with it minus without it
    contribution_se: Floats = _slot(np.float32, NAN)
    contribution_prev: Floats = _slot(np.float32, NAN)
    contribution_velocity: Floats = _slot(np.float32, NAN)
    contribution_age: Ints = _slot(np.int32, -1)  # epochs since it was measured; −1 again on entering HOLDING
    prospect: Floats = _slot(np.float32, NAN)  # what a TRAINING seed would add at alpha = 1
    prospect_se: Floats = _slot(np.float32, NAN)
    interaction: Floats = _slot(np.float32, NAN)  # sum of pairwise interactions
    # its gradients
    grad_norm: Floats = _slot(np.float32, NAN)
    grad_ratio: Floats = _slot(np.float32, NAN)
    grad_health: Floats = _slot(np.float32, NAN)
    # each environment
    step: Ints = _env(np.int32, 0)
    next_serial: Ints = _env(np.int32, 0)
    last_op: Ints = _env(np.int8, 0)
    rollbacks: Ints = _env(np.int32, 0)  # times the governor took it back to a snapshot
    train_loss: Floats = _env(np.float32, NAN)
    val_loss: Floats = _env(np.float32, NAN)
    quality: Floats = _env(np.float32, NAN)
    quality_best_env: Floats = _env(np.float32, NAN)
    committed_quality: Floats = _env(np.float32, NAN)  # quality with every live seed off
    loss_history: Floats = _env(np.float32, NAN, "EW")  # newest last
    quality_history: Floats = _env(np.float32, NAN, "EW")
    # what does not change: which slots exist, and which blueprints each of them takes
    enabled: Bools = _env(np.bool_, True, "ES")
    takes: Bools = _env(np.bool_, True, "SB")

    @classmethod
    def empty(cls, envs: int, slots: int, *, takes: Bools | None = None) -> SlotTable:
        """A table of empty slots. `takes[s, b]` says whether slot s can hold blueprint b."""
        blueprints = len(BLUEPRINTS) if takes is None else takes.shape[1]
        size = {"E": envs, "S": slots, "W": HISTORY, "B": blueprints}
        arrays = {
            f.name: np.full([size[a] for a in f.metadata["axes"]], f.metadata["blank"], f.metadata["dtype"])
            for f in fields(cls)
        }
        if takes is None:
            arrays["takes"][:, 0] = False  # noop is nobody's choice
        else:
            arrays["takes"][:] = takes
        return cls(**arrays)

    @property
    def num_envs(self) -> int:
        return int(self.stage.shape[0])

    @property
    def num_slots(self) -> int:
        return int(self.stage.shape[1])

    @property
    def moving(self) -> Bools:
        """[E, S]: alpha is on its way."""
        return (self.stage == SeedStage.BLENDING) & (self.ramp_pos < self.ramp_len)

    @property
    def frozen(self) -> Bools:
        """[E, S]: a seed on its way down must not fight it, so it does not learn."""
        return self.moving & (self.alpha_to < self.alpha_from)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def clone(self) -> SlotTable:
        return SlotTable(**{name: a.copy() for name, a in self.arrays().items()})

    def rows(self, envs: Rows) -> SlotTable:
        """A copy of some environments as a table of their own."""
        pick = {f.name: f.metadata["axes"][0] == "E" for f in fields(self)}
        return SlotTable(**{n: (a[envs] if pick[n] else a).copy() for n, a in self.arrays().items()})

    def restore(self, other: SlotTable, envs: Rows = slice(None)) -> None:
        """Copy these environments from `other`, in place."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if f.metadata["axes"][0] == "E":
                mine[envs] = theirs[envs]
            else:
                mine[...] = theirs

    def reset(self, envs: Rows = slice(None)) -> None:
        """Begin these environments anew: every slot empty, nothing measured."""
        for f in fields(self):
            if f.name not in ("enabled", "takes"):
                getattr(self, f.name)[envs] = f.metadata["blank"]

    def blank(self, where: Bools) -> None:
        """Forget the seeds at `where` [E, S]."""
        for f in SEED_COLUMNS:
            getattr(self, f.name)[where] = f.metadata["blank"]

    def diff(self, before: SlotTable) -> dict[str, Bools]:
        """Where each field changed since `before`; fields that did not change are left out."""
        changed: dict[str, Bools] = {}
        for name, now in self.arrays().items():
            then = before.arrays()[name]
            unequal = now != then
            if now.dtype.kind == "f":
                unequal &= ~(np.isnan(now) & np.isnan(then))
            if unequal.any():
                changed[name] = unequal
        return changed


SEED_COLUMNS = tuple(f for f in fields(SlotTable) if f.metadata["seed"])
