"""RunState: everything that views show of a run, folded from its journal one row at a time.

The live page, the report, the terminal view and comparisons use it. It is append-only: rows are folded in the order of
the journal, in portions of any size, with the same result. Memory is bounded: each environment keeps its newest
episode, the run keeps its best one, and long series keep minimum and maximum of equal groups of rows. The journal has
everything else.
"""

from __future__ import annotations

import gc
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from esper.karn.episode_state import MOST_PENDING, EpisodeState, Value, stage_of
from esper.karn.series import Means, Series
from esper.leyline.actions import Head
from esper.leyline.events import (
    Decision,
    GovernorAlarm,
    Health,
    Lifecycle,
    PhaseProfile,
    RunFinished,
    RunStarted,
    Update,
)
from esper.leyline.stages import SeedStage
from esper.leyline.text import printable
from esper.nissa.journal_reader import Damage
from esper.nissa.journal_rows import PORTION, ROWS, OtherRow, follow
from esper.nissa.missed_events import lost_events
from esper.nissa.run_list import Data, fact, manifest_of

UPDATE_COLUMNS = ("round", "return_mean", "return_sd", "kl", "clip_fraction", "explained_variance", "value_nrmse",
                  "policy_loss", "value_loss", "grad_norm", "lr", "skipped", "wall_ms")  # fmt: skip
ROUND_COLUMNS = ("quality", "baseline_quality", "test_quality", "utility", "episode_return", "params", "germinated",
                 "fossilized", "pruned", "rollbacks")  # fmt: skip
_update_values = attrgetter(*UPDATE_COLUMNS)
_round_values = attrgetter(*ROUND_COLUMNS)
MOST_EVENTS = 200
"""Maximum number of events, decisions, alarms and health messages that are kept, the newest ones."""


@dataclass(slots=True)
class EnvState:
    """One environment: its newest episode."""

    index: int
    name: str
    episode: EpisodeState | None = None
    """The newest episode, with events that it has not absorbed yet; read it as `latest`."""
    episodes: int = 0
    """Number of episodes that began."""
    changed: int = 0
    """Position of the last event that changed it."""

    @property
    def latest(self) -> EpisodeState | None:
        """The newest episode; None before its first event."""
        return None if self.episode is None else self.episode.absorb()


@dataclass(slots=True)
class Phase:
    """Time spent in one phase, as totals over all ranks."""

    phase: str
    wall_ms: float
    cpu_ms: float
    calls: int


@dataclass(slots=True)
class BlueprintCount:
    """Outcomes of the seeds of one blueprint over the run."""

    germinated: int = 0
    fossilized: int = 0
    pruned: int = 0
    worths: list[float] = field(default_factory=lambda: [0, 0.0])  # number and sum of contributions at the commit


class RunState:
    """State of a run after the first `position` events of its journal. The run may be running, ended or killed."""

    def __init__(self, path: Path, manifest: Data | None = None) -> None:
        self.path = path
        self.name = printable(path.resolve().name)
        """Name of the directory, since a copied run keeps its run id. Views of several runs set longer names."""
        self.manifest: Data = manifest or {}
        self.manifest_damage: str | None = None
        self.damage = Damage()
        self.position = 0
        """Number of folded events. In a run of one process that lost nothing: the sequence number of the next one."""
        self.unreadable = 0
        """Events with fields of the wrong type."""
        self.started: RunStarted | None = None
        self.finished: RunFinished | None = None
        self.envs: dict[int, EnvState] = {}
        self.episodes = 0
        self.env_steps = 0
        self.best: EpisodeState | None = None
        self.rounds = Means(ROUND_COLUMNS)
        self.entropies = Means(("entropy", "value"))
        """Of decisions, by round if there are several, else by step."""
        self.updates = Series((*UPDATE_COLUMNS, *(f"entropy {head.name.lower()}" for head in Head)))
        self.newest_update: Update | None = None
        self.ops: Counter[str] = Counter()
        self.illegal = 0
        self.blueprints: dict[str, BlueprintCount] = {}
        self.rollbacks: deque[GovernorAlarm] = deque(maxlen=MOST_EVENTS)
        self.alarms: Counter[tuple[str, str]] = Counter()
        """(alarm, action) → how often."""
        self.health: dict[str, Health] = {}
        """Warnings and errors by their text, the newest ones."""
        self.counters: dict[str, Value] = {}
        self.events: deque[tuple[int, Any]] = deque(maxlen=MOST_EVENTS)
        """The newest listed events with their positions."""
        self.is_percent = True
        """Whether all qualities are fractions, to be shown as percent and points."""
        self.first_s = math.nan
        self.last_s = math.nan
        self.changed: Counter[str] = Counter()
        """Part of the run → position of the last event that changed it."""
        self.order: tuple[str, ...] = fact(self.manifest, "slots") or ()  # until the run_started event
        self.is_in_rounds = (fact(self.manifest, "rounds") or 1) > 1
        """Whether the run trains for several rounds."""
        self._phases: dict[tuple[int, str], Phase] = {}
        self._counts: Counter[type] = Counter()
        self._others: Counter[str] = Counter()
        handlers: dict[str, Callable[[Any], object]] = {
            "step": self._step, "worth": self._collect, "gradient": self._collect, "phase_profile": self._phase,
            "decision": self._decision, "lifecycle": self._lifecycle, "run_started": self._run_started,
            "run_finished": self._run_finished, "episode": self._episode_end, "update": self._update,
            "governor": self._governor, "health": self._health, "checkpoint": self._list,
        }  # fmt: skip
        self._handlers = {ROWS[kind]: handle for kind, handle in handlers.items()}
        self._handlers[OtherRow] = self._other

    @classmethod
    def of(cls, path: Path) -> RunState:
        """Read a complete run directory."""
        manifest, damage = manifest_of(path)
        state = cls(path, manifest)
        state.manifest_damage = damage
        follower = follow(path)
        state.damage = follower.damage
        collects = gc.isenabled()
        gc.disable()  # rows contain no cycles, and collecting takes a third of the time
        try:
            while rows := follower.poll(PORTION):
                state.fold(rows)
        finally:
            if collects:
                gc.enable()
        state.damage.torn += follower.torn
        return state

    def fold(self, rows: Sequence[Any]) -> None:
        """Add the next rows of the journal, see `journal_rows`."""
        if rows and not self.position:
            self.first_s = rows[0].time_s
        self._counts.update(map(type, rows))
        handlers = self._handlers
        for position, row in enumerate(rows, self.position + 1):
            self.position = position
            handlers[type(row)](row)
        if rows:
            self.last_s = rows[-1].time_s

    @property
    def kinds(self) -> dict[str, int]:
        """Kind → number of its events."""
        return {kind: n for kind, row in ROWS.items() if (n := self._counts[row])} | dict(self._others)

    def _list(self, row: Any) -> None:
        """Add an event to the list of events."""
        self.events.append((self.position, row))

    def _other(self, row: OtherRow) -> None:
        self._others[row.kind] += 1
        self.unreadable += row.is_known

    # -- environments

    def env(self, index: int) -> EnvState:
        """Return the environment of this index, created if needed."""
        if index not in self.envs:
            names = self.started.env_names if self.started is not None else ()
            self.envs[index] = EnvState(index, names[index] if index < len(names) else f"env {index}")
        return self.envs[index]

    def _collect(self, d: Any) -> EpisodeState:
        """Add an event to its episode, which absorbs it when it is read, and mark its environment as changed."""
        env = self.envs.get(d.env) or self.env(d.env)
        env.changed = self.position
        episode = env.episode
        if episode is None or episode.number != d.episode:
            episode = env.episode = EpisodeState(env.index, d.episode, env.name, self.order, first_s=d.time_s)
            env.episodes += 1
            self.episodes += 1
        pending = episode.pending
        if len(pending) >= MOST_PENDING:
            episode.absorb()
            pending = episode.pending
        pending.append(d)
        return episode

    # -- one handler per kind

    def _run_started(self, d: RunStarted) -> None:
        self._list(d)
        self.finished = None
        self.changed["run"] = self.position
        if self.started is not None:  # a resumed run emits it again; the first one counts
            return
        self.started = d
        self.order = d.slots or self.order
        self.is_in_rounds = d.rounds > 1
        for index in range(len(d.env_names)):
            self.env(index).changed = self.position

    def _run_finished(self, d: RunFinished) -> None:
        self._list(d)
        self.finished = d
        self.changed["run"] = self.position

    def _step(self, d: Any) -> None:
        episode = self._collect(d)
        episode.positions.append(self.position)
        episode.last_s = d.time_s
        self.env_steps += 1
        self.ops[d.op] += 1
        self.changed["decisions"] = self.position
        if self.is_percent:
            self._see_quality(d.quality)

    def _see_quality(self, quality: Value) -> None:
        if quality is not None and not 0 <= quality <= 1 and math.isfinite(quality):
            self.is_percent = False

    def _decision(self, d: Decision) -> None:
        self.changed["decisions"] = self.position
        self.entropies.add(d.episode if self.is_in_rounds else d.step, (d.entropy, d.value))
        self.illegal += not d.happened
        if d.op != "WAIT":
            self._collect(d)
            self._list(d)

    def _lifecycle(self, d: Lifecycle) -> None:
        self._list(d)
        self._collect(d)
        self.changed["decisions"] = self.position
        count = self.blueprints.setdefault(d.blueprint, BlueprintCount())
        now = stage_of(d.now)
        count.germinated += now == SeedStage.GERMINATED
        count.pruned += now == SeedStage.PRUNED
        if now == SeedStage.FOSSILIZED:
            count.fossilized += 1
            if d.contribution is not None and math.isfinite(d.contribution):
                count.worths = [count.worths[0] + 1, count.worths[1] + d.contribution]

    def _episode_end(self, d: Any) -> None:
        self._list(d)
        before = self.episodes
        episode = self._collect(d)
        episode.result = d
        episode.last_s = d.time_s
        if self.episodes > before:  # no step of it was recorded
            self.env_steps += d.steps
        self.changed["rounds"] = self.position
        self._see_quality(d.quality)
        self._see_quality(d.quality_best)
        self.rounds.add(d.episode, _round_values(d))
        quality = d.quality
        best = None if self.best is None else self.best.quality
        if quality is not None and math.isfinite(quality) and (best is None or quality > best):
            self.best = episode

    def _update(self, d: Update) -> None:
        self._list(d)
        if self.newest_update is not None and d.round <= self.newest_update.round:
            self.updates.cut(d.round)
        entropies = (d.entropy.get(head.name.lower()) for head in Head)
        self.updates.add((*_update_values(d), *entropies))
        self.newest_update = d
        self.changed["updates"] = self.position

    def _phase(self, d: PhaseProfile) -> None:
        self._phases[d.rank, d.phase] = Phase(d.phase, d.wall_ms, d.cpu_ms, d.calls)  # type: ignore[attr-defined]
        self.changed["phases"] = self.position

    def _governor(self, d: GovernorAlarm) -> None:
        self._list(d)
        self.alarms[d.alarm, d.action] += 1
        if d.action == "rolled back":
            self.rollbacks.append(d)
        self.changed["problems"] = self.position

    def _health(self, d: Health) -> None:
        self._list(d)
        self.counters.update(d.counters)
        if d.severity in ("warning", "error"):
            self.health.pop(d.text, None)
            self.health[d.text] = d
            if len(self.health) > MOST_EVENTS:
                del self.health[next(iter(self.health))]
        self.changed["problems"] = self.position

    # -- queries of the views

    @property
    def latest(self) -> list[EpisodeState]:
        """The newest episode of every environment that has one, ordered by environment."""
        return [env.episode.absorb() for _, env in sorted(self.envs.items()) if env.episode is not None]

    @property
    def status(self) -> str:
        """Status of the run."""
        if self.finished is not None and self.manifest.get("status") in (None, "running", "killed"):
            return self.finished.status
        return str(self.manifest.get("status") or "unknown")

    @property
    def losses(self) -> list[str]:
        """Descriptions of the journal's missing events."""
        return lost_events(self.manifest, self.damage.extents(), has_end=self.finished is not None)

    @property
    def wall_s(self) -> Value:
        """Duration of the run in seconds."""
        if self.finished is not None:
            return self.finished.wall_s
        return self.last_s - self.first_s if self.last_s >= self.first_s else None

    @property
    def phases(self) -> list[Phase]:
        """Phases, largest wall time first, summed over ranks."""
        total: dict[str, Phase] = {}
        for of_rank in self._phases.values():
            sofar = total.setdefault(of_rank.phase, Phase(of_rank.phase, 0.0, 0.0, 0))
            sofar.wall_ms += of_rank.wall_ms
            sofar.cpu_ms += of_rank.cpu_ms
            sofar.calls += of_rank.calls
        return sorted(total.values(), key=lambda p: -p.wall_ms)

    def about(self, name: str) -> Any:
        """Return a fact of the run, from its first event or else from its manifest."""
        value = getattr(self.started, name, None)
        return fact(self.manifest, name) if value in (None, "") else value
