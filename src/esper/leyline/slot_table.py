"""SlotTable: the lifecycle state of all seeds, one numpy array per field. There is no other copy.

The functions below it add up the parameters and multiply-adds of a host and its seeds.

Legend: E environments, S slots, B blueprints, W epochs of history. NaN (or −1) means never measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from esper.leyline.actions import BLUEPRINTS
from esper.leyline.stages import NUM_STAGES, SeedStage

NAN = float("nan")
HISTORY = 10
"""Epochs of loss and quality kept per environment."""

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]
Rows = slice | list[int] | Ints


def _slot(dtype: type, blank: float) -> Any:
    """Declare a column [E, S]: one number per slot, `blank` where there is no seed."""
    return field(metadata={"axes": "ES", "dtype": dtype, "blank": blank, "seed": True})


def _env(dtype: type, blank: float, axes: str = "E") -> Any:
    """Declare a column per environment, [E] unless `axes` says otherwise."""
    return field(metadata={"axes": axes, "dtype": dtype, "blank": blank, "seed": False})


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """State of every slot of every environment. The rules modify it in place; modules hold no copy.

    A controller reads it. Fields are numpy arrays `[E, S]` (environments, slots), such as `stage`, `alpha`, `age`,
    `contribution` and `contribution_se`, or `[E]`, such as `step` and `quality`. NaN means not measured.

    Example:
        >>> table = esper.SlotTable.empty(envs=2, slots=3)
        >>> table.stage.shape, int(table.stage[0, 0]) == esper.SeedStage.DORMANT
        ((2, 3), True)
    """

    # lifecycle
    stage: Ints = _slot(np.int8, SeedStage.DORMANT)
    prev_stage: Ints = _slot(np.int8, SeedStage.DORMANT)
    dwell: Ints = _slot(np.int32, 0)  # epochs in this stage
    prev_dwell: Ints = _slot(np.int32, 0)  # epochs spent in the previous stage
    age: Ints = _slot(np.int32, 0)  # epochs since germination
    cooldown: Ints = _slot(np.int16, 0)  # ticks until a pruned slot is empty again
    serial: Ints = _slot(np.int32, -1)  # number of the seed within its environment, from 0
    # seed
    blueprint: Ints = _slot(np.int16, -1)
    operator: Ints = _slot(np.int8, -1)
    tempo: Ints = _slot(np.int16, 0)  # length of the first ramp in epochs
    params: Ints = _slot(np.int64, 0)
    # weight of the seed in the host: alpha is a closed form of the next five (`alpha_at` in leyline/lifecycle.py)
    alpha: Floats = _slot(np.float32, 0.0)
    alpha_from: Floats = _slot(np.float32, 0.0)
    alpha_to: Floats = _slot(np.float32, 0.0)
    ramp_len: Ints = _slot(np.int16, 0)
    ramp_pos: Ints = _slot(np.int16, 0)
    curve: Ints = _slot(np.int8, 0)
    # quality and contribution
    quality_birth: Floats = _slot(np.float32, NAN)
    quality_stage: Floats = _slot(np.float32, NAN)  # quality when this stage began
    quality_best: Floats = _slot(np.float32, NAN)
    contribution: Floats = _slot(np.float32, NAN)  # quality with the seed minus quality without it
    contribution_se: Floats = _slot(np.float32, NAN)
    contribution_prev: Floats = _slot(np.float32, NAN)
    contribution_velocity: Floats = _slot(np.float32, NAN)
    contribution_age: Ints = _slot(np.int32, -1)  # epochs since measured; reset to −1 on entering HOLDING
    prospect: Floats = _slot(np.float32, NAN)  # contribution a TRAINING seed would have at alpha = 1
    prospect_se: Floats = _slot(np.float32, NAN)
    interaction: Floats = _slot(np.float32, NAN)  # sum of pairwise interactions
    # gradients
    grad_norm: Floats = _slot(np.float32, NAN)
    grad_ratio: Floats = _slot(np.float32, NAN)
    grad_health: Floats = _slot(np.float32, NAN)
    # per environment
    step: Ints = _env(np.int32, 0)
    next_serial: Ints = _env(np.int32, 0)
    last_op: Ints = _env(np.int8, 0)
    rollbacks: Ints = _env(np.int32, 0)  # number of rollbacks to a snapshot by the governor
    train_macs: Ints = _env(np.int64, 0)  # multiply-adds spent on training so far, shadow passes included
    host_train_macs: Ints = _env(np.int64, 0)  # what the host alone would have spent on training so far
    measure_macs: Ints = _env(np.int64, 0)  # multiply-adds spent on measuring so far: validation and coalitions
    train_loss: Floats = _env(np.float32, NAN)
    val_loss: Floats = _env(np.float32, NAN)
    quality: Floats = _env(np.float32, NAN)
    quality_best_env: Floats = _env(np.float32, NAN)
    committed_quality: Floats = _env(np.float32, NAN)  # quality with every live seed off
    loss_history: Floats = _env(np.float32, NAN, "EW")  # newest last
    quality_history: Floats = _env(np.float32, NAN, "EW")
    # constant: which slots exist, and which blueprints each slot takes
    enabled: Bools = _env(np.bool_, True, "ES")
    takes: Bools = _env(np.bool_, True, "SB")

    @classmethod
    def empty(cls, envs: int, slots: int, *, takes: Bools | None = None) -> SlotTable:
        """Return a table of empty slots.

        Args:
            envs: Number of environments.
            slots: Number of slots.
            takes: `[S, B]`, True where slot s can hold blueprint b; None allows all built-in ones.

        Returns:
            The table.
        """
        blueprints = len(BLUEPRINTS) if takes is None else takes.shape[1]
        size = {"E": envs, "S": slots, "W": HISTORY, "B": blueprints}
        arrays = {
            f.name: np.full([size[a] for a in f.metadata["axes"]], f.metadata["blank"], f.metadata["dtype"])
            for f in fields(cls)
        }
        if takes is None:
            arrays["takes"][:, 0] = False  # noop cannot be chosen
        else:
            arrays["takes"][:] = takes
        return cls(**arrays)

    @classmethod
    def joined(cls, tables: Sequence[SlotTable], slots: int) -> SlotTable:
        """Return a copy of the environments of several tables as one table of `slots` slots.

        Slots that a table does not have are disabled. A slot takes the blueprints that it takes in every table that
        has it.
        """
        blueprints = max(table.takes.shape[1] for table in tables)
        joined = cls.empty(sum(table.num_envs for table in tables), slots, takes=np.ones((slots, blueprints), bool))
        first = 0
        for table in tables:
            envs = slice(first, first + table.num_envs)
            some = slice(table.num_slots)
            for f in fields(cls):
                mine = getattr(joined, f.name)
                theirs = getattr(table, f.name)
                axes = f.metadata["axes"]
                if axes == "ES":
                    mine[envs, some] = theirs
                elif axes != "SB":
                    mine[envs] = theirs
            joined.enabled[envs, table.num_slots :] = False
            joined.takes[some, : table.takes.shape[1]] &= table.takes
            first = envs.stop
        return joined

    @property
    def num_envs(self) -> int:
        """Return the number of environments."""
        return int(self.stage.shape[0])

    @property
    def num_slots(self) -> int:
        """Return the number of slots."""
        return int(self.stage.shape[1])

    @property
    def moving(self) -> Bools:
        """Return where alpha has not reached its target yet [E, S]."""
        return (self.stage == SeedStage.BLENDING) & (self.ramp_pos < self.ramp_len)

    @property
    def frozen(self) -> Bools:
        """Return where alpha is decreasing [E, S]. Such a seed does not train, so it cannot counteract the ramp."""
        return self.moving & (self.alpha_to < self.alpha_from)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by field name, without copying.

        Returns:
            Arrays by name.
        """
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def clone(self) -> SlotTable:
        """Copy the table.

        Returns:
            The copy.
        """
        return SlotTable(**{name: a.copy() for name, a in self.arrays().items()})

    def rows(self, envs: Rows) -> SlotTable:
        """Copy some environments.

        Args:
            envs: Their numbers, as an index.

        Returns:
            A table of these environments.
        """
        pick = {f.name: f.metadata["axes"][0] == "E" for f in fields(self)}
        return SlotTable(**{n: (a[envs] if pick[n] else a).copy() for n, a in self.arrays().items()})

    def restore(self, other: SlotTable, envs: Rows = slice(None)) -> None:
        """Copy environments from another table, in place.

        Args:
            other: The other table.
            envs: Numbers of the environments, as an index.
        """
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if f.metadata["axes"][0] == "E":
                mine[envs] = theirs[envs]
            else:
                mine[...] = theirs

    def reset(self, envs: Rows = slice(None)) -> None:
        """Reset environments: every slot empty, nothing measured.

        Args:
            envs: Their numbers, as an index.
        """
        for f in fields(self):
            if f.name not in ("enabled", "takes"):
                getattr(self, f.name)[envs] = f.metadata["blank"]

    def blank(self, where: Bools) -> None:
        """Clear the seed columns.

        Args:
            where: `[E, S]`, the slots to clear.
        """
        for f in SEED_COLUMNS:
            getattr(self, f.name)[where] = f.metadata["blank"]

    def diff(self, before: SlotTable) -> dict[str, Bools]:
        """Compare with an earlier state.

        Args:
            before: The earlier table.

        Returns:
            Where each field changed; unchanged fields are omitted.
        """
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


_IN_FORWARD = np.isin(np.arange(NUM_STAGES), (SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED))


class Priced(Protocol):
    """Provider of costs. Multiply-adds are per sample."""

    @property
    def host_params(self) -> int:
        """Return the number of parameters of the host."""
        ...

    @property
    def host_macs(self) -> int:
        """Return the multiply-adds of the host."""
        ...

    @property
    def slot_macs(self) -> Ints:
        """Return the multiply-adds of each blueprint at each slot, [S, B]."""
        ...


def seed_macs(table: SlotTable, slot_macs: Ints) -> Ints:
    """Return the multiply-adds [E, S] of every seed that is BLENDING, HOLDING or FOSSILIZED.

    Seeds in other stages are not part of the forward pass, so they cost the host nothing.
    """
    slots, blueprints = slot_macs.shape
    in_forward = _IN_FORWARD[table.stage]
    price = slot_macs.ravel().take(np.maximum(table.blueprint, 0) + np.arange(slots) * blueprints)
    return np.asarray(price * in_forward)


def network_params(table: SlotTable, host_params: int | Ints) -> Ints:
    """Return the parameters [E] of the host and of its BLENDING, HOLDING and FOSSILIZED seeds: those of an export."""
    return np.asarray(host_params + (table.params * _IN_FORWARD[table.stage]).sum(axis=1))


def live_costs(table: SlotTable, prices: Priced) -> tuple[Ints, Ints]:
    """Return parameters [E] and multiply-adds [E] of host and seeds together.

    Parameters count from germination to removal, because they exist and are trained. Multiply-adds count from
    BLENDING on.
    """
    params = prices.host_params + table.params.sum(axis=1)
    macs = prices.host_macs + seed_macs(table, prices.slot_macs).sum(axis=1)
    return params, macs
