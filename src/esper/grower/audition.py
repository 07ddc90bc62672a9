"""Find out what to plant, and where, before growing: try every seed alone on a copy of the network.

def train(copy):  # some epochs of your loop, then the validation quality
    ...
trials = esper.audition(body, train)
print(trials)                        # what each seed gains in each slot, and what it costs
grower = esper.Grower(body, optimizer, controller=trials.plan(limit=100_000))
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from esper.kasmina.body import Body
from esper.kasmina.optimizer_sync import refuse_ungrafted
from esper.leyline.errors import ConfigError
from esper.leyline.planning import KEEP, Placement, planned
from esper.leyline.stages import SeedStage
from esper.leyline.text import cut


@dataclass(frozen=True, slots=True)
class Trial:
    """What one seed gained on its copy of the network, and what it costs."""

    slot: str
    blueprint: str
    gain: float
    """Quality of the copy with the seed minus that of the copy without, in the unit of `train`'s result. Each copy was
    trained once, with equal batches: the gain has no standard error, and noise of training is part of it."""
    params: int
    macs: int
    """Multiply-adds for one sample."""


@dataclass(frozen=True, slots=True)
class Audition:
    """The trials of all seeds, largest gain first.

    Example:
        >>> audition = esper.audition(body, lambda copy: 0.5, blueprints=["lora"])
        >>> [(trial.slot, trial.blueprint, trial.gain) for trial in audition.trials]
        [('1', 'lora', 0.0)]
    """

    trials: tuple[Trial, ...]
    bare: float
    """Quality of the copy without a seed."""

    def plan(self, *, limit: int | None = None, keep: float = KEEP) -> dict[str, str]:
        """Choose what to plant: the seeds that gained most.

        Args:
            limit: Maximum multiply-adds of all planted seeds for one sample; None sets no limit.
            keep: Seeds that gained less than this share of the largest gain are left out, 0 to 1; lower it for a long
                training.

        Returns:
            The blueprint to plant in each slot.

        Raises:
            ConfigError: `keep` is not a share.

        Example:
            >>> esper.audition(body, lambda copy: len(list(copy.parameters())), blueprints=["lora"]).plan()
            {'1': 'lora'}
        """
        if not 0.0 <= keep <= 1.0:
            raise ConfigError(f"keep is a share of the largest gain, from 0 to 1, got {keep}")
        macs = {(trial.slot, trial.blueprint): trial.macs for trial in self.trials}
        gains = {(trial.slot, trial.blueprint): trial.gain for trial in self.trials}
        return planned(gains, lambda plan: limit is None or sum(macs[seed] for seed in plan.items()) <= limit, keep)

    def __str__(self) -> str:
        rows = [("slot", "blueprint", "gain", "parameters", "multiply-adds")]
        rows += [(t.slot, t.blueprint, f"{t.gain:+.4f}", f"{t.params:,}", f"{t.macs:,}") for t in self.trials]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                f"{cell:{'<' if i < 2 else '>'}{width}}"
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        legend = [
            f"gain: quality of a copy trained with the seed minus {self.bare:.4f}, that without it",
            "      (one training each, so no ±; the noise of training is part of it)",
            "multiply-adds: of the seed, for one sample",
        ]
        return "\n".join([*lines, *legend])


def audition(body: Body, train: Callable[[Body], float], *, blueprints: Sequence[str] = ()) -> Audition:
    """Try every seed alone on a copy of the body. The body itself does not change.

    Args:
        body: A grafted model. Slots that hold a seed are not tried.
        train: Trains a copy of the body for a short time and returns its quality, higher is better. It makes its own
            optimiser. torch's random state is the same at the start of every call, so that copies see equal batches.
        blueprints: What to try; all that fit a slot if empty.

    Returns:
        What each seed gains if it is the only new one.

    Raises:
        GraftError: The model was not grafted.
        ConfigError: No slot is empty, a blueprint fits no empty slot, or `train` did not return a finite number.

    Example:
        >>> def train(copy):
        ...     optimizer = torch.optim.AdamW(copy.parameters(), lr=0.01)
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         nn.functional.cross_entropy(copy(x), y).backward()
        ...         optimizer.step()
        ...     return (copy(x).argmax(1) == y).float().mean().item()
        >>> trials = esper.audition(body, train)
        >>> plan = trials.plan(limit=1_000)
    """
    refuse_ungrafted(body)
    costs = {slot: fitting for slot, fitting in body.costs().items() if body.slot(slot).stage == SeedStage.DORMANT}
    if not costs:
        stages = ", ".join(f"{slot.name!r} is {slot.stage.name}" for slot in body.slots.values())
        raise ConfigError(
            f"esper.audition tries seeds in empty slots, and this body has none: {stages}. "
            "Graft a fresh copy of the model, or prune a growing seed"
        )
    names = sorted({name for fitting in costs.values() for name in fitting})
    for name in blueprints:
        if name not in names:
            raise ConfigError(f"blueprint {name!r} fits no empty slot of this model. Fitting ones: {', '.join(names)}")
    bare = _quality(body, None, train)
    trials = [
        Trial(slot, name, _quality(body, (slot, name), train) - bare, cost.params, cost.macs)
        for slot, fitting in costs.items()
        for name, cost in fitting.items()
        if not blueprints or name in blueprints
    ]
    return Audition(tuple(sorted(trials, key=lambda trial: -trial.gain)), bare)


def _quality(body: Body, seed: Placement | None, train: Callable[[Body], float]) -> float:
    """Return the quality of a trained copy of the body, with one more seed or without."""
    trained = copy.deepcopy(body)
    if seed is not None:
        trained.set_slot(trained.plant(*seed), SeedStage.FOSSILIZED, 1.0)
    devices = sorted({p.device.index or 0 for p in body.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=devices):
        result = train(trained)
    try:
        quality = float(result)
    except (TypeError, ValueError):
        quality = math.nan
    if not math.isfinite(quality):
        name = getattr(train, "__name__", type(train).__name__)
        raise ConfigError(
            f"{name} returned {cut(repr(result), 80)} for {seed or 'the copy without a seed'}. It must return the "
            "quality of the trained copy, as a finite number"
        )
    return quality
