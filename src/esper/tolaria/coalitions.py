"""Coalitions: what the network is worth with any set of its live seeds on or off, sample by sample.

`evaluate` returns one score per configuration and sample, computed in one forked pass per chunk (see
`kasmina.forking`), or one by one for models whose samples influence each other. Where a BatchNorm lies
behind a slot, its statistics are re-estimated per configuration on a fixed set of inputs: a seed switched
off feeds the norm a distribution that its running statistics do not know.

Legend: K configurations, N samples, B samples of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from esper.kasmina.body import Body
from esper.kasmina.forking import ForkError, ForkPlan, RowNorms, is_batched
from esper.kasmina.graft import same
from esper.leyline.errors import ConfigError

Score = Callable[[Any, Any], Tensor]
"""(output, target) → a score per sample [B], or several [B, Q]; higher is better."""
Config = tuple[bool, ...]
MAX_ROWS = 512
"""Rows × samples behind the last fork: beyond, memory grows and speed does not."""
CALIBRATION_SAMPLES = 128
FULL_TABLE_PLAYERS = 3
"""Up to so many players every coalition is evaluated each epoch."""


@dataclass(frozen=True, slots=True)
class Coalitions:
    """Scores per configuration and sample."""

    slots: tuple[str, ...]
    """What the configurations speak of: players first, then prospects (TRAINING seeds)."""
    players: int
    configs: list[Config]
    scores: Tensor  # [K, N] or [K, N, Q]

    def row(self, config: Sequence[bool]) -> Tensor:
        """The scores of one configuration, [N]."""
        return self.scores[self.configs.index(tuple(config))]

    @property
    def main(self) -> Config:
        """Every player on, no prospect."""
        return tuple(i < self.players for i in range(len(self.slots)))

    @property
    def committed(self) -> Config:
        """Every seed off: what remains if nothing more is committed."""
        return (False,) * len(self.slots)


def samples_in(target: Any, inputs: Any) -> int:
    """How many samples a batch has."""
    for x in pytree.tree_leaves((target, inputs)):
        if isinstance(x, Tensor) and x.ndim:
            return int(x.shape[0])
    raise ConfigError("a validation batch must hold a tensor with a batch dimension")


def step_configs(players: int, prospects: int) -> list[Config]:
    """What is evaluated each epoch: all coalitions of few players, else main, none and leave-one-out; main last.

    Each TRAINING seed adds one row: main with that seed switched on.
    """
    everyone = (True,) * players
    if players <= FULL_TABLE_PLAYERS:
        coalitions = list(product((False, True), repeat=players))
    else:
        without = [(*everyone[:i], False, *everyone[i + 1 :]) for i in range(players)]
        coalitions = [(False,) * players, *without, everyone]
    nobody = (False,) * prospects
    rows = [c + nobody for c in coalitions]
    rows += [everyone + nobody[:i] + (True,) + nobody[i + 1 :] for i in range(prospects)]
    return rows


def evaluate(
    body: Body,
    batches: Iterable[tuple[Any, Any]],
    score: Score,
    *,
    configs: Sequence[Config] | None = None,
    calibration: Any = None,
    max_rows: int = MAX_ROWS,
) -> Coalitions:
    """Score every configuration on every sample of `batches` of (inputs, target); no configuration twice.

    `calibration` holds inputs for the statistics of norms behind slots; by default the first samples of
    the first batch serve (inputs only, no label).
    """
    players, prospects = body.live, body.training_slots
    slots = tuple(s.name for s in (*players, *prospects))
    asked = step_configs(len(players), len(prospects)) if configs is None else configs
    wanted: list[Config] = list(dict.fromkeys(tuple(c) for c in asked))
    for config in wanted:
        if len(config) != len(slots):
            raise ConfigError(f"a configuration speaks of {len(config)} slots; live and training are {slots}")
    main: Config = tuple(i < len(players) for i in range(len(slots)))
    rows = wanted if main in wanted else [*wanted, main]  # norms are moved relative to main
    runner = _Runner(body, slots, rows, main, score)
    was_training = [m for m in body.modules() if m.training]
    body.eval()
    try:
        found = [runner.run(inputs, target, calibration, max_rows) for inputs, target in batches]
    finally:
        for module in was_training:
            module.training = True
    if not found:
        raise ConfigError("no validation batch was given: nothing can be measured")
    return Coalitions(slots, len(players), wanted, torch.cat(found, 1)[: len(wanted)])


@dataclass(slots=True)
class _Runner:
    """One evaluation: forked as long as that is exact, else one by one."""

    body: Body
    slots: tuple[str, ...]
    rows: list[Config]
    main: Config
    score: Score
    plan: ForkPlan | None = None
    singles: list[ForkPlan] | None = None

    def run(self, inputs: Any, target: Any, calibration: Any, max_rows: int) -> Tensor:
        size = samples_in(target, inputs)
        if self.plan is None and self.singles is None:
            self._prepare(inputs if calibration is None else calibration, size if calibration is None else 0)
        if self.singles is not None:
            return self._one_by_one(inputs, target, size)
        parts = []
        for x, y, n in chunks(inputs, target, size, max(1, max_rows // len(self.rows))):
            try:
                parts.append(self._forked(x, y, n))
                self._guard(x, y, n, parts[0])
            except ForkError as error:
                self.body.give_up_forking(str(error))
                self._prepare(inputs if calibration is None else calibration, size if calibration is None else 0)
                return self._one_by_one(inputs, target, size)
        return torch.cat(parts, 1)

    def _prepare(self, inputs: Any, size: int) -> None:
        """Build the plan and, where norms lie behind slots, the statistics of its rows."""
        size = size or samples_in(None, inputs)
        few = min(size, CALIBRATION_SAMPLES)
        inputs = cut(inputs, size, 0, few)
        needs_norms = bool(self.body.norms) and len(self.rows) > 1
        try:
            self.plan = self.body.plan(self.rows, self.slots, self.main)
            if needs_norms:
                self.plan.norms = RowNorms()
                self.body.run_rows(inputs, few, self.plan)
                self.plan.norms.calibrating = False
            self.singles = None
        except ForkError as error:
            self.plan = None
            self.body.give_up_forking(str(error))
            self.singles = [ForkPlan.single(c, self.slots) for c in self.rows]
            if needs_norms:
                self._calibrate_singles(inputs, few)

    def _calibrate_singles(self, inputs: Any, size: int) -> None:
        assert self.singles is not None
        reference = RowNorms(referring=True)
        main = ForkPlan.single(self.main, self.slots)
        main.norms = reference
        self.body.run_rows(inputs, size, main)
        for plan in self.singles:
            plan.norms = RowNorms(reference=reference.reference)
            self.body.run_rows(inputs, size, plan)
            plan.norms.calibrating = False

    def _forked(self, inputs: Any, target: Any, size: int) -> Tensor:
        assert self.plan is not None
        output = self.body.run_rows(inputs, size, self.plan)
        k = len(self.rows)
        if is_batched(output, k * size) and isinstance(target, Tensor):
            scores = self.score(output, target.repeat(k, *[1] * (target.ndim - 1)))
            scores = scores.view(k, size, *scores.shape[1:])
            return scores[np.argsort(self.plan.order)] if self.plan.order != list(range(k)) else scores
        return torch.stack([self.score(out, target) for out in self.plan.split(output)])

    def _one_by_one(self, inputs: Any, target: Any, size: int) -> Tensor:
        assert self.singles is not None
        return torch.stack([self.score(self.body.evaluate_rows(inputs, size, p)[0], target) for p in self.singles])

    def _guard(self, inputs: Any, target: Any, size: int, scores: Tensor) -> None:
        """The first real chunk of a body's life: two configurations must score alone as they do together."""
        if self.body.fork_proven or len(self.rows) == 1:
            return
        assert self.plan is not None
        keep, self.plan.norms = self.plan.norms, None  # norms are the same arithmetic either way
        try:
            together = self.plan.split(self.body.run_rows(inputs, size, self.plan))
            for config in {self.main, self.rows[0]}:
                alone = self.body.evaluate_rows(inputs, size, ForkPlan.single(config, self.slots))[0]
                if not same(together[self.rows.index(config)], alone):
                    raise ForkError("samples of a batch influence each other: a forked pass gave another result")
        finally:
            self.plan.norms = keep
        self.body.fork_proven = True


def cut(batch: Any, size: int, start: int, stop: int) -> Any:
    return pytree.tree_map(lambda x: x[start:stop] if is_batched(x, size) else x, batch)


def chunks(inputs: Any, target: Any, size: int, most: int) -> Iterator[tuple[Any, Any, int]]:
    """Pieces of at most `most` samples, of nearly equal size."""
    pieces = -(-size // most)
    for i in range(pieces):
        start, stop = i * size // pieces, (i + 1) * size // pieces
        yield cut(inputs, size, start, stop), cut(target, size, start, stop), stop - start


@dataclass(frozen=True, slots=True)
class Measured:
    """What coalitions say of one body, in numbers."""

    quality: float
    committed: float
    contribution: dict[str, tuple[float, float]]
    """Player → quality with it minus without it, and the paired standard error."""
    prospect: dict[str, tuple[float, float]]
    """TRAINING seed → what it would add at alpha = 1, and the paired standard error."""

    @classmethod
    def read(cls, result: Coalitions, numbers: Sequence[float]) -> Measured:
        """From the numbers of `statistics`, once they have left the device."""
        half = len(numbers) // 2
        pairs = list(zip(numbers[:half], numbers[half:], strict=True))
        named = list(zip(result.slots, pairs[2:], strict=True))
        return cls(pairs[0][0], pairs[1][0], dict(named[: result.players]), dict(named[result.players :]))


def statistics(result: Coalitions, scores: Tensor | None = None) -> Tensor:
    """Means, then standard errors, of quality, committed quality, contributions and prospects; on the device.

    Differences are taken sample by sample, so what all configurations find hard does not count as noise.
    """
    scores = result.scores if scores is None else scores  # [K, N]
    row = {config: scores[k] for k, config in enumerate(result.configs)}
    main = result.main
    differences = [row[main], row.get(result.committed, row[main])]
    for i in range(len(result.slots)):
        other = row[(*main[:i], not main[i], *main[i + 1 :])]
        differences.append(row[main] - other if main[i] else other - row[main])
    stacked = torch.stack(differences).double()
    n = stacked.shape[1]
    spread = stacked.std(1) if n > 1 else torch.full_like(stacked[:, 0], float("nan"))
    return torch.cat([stacked.mean(1), spread / n**0.5])


def measure(result: Coalitions) -> Measured:
    return Measured.read(result, statistics(result).tolist())  # sync: once per call
