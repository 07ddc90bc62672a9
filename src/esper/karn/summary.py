"""Summary of a run's journal, shared by all views: environments, their episodes, the seeds in their slots.

    RunSummary (manifest, envs, updates, phases, trouble)
    └── EnvLife (name)
        └── EpisodeLife (steps, decisions, lifecycle, result)
            └── SlotLife (stage intervals, alpha, worth)

It is built entry by entry (`add`), so a live view can extend it while the run goes on. It stores numbers rather than
entries: a million steps take some tens of megabytes. Unknown kinds are counted and skipped.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esper.karn.charts import Value
from esper.karn.lenient_manifest import CHECKS, Data, fact, manifest_of, slot_names
from esper.karn.number_table import NumberTable
from esper.leyline.stages import SeedStage
from esper.nissa.journal_reader import Damage, Entry, read
from esper.nissa.missed_events import lost_events

STEP_FIELDS = ("step", "quality", "committed_quality", "val_loss", "train_loss", "reward", "params")
WORTH_FIELDS = ("step", "seed", "committed", "contribution", "contribution_se", "shapley", "shapley_se",
                "prospect", "prospect_se", "interaction")  # fmt: skip


@dataclass(slots=True)
class Interval:
    """One stage of a slot, from the beginning of epoch `start` to the end of epoch `end`."""

    stage: SeedStage
    blueprint: str
    start: int
    end: int


@dataclass(slots=True)
class SlotLife:
    """History of one slot during one episode. Empty and unknown periods have no interval."""

    name: str
    intervals: list[Interval] = field(default_factory=list)
    alpha: list[tuple[int, Value]] = field(default_factory=list)
    """Changes of alpha: (step, the value from there on)."""
    worth: NumberTable = field(default_factory=lambda: NumberTable(WORTH_FIELDS))
    blueprints: dict[int, str] = field(default_factory=dict)
    """Seed → its blueprint, for seeds whose worth was measured."""

    def stands(self, step: int, stage: int, blueprint: str) -> None:
        """Record that the slot had `stage` in epoch `step`. Epochs without a record stay outside all intervals."""
        while self.intervals and self.intervals[-1].start >= step and self.intervals[-1].stage != stage:
            self.intervals.pop()  # repeated by a resumed run, or passed within one epoch
        last = self.intervals[-1] if self.intervals else None
        if last and last.stage == stage and last.blueprint in ("", blueprint) and step <= last.end + 1:
            last.blueprint, last.start, last.end = blueprint, min(last.start, step), step
            return
        if last:
            last.end = min(last.end, step - 1)
        if stage != SeedStage.DORMANT:
            self.intervals.append(Interval(SeedStage(stage), blueprint, step, step))

    def still_stands(self, step: int, stage: int) -> None:
        """Record that the stage did not change up to `step`."""
        if self.intervals and self.intervals[-1].stage == stage:
            self.intervals[-1].end = max(self.intervals[-1].end, step)

    def moved(self, step: int, was: SeedStage, now: SeedStage, dwell: int, blueprint: str) -> None:
        """Record the move from `was`, after `dwell` epochs, to `now`. Fills epochs without a step event."""
        last = self.intervals[-1] if self.intervals else None
        if last is not None and last.stage == was:
            last.end = max(last.end, step - 1)
        elif was != SeedStage.DORMANT and dwell > 0 and (last is None or last.end < step - dwell):
            self.intervals.append(Interval(was, blueprint, step - dwell, step - 1))
        self.stands(step, now, blueprint)

    def was_used(self) -> bool:
        """Return whether the slot had a seed or a measurement."""
        return bool(self.intervals) or len(self.worth) > 0


@dataclass(slots=True)
class EpisodeLife:
    """One environment's episode from its first step to its last, as far as it is recorded."""

    env: int
    episode: int
    name: str
    steps: NumberTable = field(default_factory=lambda: NumberTable(STEP_FIELDS))
    slots: dict[str, SlotLife] = field(default_factory=dict)
    decisions: list[Data] = field(default_factory=list)
    lifecycle: list[Data] = field(default_factory=list)
    result: Data | None = None
    """The run's `episode` event; None while the episode runs, or if it was cut off."""
    last_step: int = 0
    first_s: float = math.nan
    last_s: float = math.nan
    _stages: Any = None
    _alphas: Any = None
    _blueprints: Any = None
    _shown: list[tuple[SlotLife, int]] = field(default_factory=list)
    has_own_names: bool = False
    """Whether the run did not record the slot order of `step` events. Only events with slot names count then."""

    def named_slot(self, name: str, order: Sequence[str]) -> SlotLife:
        """Return a slot by its name in an event. Without a slot order, drop the unnamed slots from steps."""
        if not order and not self.has_own_names:
            self.has_own_names = True
            self.slots.clear()
            self._shown = []
        return self.slot(name)

    def slot(self, name: str) -> SlotLife:
        """Return the slot of this name, created if needed."""
        life = self.slots.get(name)
        if life is None:
            life = self.slots[name] = SlotLife(name)
        return life

    def add_step(self, d: Data, order: Sequence[str]) -> None:
        """Add a `step` event. Slots are updated only if something changed, which is rare."""
        step = d["step"]
        self.steps.add(d)
        if step != self.last_step + 1:
            self._jump(step)
        if self.has_own_names:
            self.last_step = step
            return
        stages, alphas, blueprints = d["stages"], d["alphas"], d["blueprints"]
        if stages != self._stages or blueprints != self._blueprints:
            self.settle()
            self._shown = [(self._at(s, order), stage) for s, stage in enumerate(stages)]
            for (slot, stage), blueprint in zip(self._shown, blueprints, strict=True):
                slot.stands(step, stage, blueprint)
            self._stages, self._blueprints = stages, blueprints
        if alphas != self._alphas:
            before = self._alphas or [None] * len(alphas)
            for s, alpha in enumerate(alphas):
                if alpha != before[s]:
                    self._at(s, order).alpha.append((step, alpha))
            self._alphas = alphas
        self.last_step = step

    def settle(self) -> None:
        """Extend the current stages to the last step."""
        for slot, stage in self._shown:
            slot.still_stands(self.last_step, stage)

    def _at(self, s: int, order: Sequence[str]) -> SlotLife:
        return self.slot(order[s] if s < len(order) else f"slot {s}")

    def _jump(self, step: int) -> None:
        """End the current intervals: steps are missing, or a resumed run repeats some."""
        self.settle()
        for slot in self.slots.values():
            slot.alpha = [change for change in slot.alpha if change[0] < step]
        self._stages = self._alphas = self._blueprints = None
        self._shown = []

    # -- results

    def recorded(self, name: str) -> Any:
        """Return a field of the result, None if it is missing or the episode has not ended."""
        return (self.result or {}).get(name)

    def _newest(self, name: str) -> Value:
        """Return a field of the result, else its last measured value."""
        if self.recorded(name) is not None:
            return float(self.recorded(name))
        return next((v for v in reversed(self.steps.column(name)) if v is not None), None)

    def grew_from(self, bare: EpisodeLife) -> bool:
        """Return whether `bare` is the no-growth baseline of this episode: same world, length and host, no seed."""
        same = all(self.recorded(k) == bare.recorded(k) for k in ("world", "steps", "host_params"))
        is_bare = bare.recorded("germinated") == 0 and bare.recorded("params") == bare.recorded("host_params")
        return same and is_bare and not bare.recorded("structure") and bool(self.recorded("germinated"))

    @property
    def quality(self) -> Value:
        """Final quality, or the last measured one."""
        return self._newest("quality")

    @property
    def quality_best(self) -> Value:
        """Best quality of the episode."""
        if self.recorded("quality_best") is not None:
            return float(self.recorded("quality_best"))
        return max((v for v in self.steps.column("quality") if v is not None and math.isfinite(v)), default=None)

    @property
    def params(self) -> int | None:
        """Final number of parameters, or the last recorded one."""
        params = self._newest("params")
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
        if self.recorded(stage.name.lower()) is not None:
            return int(self.recorded(stage.name.lower()))
        return sum(_stage(move.get("now")) == stage for move in self.lifecycle)


@dataclass(slots=True)
class EnvLife:
    """The episodes of one environment."""

    index: int
    name: str
    episodes: dict[int, EpisodeLife] = field(default_factory=dict)

    @property
    def latest(self) -> EpisodeLife | None:
        """The latest episode, None if there is none."""
        return next(reversed(self.episodes.values()), None)


@dataclass(slots=True)
class Phase:
    """Time spent in one phase, as totals over all ranks."""

    name: str
    wall_ms: float
    cpu_ms: float
    calls: int


class RunSummary:
    """Summary of a run directory; the run may be running, ended or killed."""

    def __init__(self, path: Path, manifest: Data | None = None) -> None:
        self.path = path
        self.name = ""
        """Name of the run beside other runs; empty: the name of its directory."""
        self.manifest: Data = manifest or {}
        self.manifest_damage: str | None = None
        self.started: Data = {}
        self.finished: Data | None = None
        self.envs: dict[int, EnvLife] = {}
        self.updates: list[Data] = []
        self.governor: list[Data] = []
        self.health: list[Data] = []
        self.kinds: Counter[str] = Counter()
        self.damage = Damage()
        self.unreadable = 0
        """Entries with fields of the wrong type."""
        self.is_percent = True
        """Whether all qualities are fractions, to be shown as percent and points."""
        self.first_s = math.nan
        self.last_s = math.nan
        """Time of the latest entry, in seconds."""
        self._rank = 0  # of the latest entry
        self._phases: dict[tuple[int, str], Phase] = {}
        self._order = slot_names(self.manifest)  # until the run_started event
        self._recent: EpisodeLife | None = None
        self._handlers: dict[str, Callable[[Data], None]] = {
            "step": self._step, "worth": self._worth, "decision": self._decision, "lifecycle": self._lifecycle,
            "run_started": self._run_started, "run_finished": self._run_finished, "episode": self._episode_end,
            "phase_profile": self._phase, "update": self.updates.append, "governor": self.governor.append,
            "health": self.health.append,
        }  # fmt: skip

    @classmethod
    def of(cls, path: Path) -> RunSummary:
        """Read a complete run directory."""
        manifest, damage = manifest_of(path)
        summary = cls(path, manifest)
        summary.manifest_damage = damage
        collects = gc.isenabled()
        gc.disable()  # rows contain no cycles, and collecting takes a third of the reading time
        try:
            summary.add(read(path, summary.damage))
        finally:
            if collects:
                gc.enable()
        return summary

    def add(self, entries: Iterable[Entry]) -> None:
        """Add the next entries."""
        for _, self.last_s, self._rank, kind, data, _ in entries:
            self.kinds[kind] += 1
            if self.first_s != self.first_s:
                self.first_s = self.last_s
            handle = self._handlers.get(kind)
            if handle is not None:
                try:
                    CHECKS[kind](data)
                    handle(data)
                except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
                    self.unreadable += 1
        for env in self.envs.values():
            if env.latest is not None:
                env.latest.settle()

    @property
    def losses(self) -> list[str]:
        """Descriptions of the journal's missing events."""
        return lost_events(self.manifest, self.damage.extents(), has_end=self.finished is not None)

    # -- lookup

    def env(self, index: int) -> EnvLife:
        """Return the environment of this index, created if needed."""
        life = self.envs.get(index)
        if life is None:
            names = self.started.get("env_names") or ()
            name = str(names[index]) if 0 <= index < len(names) else f"env {index}"
            life = self.envs[index] = EnvLife(index, name)
        return life

    def _episode(self, d: Data) -> EpisodeLife:
        life = self._recent
        if life is None or life.episode != d["episode"] or life.env != d["env"]:
            life = self._recent = self._other_episode(d["env"], d["episode"])
        life.last_s = self.last_s
        return life

    def _other_episode(self, index: int, number: int) -> EpisodeLife:
        env = self.env(index)
        life = env.episodes.get(number)
        if life is None:
            if env.latest is not None:
                env.latest.settle()
            life = env.episodes[number] = EpisodeLife(env.index, number, env.name, first_s=self.last_s)
            for name in self._order:
                life.slot(name)
        return life

    # -- one handler per kind

    def _run_started(self, d: Data) -> None:
        if self.started:  # a resumed run emits it again; the first one counts
            return
        self.started = d
        self._order = tuple(d.get("slots") or ()) or self._order
        for index in range(len(d.get("env_names") or ())):
            self.env(index)

    def _run_finished(self, d: Data) -> None:
        self.finished = d

    def _step(self, d: Data) -> None:
        self._episode(d).add_step(d, self._order)
        self._see_quality(d.get("quality"))

    def _decision(self, d: Data) -> None:
        self._episode(d).decisions.append(d)

    def _lifecycle(self, d: Data) -> None:
        life = self._episode(d)
        life.lifecycle.append(d)
        was, now = _stage(d["was"]), _stage(d["now"])
        slot = life.named_slot(d["slot"], self._order)
        has_step = d["step"] <= life.last_step and not life.has_own_names  # the step event is more accurate
        if was is not None and now is not None and not has_step:
            slot.moved(d["step"], was, now, d.get("dwell_epochs") or 0, d.get("blueprint") or "")

    def _worth(self, d: Data) -> None:
        slot = self._episode(d).named_slot(d["slot"], self._order)
        slot.worth.add(d)
        slot.blueprints[d["seed"]] = d["blueprint"]

    def _episode_end(self, d: Data) -> None:
        life = self._episode(d)
        life.result = d
        self._see_quality(d.get("quality"))
        self._see_quality(d.get("quality_best"))
        if not len(life.steps) or life.has_own_names:  # only moves were recorded: the last stage lasted until the end
            for slot in life.slots.values():
                if slot.intervals:
                    slot.intervals[-1].end = max(slot.intervals[-1].end, d["steps"])

    def _see_quality(self, quality: Value) -> None:
        if quality is not None and not 0 <= quality <= 1 and math.isfinite(quality):
            self.is_percent = False

    def _phase(self, d: Data) -> None:
        totals = Phase(str(d["phase"]), float(d["wall_ms"]), float(d["cpu_ms"]), int(d["calls"]))
        self._phases[self._rank, totals.name] = totals

    # -- queries of the views

    @property
    def episodes(self) -> list[EpisodeLife]:
        """All episodes, ordered by environment and number."""
        return [e for env in sorted(self.envs) for _, e in sorted(self.envs[env].episodes.items())]

    @property
    def latest(self) -> list[EpisodeLife]:
        """The latest episode of every environment that has one, ordered by environment."""
        return [env.latest for _, env in sorted(self.envs.items()) if env.latest is not None]

    @property
    def slots(self) -> list[str]:
        """Slot names in the run's order, followed by any others."""
        return list(dict.fromkeys([*self._order, *(name for e in self.episodes for name in e.slots)]))

    @property
    def status(self) -> str:
        """Status of the run."""
        if self.finished is not None and self.manifest.get("status") in (None, "running", "killed"):
            return str(self.finished.get("status", "finished"))
        return str(self.manifest.get("status") or "unknown")

    @property
    def wall_s(self) -> Value:
        """Duration of the run in seconds."""
        if self.finished is not None and self.finished.get("wall_s") is not None:
            return float(self.finished["wall_s"])
        return self.last_s - self.first_s if self.last_s >= self.first_s else None

    @property
    def phases(self) -> list[Phase]:
        """Phases, largest wall time first, summed over ranks."""
        total: dict[str, Phase] = {}
        for phase in self._phases.values():
            sofar = total.setdefault(phase.name, Phase(phase.name, 0.0, 0.0, 0))
            sofar.wall_ms += phase.wall_ms
            sofar.cpu_ms += phase.cpu_ms
            sofar.calls += phase.calls
        return sorted(total.values(), key=lambda p: -p.wall_ms)

    def about(self, name: str) -> Any:
        """Return a fact of the run, from its first event or else from its manifest."""
        if self.started.get(name) not in (None, ""):
            return self.started[name]
        return fact(self.manifest, name)


def _stage(name: object) -> SeedStage | None:
    return SeedStage.__members__.get(str(name).upper())
