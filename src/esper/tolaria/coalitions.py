"""Coalitions: the score of the network per sample, with any subset of its live seeds switched on.

`evaluate` returns one score per configuration and sample. It runs all configurations in one forked pass per chunk (see
`kasmina.forking`), or one by one for models whose samples influence each other. The statistics of a BatchNorm behind a
slot are re-estimated per configuration on a fixed set of inputs: without the seed, the norm's input has another
distribution than its running statistics describe.

Legend: K configurations, N samples, B samples of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from esper.kasmina.body import Body
from esper.kasmina.forking import ForkError, ForkPlan, Norm, RowNorms, is_batched, same
from esper.leyline.errors import ConfigError
from esper.leyline.stages import SeedStage
from esper.tolaria.rollout import PhaseTimers

Score = Callable[[Any, Any], Tensor]
"""(output, target) → a score per sample [B], or several [B, Q]; higher is better."""
Config = tuple[bool, ...]
ROWS, ROW_BYTES = (128, 2048), 64 * 2**20
"""Least and greatest number of rows × samples behind the last fork, and the bytes that features at a slot may take."""
CALIBRATION_SAMPLES = 128
PLAIN_DIFFERENCE = 0.01
"""Relative difference of outputs from which an influence between rows would be detected."""
FULL_TABLE_PLAYERS = 3
"""Largest number of players for which every coalition is evaluated in each epoch."""
COMMIT_PLAYERS = 6
"""The same while one of them is HOLDING, that is, may be committed."""


@dataclass(frozen=True, slots=True)
class Coalitions:
    """Scores per configuration and sample."""

    slots: tuple[str, ...]
    """The slots that a configuration's entries refer to: players first, then prospects (TRAINING seeds)."""
    players: int
    configs: list[Config]
    scores: Tensor  # [K, N] or [K, N, Q]

    def row(self, config: Sequence[bool]) -> Tensor:
        """Return the scores of one configuration, [N] or [N, Q]."""
        return self.scores[self.configs.index(tuple(config))]

    @property
    def main(self) -> Config:
        """The configuration with every player on and every prospect off."""
        return tuple(i < self.players for i in range(len(self.slots)))

    @property
    def committed(self) -> Config:
        """The configuration with every seed off: the network if nothing more is committed."""
        return (False,) * len(self.slots)


def samples_in(target: Any, inputs: Any) -> int:
    """Return the number of samples in a batch."""
    sizes = [x.shape for x in pytree.tree_leaves((target, inputs)) if isinstance(x, Tensor) and x.ndim]
    if sizes:
        samples = int(sizes[0][0])
        if not any(samples in shape[:2] for shape in sizes[1:]) and len(sizes) > 1:  # inputs may be [T, B]
            raise ConfigError(
                f"a batch has {samples} targets but inputs of shape {', '.join(str(tuple(s)) for s in sizes[1:])}"
            )
        return samples
    raise ConfigError(
        f"a validation batch must contain a tensor with a batch dimension, got inputs of type {type(inputs).__name__} "
        f"and a target of type {type(target).__name__}. Give (inputs, target) with tensors"
    )


def rows_that_fit(body: Body) -> int:
    """Return how many rows × samples to run at once, so that memory is bounded for any size of features."""
    largest = max(4 * math.prod(slot.spec.shape) for slot in body.slots.values())
    return min(max(ROW_BYTES // largest, ROWS[0]), ROWS[1])


def step_configs(players: int, prospects: int, *, may_commit: bool = False) -> list[Config]:
    """Return the configurations of an epoch; of the coalitions, the main one is last.

    With few players these are all coalitions, otherwise none, leave-one-out and all. The limit is higher if
    `may_commit`: some seed may be committed. Each TRAINING seed adds one: main with that seed switched on.
    """
    all_on = (True,) * players
    if players <= (COMMIT_PLAYERS if may_commit else FULL_TABLE_PLAYERS):
        coalitions = list(product((False, True), repeat=players))
    else:
        without = [(*all_on[:i], False, *all_on[i + 1 :]) for i in range(players)]
        coalitions = [(False,) * players, *without, all_on]
    all_off = (False,) * prospects
    rows = [c + all_off for c in coalitions]
    rows += [all_on + all_off[:i] + (True,) + all_off[i + 1 :] for i in range(prospects)]
    return rows


def evaluate(
    body: Body,
    batches: Iterable[tuple[Any, Any]],
    score: Score,
    *,
    configs: Sequence[Config] | None = None,
    calibration: Any = None,
    fossils: bool = False,
    max_rows: int | None = None,
    phases: PhaseTimers | None = None,
) -> Coalitions:
    """Score every configuration on every sample of `batches` of (inputs, target); duplicate configurations are dropped.

    configs      default: those of `step_configs`
    calibration  inputs for the statistics of norms behind slots; default: the first samples of the first batch
    fossils      whether committed seeds are players, too
    max_rows     rows × samples per pass; default: `rows_that_fit`
    """
    players, prospects = body.players(fossils), body.training_slots
    slots = tuple(s.name for s in (*players, *prospects))
    may_commit = any(s.stage == SeedStage.HOLDING for s in players)
    requested = step_configs(len(players), len(prospects), may_commit=may_commit) if configs is None else configs
    unique: list[Config] = list(dict.fromkeys(tuple(c) for c in requested))
    for config in unique:
        if len(config) != len(slots):
            raise ConfigError(f"a configuration has {len(config)} entries; expected one for each of {slots}")
    main: Config = tuple(i < len(players) for i in range(len(slots)))
    rows = unique if main in unique else [*unique, main]  # norms are corrected relative to main
    # a norm in eval mode while the model trains was frozen by the user: its statistics stay
    norms = [n for n in body.norms if n.training or not body.model.training] if len(rows) > 1 else []
    phases = phases or PhaseTimers()
    runner = _Runner(body, slots, rows, main, score, norms, phases)
    if calibration is not None:
        runner.calibrate_on(plain(calibration), samples_in(None, calibration))
    was_training = [m for m in body.modules() if m.training]
    body.eval()
    try:
        with phases("coalitions" if len(rows) > 1 else "validate"):
            scores = [runner.run(plain(inputs), target, max_rows or rows_that_fit(body)) for inputs, target in batches]
    finally:
        for module in was_training:
            module.training = True
    if not scores:
        raise ConfigError(
            "no validation batch was given: nothing can be measured. Give at least one batch; an iterator that was "
            "read before is empty, so give a list or a DataLoader"
        )
    return Coalitions(slots, len(players), unique, torch.cat(scores, 1)[: len(unique)])


@dataclass(slots=True)
class _Runner:
    """One evaluation: forked as long as that is exact, otherwise one configuration at a time."""

    body: Body
    slots: tuple[str, ...]
    rows: list[Config]
    main: Config
    score: Score
    norms: list[Norm]
    phases: PhaseTimers
    calibration: tuple[Any, int] | None = None
    plan: ForkPlan | None = None
    singles: list[ForkPlan] | None = None
    guarded: bool = False

    def calibrate_on(self, inputs: Any, size: int) -> None:
        """Use the first of these inputs to calibrate norms."""
        few = min(size, CALIBRATION_SAMPLES)
        self.calibration = self.body.forking.cut(inputs, size, 0, few), few

    def run(self, inputs: Any, target: Any, max_rows: int) -> Tensor:
        """Return the scores of every configuration on one batch, [K, B] or [K, B, Q]."""
        size = samples_in(target, inputs)
        if self.calibration is None:
            self.calibrate_on(inputs, size)
        if self.singles is None:
            try:
                return self._forked(inputs, target, size, max(1, max_rows // len(self.rows)))
            except ForkError as error:
                self.body.forking.give_up(str(error))
                self.singles = self._alone(self.rows)
        outputs = (self.body.forking.outputs(inputs, size, plan)[0] for plan in self.singles)
        return torch.stack([self._scored(output, target, size) for output in outputs])

    def _forked(self, inputs: Any, target: Any, size: int, most: int) -> Tensor:
        if self.plan is None:
            self.plan = self.body.forking.plan(self.rows, self.slots, self.main)
            if self.norms:
                assert self.calibration is not None
                self.plan.norms = RowNorms(self.norms)
                with self.phases("norms"):
                    self.body.forking.run(*self.calibration, self.plan)
                self.plan.norms.calibrating = False
        parts = []
        for start, stop in chunks(size, most):
            x, y = self.body.forking.cut(inputs, size, start, stop), cut(target, size, start, stop)
            output = self.body.forking.run(x, stop - start, self.plan)
            self._guard(x, stop - start, output)
            parts.append(self._scores(output, y, stop - start))
        return torch.cat(parts, 1)

    def _scores(self, output: Any, target: Any, size: int) -> Tensor:
        assert self.plan is not None
        k = len(self.rows)
        if not (is_batched(output, k * size) and isinstance(target, Tensor)):
            return torch.stack([self._scored(out, target, size) for out in self.plan.split(output)])
        scores = self._scored(output, target.repeat(k, *[1] * (target.ndim - 1)), k * size)
        scores = scores.view(k, size, *scores.shape[1:])
        return scores if self.plan.order == list(range(k)) else scores[np.argsort(self.plan.order)]

    def _scored(self, output: Any, target: Any, samples: int) -> Tensor:
        scores = self.score(output, target)
        if not is_batched(scores, samples):
            returned = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
            raise ConfigError(
                f"a quality is one score per sample, [{samples}]; for {samples} samples it returned {returned}. "
                "Average over every dimension but the first, and over no samples (reduction='none')"
            )
        return scores

    def _alone(self, configs: Sequence[Config]) -> list[ForkPlan]:
        """Return plans that run one configuration each, with norms corrected as in the forked pass."""
        plans = [ForkPlan.single(c, self.slots) for c in configs]
        if self.norms:
            assert self.calibration is not None
            main = ForkPlan.single(self.main, self.slots)
            main.norms = RowNorms(self.norms, referring=True)
            self.body.forking.run(*self.calibration, main)
            for plan in plans:
                plan.norms = RowNorms(self.norms, reference=main.norms.reference)
                self.body.forking.run(*self.calibration, plan)
                plan.norms.calibrating = False
        return plans

    def _guard(self, inputs: Any, size: int, output: Any) -> None:
        """Raise ForkError if configurations give other outputs alone than forked; checked once per new fork point.

        A fork point counts as proven only if the compared outputs differ: otherwise an influence would not show.
        """
        assert self.plan is not None
        unproven = {f.point for f in self.plan.forks} - self.body.forking.proven
        if self.guarded or self.plan.alone or not unproven:
            return
        self.guarded = True
        together = self.plan.split(output)
        unproven_slots = [i for i, s in enumerate(self.slots) if self.body.forking.points[s] in unproven]
        others = [next((c for c in self.rows if c[i] != self.main[i]), self.main) for i in unproven_slots]
        configs = list(dict.fromkeys([self.main, *others]))
        outputs_alone = {}
        for config, plan in zip(configs, self._alone(configs), strict=True):
            outputs_alone[config] = self.body.forking.outputs(inputs, size, plan)[0]
            if not same(together[self.rows.index(config)], outputs_alone[config]):
                raise ForkError("samples of a batch influence each other: a forked pass returned another result")
        for i, other in zip(unproven_slots, others, strict=True):
            point = self.body.forking.points[self.slots[i]]
            one, main = outputs_alone[other], outputs_alone[self.main]
            if point is not None and not same(one, main, tolerance=PLAIN_DIFFERENCE):
                self.body.forking.proven.add(point)


def plain(batch: Any) -> Any:
    """Return a mapping, such as a tokenizer's output, as a dict; anything else unchanged."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def cut(target: Any, size: int, start: int, stop: int) -> Any:
    """Return samples `start` to `stop` of every tensor in `target` that has `size` samples."""
    return pytree.tree_map(lambda x: x[start:stop] if is_batched(x, size) else x, target)


def chunks(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of pieces of at most `most` samples and nearly equal size."""
    pieces = -(-size // most)
    for i in range(pieces):
        yield i * size // pieces, (i + 1) * size // pieces


@dataclass(frozen=True, slots=True)
class Measured:
    """Quality, contributions and prospects of one body, computed from its coalitions."""

    quality: float
    committed: float
    contribution: dict[str, tuple[float, float]]
    """Player → quality with it minus quality without it, and the paired standard error."""
    prospect: dict[str, tuple[float, float]]
    """TRAINING seed → what it would add at alpha = 1, and the paired standard error."""

    @classmethod
    def read(cls, result: Coalitions, numbers: Sequence[float]) -> Measured:
        """Build it from the numbers of `statistics`, as a list."""
        half = len(numbers) // 2
        pairs = list(zip(numbers[:half], numbers[half:], strict=True))
        named = list(zip(result.slots, pairs[2:], strict=True))
        return cls(pairs[0][0], pairs[1][0], dict(named[: result.players]), dict(named[result.players :]))


def statistics(result: Coalitions, scores: Tensor | None = None) -> Tensor:
    """Return means, then standard errors, of quality, committed quality, contributions and prospects; on the device.

    Differences are paired by sample, so the difficulty of a sample does not count as noise.
    """
    scores = result.scores if scores is None else scores  # [K, N]
    row = {config: scores[k] for k, config in enumerate(result.configs)}
    main = result.main
    differences = [row[main], row.get(result.committed, row[main])]
    for i in range(len(result.slots)):
        other = row.get((*main[:i], not main[i], *main[i + 1 :]))
        if other is None:
            other = torch.full_like(row[main], float("nan"))  # not evaluated
        differences.append(row[main] - other if main[i] else other - row[main])
    stacked = torch.stack(differences).double()
    n = stacked.shape[1]
    spread = stacked.std(1) if n > 1 else torch.full_like(stacked[:, 0], float("nan"))
    return torch.cat([stacked.mean(1), spread / n**0.5])


def measure(result: Coalitions) -> Measured:
    """Return quality, contributions and prospects of a body."""
    return Measured.read(result, statistics(result).tolist())  # sync: once per call
