"""One episode of an environment, folded from its events: its steps, its slots, and the lives of its seeds.

EpisodeState (steps, result)
├── SlotHistory (stage intervals, alpha, worth)
└── SeedLife (moves between stages, and why)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from esper.karn.series import Series
from esper.leyline.events import Decision, Episode, Gradient, Lifecycle, SeedWorth, Step
from esper.leyline.stages import SeedStage

STEP_COLUMNS = ("step", "train_macs", "quality", "committed_quality", "val_loss", "train_loss", "utility", "reward",
                "params", "position")  # fmt: skip
WORTH_COLUMNS = ("step", "seed", "committed", "contribution", "contribution_se", "shapley", "shapley_se", "prospect",
                 "prospect_se", "interaction")  # fmt: skip
MOST_INTERVALS = 512
"""Maximum number of stage intervals, of changes of alpha and of seeds that are kept. The oldest are dropped."""
MOST_PENDING = 512
"""Maximum number of events that an episode collects before it absorbs them."""
Value = float | None


@dataclass(slots=True)
class Interval:
    """One stage of a slot, from the beginning of epoch `start` to the end of epoch `end`."""

    stage: SeedStage
    blueprint: str
    start: int
    end: int


@dataclass(slots=True)
class SlotHistory:
    """History of one slot during one episode. Empty and unknown periods have no interval."""

    name: str
    intervals: list[Interval] = field(default_factory=list)
    alpha: list[tuple[int, Value]] = field(default_factory=list)
    """Changes of alpha: (step, the value from there on)."""
    worth: Series = field(default_factory=lambda: Series(WORTH_COLUMNS))
    newest_worth: SeedWorth | None = None
    gradient: tuple[Value, Value] = (None, None)
    """The newest ratio of its gradients to the host's, and their health."""

    def set_stage(self, step: int, stage: int, blueprint: str) -> None:
        """Record that the slot had `stage` in epoch `step`. Epochs without a record stay outside all intervals."""
        while self.intervals and self.intervals[-1].start >= step and self.intervals[-1].stage != stage:
            self.intervals.pop()  # repeated by a resumed run, or passed within one epoch
        last = self.intervals[-1] if self.intervals else None
        if last and last.stage == stage and last.blueprint in ("", blueprint) and step <= last.end + 1:
            last.blueprint = blueprint
            last.start = min(last.start, step)
            last.end = step
            return
        if last:
            last.end = min(last.end, step - 1)
        if stage != SeedStage.DORMANT:
            self.intervals.append(Interval(SeedStage(stage), blueprint, step, step))
            del self.intervals[:-MOST_INTERVALS]

    def extend(self, step: int, stage: int) -> None:
        """Record that the stage did not change up to `step`."""
        if self.intervals and self.intervals[-1].stage == stage:
            self.intervals[-1].end = max(self.intervals[-1].end, step)

    def move(self, step: int, was: SeedStage, now: SeedStage, dwell: int, blueprint: str) -> None:
        """Record the move from `was`, after `dwell` epochs, to `now`. Fills epochs without a step event."""
        last = self.intervals[-1] if self.intervals else None
        if last is not None and last.stage == was:
            last.end = max(last.end, step - 1)
        elif was != SeedStage.DORMANT and dwell > 0 and (last is None or last.end < step - dwell):
            self.intervals.append(Interval(was, blueprint, step - dwell, step - 1))
        self.set_stage(step, now, blueprint)

    def was_used(self) -> bool:
        """Return whether the slot had a seed or a measurement."""
        return bool(self.intervals) or len(self.worth) > 0


@dataclass(slots=True)
class SeedLife:
    """One seed from its germination on."""

    seed: int
    slot: str
    blueprint: str
    params: int
    moves: list[tuple[Lifecycle, Decision | None]] = field(default_factory=list)
    """Its moves between stages, each with the decision that caused it; None if it is not the controller's."""


@dataclass(slots=True)
class EpisodeState:
    """One environment's episode from its first step to its last, as far as it is recorded."""

    env: int
    number: int
    name: str
    order: Sequence[str]
    """Slot names in the order of the arrays in `step` events; empty if the run did not record it."""
    world: int | None = None
    steps: Series = field(default_factory=lambda: Series(STEP_COLUMNS))
    slots: dict[str, SlotHistory] = field(default_factory=dict)
    seeds: dict[int, SeedLife] = field(default_factory=dict)
    counts: dict[SeedStage, int] = field(default_factory=dict)
    """Stage → how many seeds entered it."""
    result: Episode | None = None
    """None while the episode runs, or if it was cut off."""
    newest: Step | None = None
    quality_best: Value = None
    last_step: int = 0
    first_s: float = math.nan
    last_s: float = math.nan
    has_own_names: bool = False
    """Whether the run did not record the slot order of `step` events. Only events with slot names count then."""
    decision: Decision | None = None
    """The newest decision that was not to wait."""
    pending: list[Any] = field(default_factory=list)
    """Events that are not absorbed yet: steps, worth, gradients, decisions, moves and result."""
    positions: list[int] = field(default_factory=list)
    """Position in the journal of each step in `pending`."""
    _shown: list[tuple[SlotHistory, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.order:
            self.slot(name)

    def absorb(self) -> EpisodeState:
        """Fold the collected events, and return the episode."""
        if not self.pending:
            return self
        pending, self.pending = self.pending, []
        positions, self.positions = iter(self.positions), []
        for event in pending:
            match event:
                case Step():
                    self._add_step(event, next(positions))
                case SeedWorth():
                    self._add_worth(event)
                case Gradient():
                    self.named_slot(event.slot).gradient = event.ratio, event.health
                case Decision():
                    self.decision = event
                case Lifecycle():
                    self._add_move(event)
                case Episode():
                    self._finish(event)
        self._settle()
        return self

    def slot(self, name: str) -> SlotHistory:
        """Return the slot of this name, created if needed."""
        if name not in self.slots:
            self.slots[name] = SlotHistory(name)
        return self.slots[name]

    def named_slot(self, name: str) -> SlotHistory:
        """Return a slot by its name in an event. Without a slot order, drop the unnamed slots from steps."""
        if not self.order and not self.has_own_names:
            self.has_own_names = True
            self.slots.clear()
            self._shown = []
        return self.slot(name)

    def _add_step(self, d: Step, position: int) -> None:
        """Add a step. Slots are updated only if something changed, which is rare."""
        step = d.step
        before = self.newest
        if step != self.last_step + 1:
            before = None
            self._jump(step)
        quality = d.quality
        self.steps.add((step, d.train_macs, quality, d.committed_quality, d.val_loss, d.train_loss, d.utility,
                        d.reward, d.params, position))  # fmt: skip
        if quality is not None and (self.quality_best is None or quality > self.quality_best) and quality < math.inf:
            self.quality_best = quality
        if not self.has_own_names:
            if before is None or d.stages != before.stages or d.blueprints != before.blueprints:
                self._set_stages(d)
            if before is None or d.alphas != before.alphas:
                self._set_alphas(d, before)
        self.newest = d
        self.last_step = step
        self.world = d.world

    def _set_stages(self, d: Step) -> None:
        self._settle()
        self._shown = [(self._at(s), stage) for s, stage in enumerate(d.stages)]
        for (slot, stage), blueprint in zip(self._shown, d.blueprints, strict=False):
            slot.set_stage(d.step, stage, blueprint)

    def _set_alphas(self, d: Step, before: Step | None) -> None:
        earlier = before.alphas if before is not None else ()
        for s, alpha in enumerate(d.alphas):
            if s >= len(earlier) or alpha != earlier[s]:
                changes = self._at(s).alpha
                changes.append((d.step, alpha))
                del changes[: -4 * MOST_INTERVALS]

    def _settle(self) -> None:
        """Extend the current stages to the last step."""
        for slot, stage in self._shown:
            slot.extend(self.last_step, stage)

    def _at(self, s: int) -> SlotHistory:
        return self.slot(self.order[s] if s < len(self.order) else f"slot {s}")

    def _jump(self, step: int) -> None:
        """End the current intervals: steps are missing, or a resumed run repeats some."""
        self._settle()
        self.steps.cut(step)
        for slot in self.slots.values():
            slot.alpha = [change for change in slot.alpha if change[0] < step]
        self._shown = []

    def _add_worth(self, d: SeedWorth) -> None:
        slot = self.named_slot(d.slot)
        slot.worth.add((d.step, d.seed, d.committed, d.contribution, d.contribution_se, d.shapley, d.shapley_se,
                        d.prospect, d.prospect_se, d.interaction))  # fmt: skip
        slot.newest_worth = d

    def _add_move(self, d: Lifecycle) -> None:
        was, now = stage_of(d.was), stage_of(d.now)
        slot = self.named_slot(d.slot)
        has_step = d.step <= self.last_step and not self.has_own_names  # the step event is more accurate
        if was is not None and now is not None:
            self.counts[now] = self.counts.get(now, 0) + 1
            if not has_step:
                slot.move(d.step, was, now, d.dwell_epochs, d.blueprint)
        life = self.seeds.get(d.seed)
        if life is None or (now == SeedStage.GERMINATED and life.moves):
            life = self.seeds[d.seed] = SeedLife(d.seed, d.slot, d.blueprint, d.params)
            if len(self.seeds) > MOST_INTERVALS:
                del self.seeds[next(iter(self.seeds))]
        life.params = d.params or life.params
        chosen = self.decision if d.cause == "controller" else None
        is_reason = chosen is not None and chosen.step == d.step and chosen.slot in ("", d.slot)
        life.moves.append((d, chosen if is_reason else None))

    def _finish(self, d: Episode) -> None:
        """Extend the last stage until the end if only moves were recorded."""
        if not len(self.steps) or self.has_own_names:
            for slot in self.slots.values():
                if slot.intervals:
                    slot.intervals[-1].end = max(slot.intervals[-1].end, d.steps)

    # -- results

    def recorded(self, name: str) -> Any:
        """Return a field of the result, None if it is not measured or the episode has not ended."""
        return getattr(self.result, name, None)

    def current(self, slot: SlotHistory) -> Interval | None:
        """Return the interval of a slot that lasts until the newest step; None if the slot is empty now."""
        return slot.intervals[-1] if slot.intervals and slot.intervals[-1].end >= self.last_step else None

    @property
    def is_finite(self) -> bool:
        """Whether the newest quality and loss are finite numbers, or not measured."""
        values = () if self.newest is None else (self.newest.quality, self.newest.val_loss)
        return all(value is None or math.isfinite(value) for value in values)

    @property
    def quality(self) -> Value:
        """Final quality, or the last measured one."""
        return self.steps.last("quality") if self.recorded("quality") is None else self.recorded("quality")

    @property
    def best(self) -> Value:
        """Best quality of the episode."""
        return self.quality_best if self.recorded("quality_best") is None else self.recorded("quality_best")

    @property
    def params(self) -> int | None:
        """Final number of parameters, or the last recorded one."""
        params = self.steps.last("params") if self.recorded("params") is None else self.recorded("params")
        return None if params is None else int(params)

    @property
    def length(self) -> int:
        """Length of the episode in steps."""
        return max(self.last_step, self.recorded("steps") or 0)

    @property
    def wall_s(self) -> Value:
        """Recorded duration in seconds, else the time from its first to its last event."""
        if self.recorded("wall_s") is not None:
            return float(self.recorded("wall_s"))
        return self.last_s - self.first_s if self.last_s >= self.first_s else None

    def count(self, stage: SeedStage) -> int:
        """Return how many seeds entered a stage, from the result or else from the recorded moves."""
        number = self.recorded(stage.name.lower())
        return self.counts.get(stage, 0) if number is None else int(number)

    def grew_from(self, bare: EpisodeState) -> bool:
        """Return whether `bare` is the no-growth baseline of this episode: same world, length and host, no seed."""
        same = all(self.recorded(k) == bare.recorded(k) for k in ("world", "steps", "host_params"))
        is_bare = bare.recorded("germinated") == 0 and bare.recorded("params") == bare.recorded("host_params")
        return same and is_bare and not bare.recorded("structure") and bool(self.recorded("germinated"))


def stage_of(name: str) -> SeedStage | None:
    """Return a stage by its name in an event; None if there is none."""
    return SeedStage.__members__.get(name.upper())
