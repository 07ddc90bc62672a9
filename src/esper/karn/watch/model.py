"""The data shown on screen, folded from the journal one entry at a time. Pure: no clock, no files, no terminal.

None means *not measured*; values that are not finite are kept. Unknown kinds and missing fields are not errors: a view
must never fail because of a run's data.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from esper.karn.watch.states import EnvState, Number, SlotState, items, number, numbers, stage_number, text, whole
from esper.leyline.actions import Op
from esper.leyline.stages import COOLING, SeedStage
from esper.nissa.journal_reader import Entry

HAPPENINGS = 2000
"""Maximum number of events kept for the list of a run."""
BEST = 20
"""Maximum number of episodes kept in the table of the best."""
TROUBLES = 8
"""Maximum number of warnings and errors kept."""
PAUSE_S = 0.2
"""Gap in seconds above which two events belong to different bursts. The gaps show how often a run emits events."""
SHOWN = {
    "run_started", "run_finished", "lifecycle", "decision", "episode", "governor", "health", "checkpoint", "update",
}  # fmt: skip
"""Kinds shown in the list of events, except decisions to wait."""


@dataclass(slots=True)
class Mark:
    """The progress of a run at one time."""

    time_s: float
    env_steps: int
    events: int


class WatchModel:
    """All data of a screen, folded from entries in the order of the journal."""

    def __init__(self) -> None:
        self.run: dict[str, Any] = {}  # of `run_started`
        self.status: str | None = None  # from the manifest; set by the reader
        self.manifest_damage: str | None = None  # why the manifest cannot be read; set by the reader
        self.damage = 0  # number of unreadable lines; set by the reader
        self.losses: list[str] = []  # descriptions of missing events; set by the reader
        self.ending: dict[str, Any] | None = None  # of `run_finished`
        self.envs: dict[int, EnvState] = {}
        self.slot_names: list[str] = []
        self.happenings: deque[Entry] = deque(maxlen=HAPPENINGS)
        self.happened = 0  # total, including those no longer kept
        self.best: list[dict[str, Any]] = []  # episodes, best first
        self.episodes = 0
        self.update: dict[str, Any] | None = None
        self.updates = 0
        self.ops: Counter[str] = Counter()  # over steps with a choice
        self.forced = 0
        self.governor: Counter[str] = Counter()  # alarms by name
        self.last_alarm: Entry | None = None
        self.troubles: dict[str, Entry] = {}  # latest warnings and errors by text
        self.counters: dict[str, Number] = {}  # from `health` events
        self.phases: dict[str, dict[str, Any]] = {}
        self.is_percent = True  # all qualities so far are fractions: show percent and points
        self.version = 0  # increases with every change of what is shown
        self.events = 0
        self.env_steps = 0
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.fresh_at: float | None = None  # reader's clock when the last event was new
        self.arrived_at: float | None = None  # same, for events written while the reader was running
        self.paused_s = 0.0  # total time between an end and a resumption
        self.marks: deque[Mark] = deque(maxlen=2400)
        self.pauses: deque[float] = deque(maxlen=32)
        self._slot_index: dict[str, int] = {}
        self._slots_from = ""  # run: named in order; steps: only positions are known; events: only names are known
        self._folds = {
            "run_started": self._run_started, "run_finished": self._run_finished, "step": self._step,
            "decision": self._decision, "lifecycle": self._lifecycle, "worth": self._worth,
            "gradient": self._gradient, "update": self._update, "episode": self._episode,
            "governor": self._governor, "health": self._health, "phase_profile": self._phase,
        }  # fmt: skip

    def feed(self, entries: Iterable[Entry], now: float | None = None) -> int:
        """Add entries and return their number. `now` is the reader's clock if they have just been written.

        Without it, the entries' own times define their age, which is right for entries older than the reader. Later the
        time of arrival counts, since the clocks of two machines may differ.
        """
        count = 0
        for entry in entries:
            self._clock(entry)
            fold = self._folds.get(entry.kind)
            if fold is not None:
                fold(entry)
            if entry.kind in SHOWN and not (entry.kind == "decision" and entry.data.get("op") == Op.WAIT.name):
                self._list(entry)
            count += 1
        if count:
            self.version += 1
            self.fresh_at = self.last_s if now is None else now
            self.arrived_at = now
        return count

    def name_slots(self, names: list[str]) -> None:
        """Set the slot names in the order of a step's arrays, from `run_started` or the manifest."""
        self._slots_from = "run"
        if names != self.slot_names:
            self._forget_slots()
            self._grow_slots(names)

    # derived values

    @property
    def steps(self) -> int | None:
        """Steps per episode, if the run recorded it."""
        return whole(self.run.get("steps")) or None

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return max(1, whole(self.run.get("rounds"), 1))

    @property
    def round(self) -> int:
        """The current round, counted from 1; 0 before the first step."""
        return max((e.episodes for e in self.envs.values()), default=0)

    @property
    def step(self) -> int:
        """The smallest step of the environments in the current round."""
        return min((e.step for e in self.envs.values() if e.episodes == self.round), default=0)

    @property
    def done(self) -> float | None:
        """Completed share of all env-steps, if the run recorded their number."""
        if self.steps is None or not self.envs:
            return None
        each = [min(self.rounds, (max(0, e.episodes - 1) + min(1.0, e.step / self.steps))) for e in self.envs.values()]
        return min(1.0, sum(each) / (self.rounds * len(each)))

    @property
    def usual_pause_s(self) -> float:
        """The longest of the recent gaps between events, in seconds."""
        return max(self.pauses, default=0.0)

    def rate(self, window_s: float, now_s: float) -> tuple[float, float] | None:
        """Return env-steps and events per second over the last `window_s` seconds of the run's clock."""
        if self.first_s is None or len(self.marks) < 2:
            return None
        begin = now_s - window_s
        since = self.marks[0]
        for mark in reversed(self.marks):
            if mark.time_s < begin:
                since = mark
                break
        span = now_s - max(since.time_s, begin)
        if span <= 0:
            return None
        return (self.env_steps - since.env_steps) / span, (self.events - since.events) / span

    # folds, one per kind

    def _clock(self, entry: Entry) -> None:
        self.events += 1
        if self.first_s is None or self.last_s is None:
            self.first_s = self.last_s = entry.time_s
        pause = entry.time_s - self.last_s
        if entry.kind == "run_started":
            self.paused_s += max(0.0, pause)
            self.pauses.clear()
            self.marks.clear()
        elif pause > PAUSE_S:
            self.pauses.append(pause)
        self.last_s = max(self.last_s, entry.time_s)
        if not self.marks or entry.time_s - self.marks[-1].time_s > PAUSE_S:
            self.marks.append(Mark(entry.time_s, self.env_steps, self.events))

    def _list(self, entry: Entry) -> None:
        self.happenings.append(entry)
        self.happened += 1
        env = self.envs.get(whole(entry.data.get("env"), -1))
        if env is not None:
            env.happenings.append(entry)

    def _env(self, data: Mapping[str, Any]) -> EnvState:
        """Return the environment of an event, set to the event's episode."""
        index = whole(data.get("env"))
        env = self.envs.get(index)
        if env is None:
            env = self.envs[index] = self._new_env(index)
        if "episode" in data:
            env.begin(whole(data["episode"]))
        return env

    def _new_env(self, index: int) -> EnvState:
        names = items(self.run.get("env_names"))
        name = text(names[index]) if 0 <= index < len(names) else ""
        return EnvState(index, name or f"env {index}", [SlotState(s) for s in self.slot_names])

    def _slot(self, env: EnvState, name: str) -> SlotState:
        if name not in self._slot_index:
            if self._slots_from == "steps":  # the position of this name is unknown: show each slot once
                self._forget_slots()
            self._slots_from = self._slots_from if self._slots_from == "run" else "events"
            self._grow_slots([*self.slot_names, name])
        return env.slots[self._slot_index[name]]

    def _forget_slots(self) -> None:
        self.slot_names, self._slot_index = [], {}
        for env in self.envs.values():
            env.slots = []

    def _grow_slots(self, names: list[str]) -> None:
        """Extend the slots of all environments. Slots that the run did not name are added as they appear."""
        fresh = names[len(self.slot_names) :]
        self.slot_names = names
        self._slot_index = {name: i for i, name in enumerate(names)}
        for env in self.envs.values():
            env.slots += [SlotState(name) for name in fresh]

    def _run_started(self, entry: Entry) -> None:
        """Handle the start or a resumption of a run. A resumption changes only names."""
        before, self.run, self.ending = self.run, entry.data, None
        names = [text(n) for n in items(entry.data.get("slots"))]
        if names:
            self.name_slots(names)
        if before and before.get("env_names") != entry.data.get("env_names"):
            self.envs.clear()
        for index in range(len(items(entry.data.get("env_names")))):
            if index not in self.envs:
                self.envs[index] = self._new_env(index)

    def _run_finished(self, entry: Entry) -> None:
        self.ending = entry.data

    def _step(self, entry: Entry) -> None:
        d = entry.data
        env = self._env(d)
        stages = [whole(s) for s in items(d.get("stages"))]
        self._count_op(env, text(d.get("op")))
        env.step, env.op = whole(d.get("step")), text(d.get("op"))
        if env.op and env.op != Op.WAIT.name and env.act_step != env.step:
            env.act, env.act_slot, env.act_step = env.op, "", env.step
        env.quality, env.committed_quality = number(d.get("quality")), number(d.get("committed_quality"))
        env.train_loss, env.val_loss = number(d.get("train_loss")), number(d.get("val_loss"))
        env.reward = number(d.get("reward"))
        env.params = whole(d["params"]) if number(d.get("params")) is not None else None
        env.qualities.append(env.quality)
        self._note_quality(env)
        env.stages.append(bytes(s & 0xFF for s in stages))
        self.env_steps += 1
        if self._slots_from == "events":
            return
        if len(stages) > len(self.slot_names):
            self._slots_from = self._slots_from or "steps"
            self._grow_slots(self.slot_names + [f"slot {i}" for i in range(len(self.slot_names), len(stages))])
        alphas, blueprints = items(d.get("alphas")), items(d.get("blueprints"))
        for i, (slot, stage) in enumerate(zip(env.slots, stages, strict=False)):
            slot.enter(stage, env.step)
            slot.alpha = number(alphas[i]) if i < len(alphas) else None
            slot.blueprint = text(blueprints[i]) if i < len(blueprints) else ""

    def _note_quality(self, env: EnvState) -> None:
        q = env.quality
        if q is None or not math.isfinite(q):
            return
        self.is_percent = self.is_percent and 0.0 <= q <= 1.0
        if env.best is None or q > env.best:
            env.best, env.best_step = q, env.step

    def _count_op(self, env: EnvState, op: str) -> None:
        """Count the ops chosen where there was a choice.

        A journal at the normal level does not record which ops were legal on a step that waited. There was no choice
        if before it every slot was fossilised or cooling down.
        """
        forced, env.is_forced = env.is_forced, None
        if forced is None and op == Op.WAIT.name and env.slots:
            forced = all(s.stage == SeedStage.FOSSILIZED or s.stage in COOLING for s in env.slots)
        if forced:
            self.forced += 1
        elif op:
            self.ops[op] += 1

    def _decision(self, entry: Entry) -> None:
        d = entry.data
        env = self._env(d)
        env.is_forced = len(items(d.get("legal_ops"))) == 1
        if d.get("op") != Op.WAIT.name:
            env.act, env.act_slot, env.act_step = text(d.get("op")), text(d.get("slot")), whole(d.get("step"))

    def _lifecycle(self, entry: Entry) -> None:
        d = entry.data
        env = self._env(d)
        slot = self._slot(env, text(d.get("slot")))
        env.step = max(env.step, whole(d.get("step")))
        slot.enter(stage_number(d.get("now")), whole(d.get("step")))
        is_empty = not slot.is_growing and slot.stage != SeedStage.FOSSILIZED
        slot.blueprint = "" if is_empty else text(d.get("blueprint"))
        slot.alpha = number(d.get("alpha"))
        if not is_empty and number(d.get("contribution")) is not None:
            self._measured(slot, d, ("contribution", "contribution_se"))

    def _worth(self, entry: Entry) -> None:
        d = entry.data
        env = self._env(d)
        names = ("contribution", "contribution_se", "solo", "solo_se", "shapley", "shapley_se", "interaction",
                 "prospect", "prospect_se")  # fmt: skip
        self._measured(self._slot(env, text(d.get("slot"))), d, names)

    def _measured(self, slot: SlotState, data: Mapping[str, Any], names: Iterable[str]) -> None:
        slot.worth.update({n: number(data.get(n)) for n in names})
        slot.worth_step = whole(data.get("step"))

    def _gradient(self, entry: Entry) -> None:
        slot = self._slot(self._env(entry.data), text(entry.data.get("slot")))
        slot.health, slot.ratio = number(entry.data.get("health")), number(entry.data.get("ratio"))

    def _update(self, entry: Entry) -> None:
        self.update = entry.data
        self.updates += 1

    def _episode(self, entry: Entry) -> None:
        d = entry.data
        env = self._env(d)
        env.has_ended = True
        if not env.qualities:  # a journal without steps: use the episode's own numbers
            self.env_steps += whole(d.get("steps"))
        env.step = max(env.step, whole(d.get("steps")))
        env.quality = number(d.get("quality")) if d.get("quality") is not None else env.quality
        self._note_quality(env)
        if number(d.get("quality_best")) is not None:
            env.best = number(d.get("quality_best"))
        env.params = whole(d.get("params")) or env.params
        self.episodes += 1
        self.best = sorted([*self.best, d], key=_rank)[:BEST]

    def _governor(self, entry: Entry) -> None:
        env = self._env(entry.data)
        if entry.data.get("action") == "rolled back":
            env.governed_step = whole(entry.data.get("step"))
        self.governor[text(entry.data.get("alarm")) or "alarm"] += 1
        self.last_alarm = entry

    def _health(self, entry: Entry) -> None:
        self.counters.update(numbers(entry.data.get("counters")))
        if entry.data.get("severity") in ("warning", "error"):
            self.troubles[text(entry.data.get("text"))] = entry
            if len(self.troubles) > TROUBLES:
                del self.troubles[next(iter(self.troubles))]

    def _phase(self, entry: Entry) -> None:
        self.phases[text(entry.data.get("phase"))] = entry.data


def _rank(episode: Mapping[str, Any]) -> float:
    """Sort key: best first; not measured or not finite last."""
    quality = number(episode.get("quality"))
    return -quality if quality is not None and math.isfinite(quality) else math.inf
