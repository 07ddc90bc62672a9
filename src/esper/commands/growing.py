"""Train the hosts of `esper grow` one after another, with checkpoints to resume from.

A checkpoint contains the current host between two epochs, the finished hosts, and the position in the journal. A
resumed run repeats the epochs after it bit for bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from esper.commands.resuming import KINDS
from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.events import Checkpoint, Level
from esper.leyline.lifecycle import Rules
from esper.leyline.slot_table import network_params
from esper.leyline.stages import SeedStage
from esper.nissa.recorder import Run
from esper.nissa.run import CHECKPOINTS
from esper.simic.attribution import CounterfactualHelper
from esper.simic.evaluation.comparison import structure_of
from esper.simic.telemetry.emitters import TelemetryEmitter
from esper.tamiyo.controllers import Controller, Stateful, Wait
from esper.tamiyo.controllers.learned import Learned
from esper.tolaria.checkpoint import Checkpoints, Saved
from esper.tolaria.checkpoint_schedule import CheckpointSchedule
from esper.tolaria.data import Dataset
from esper.tolaria.engine import Engine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.network_state import engine_state, load_engine
from esper.tolaria.packing import packed, unpacked
from esper.tolaria.reproducibility import fingerprint
from esper.tolaria.rollout import PhaseTimers, rollout
from esper.tolaria.tasks import Task

GROWN = "grown"
NO_GROWTH = "no growth"
FROM_START = "same structure from step 0"
WIDER = "wider host of equal size"
HOSTS_COMPARED = (GROWN, NO_GROWTH, FROM_START, WIDER)
GROW, RUN = "grow", "run"
"""Names of the documents in a checkpoint: the state of the hosts, and what is read before they are built."""
CHECKPOINT_SHARE = 0.01
"""Maximum share of the time spent on checkpoints. Epochs longer than a few seconds all get one."""
KEEP = 2
"""Number of checkpoints kept."""


class GrowSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that determine the result of `esper grow`. A resumed run keeps them."""

    task: str
    """All hosts are trained on the task of this name."""
    controller: str
    """The controller of this name decides, or the policy of the run or policy file at this path."""
    controller_path: str = ""
    """The controller's run or policy file has this absolute path; it is empty for a controller that has a name."""
    epochs: int | None = None
    """Each host is trained for this many epochs, ≥ 1; None uses the task's own number."""
    seed: int = 0
    """All hosts are trained in this world, which determines initialisation and data order."""
    compare: bool = True
    """If true, the hosts to compare with are trained as well."""
    incubation: str = "shadow"
    """A TRAINING seed learns by this method: "shadow" or "straight_through", see `EngineConfig`. It has no effect with
    open birth."""
    birth: str = Rules().birth
    """A seed begins in this way: "open" or "isolated", see `Rules`."""
    lr_schedule: str = "wsd"
    """The learning rates follow this schedule: "wsd" or "constant", see `Task`."""
    threads: int = 1
    """PyTorch uses this many CPU threads, ≥ 1."""
    telemetry: str = "normal"
    """Events are recorded at this level: off, minimal, normal or debug."""

    def __post_init__(self) -> None:
        for name in ("epochs", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be ≥ 1, got {value}")


@dataclass(slots=True)
class HostResult:
    """The training of one host."""

    name: str
    accuracy: float = float("nan")
    loss: float = float("nan")
    params: int = 0
    """Parameters of the exported network, without seeds that are still in training."""
    train_macs: int = 0
    """Multiply-adds of training, forward and backward, shadow passes included."""
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


class SavedGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a checkpoint that is read before any host is built."""

    settings: GrowSettings
    exact: dict[str, str]
    next_seq: int
    env_steps: int

    @classmethod
    def of(cls, saved: Saved) -> SavedGrowth:
        """Read it from a checkpoint. Raise CheckpointError if the checkpoint is not one of `esper grow`."""
        try:
            return msgspec.convert(saved.document(RUN), cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"the checkpoint {saved.path} is not one of `esper grow`: {error}") from error


def exact_for(
    settings: GrowSettings, config: EngineConfig, task: Task, data: Dataset, controller: Controller
) -> dict[str, str]:
    """Return what must not change for a bit-exact resume: `fingerprint`, the task, and the policy's weights."""
    facts = fingerprint(settings.threads, config.device, data.sha256)
    facts["task"] = hashlib.sha256(repr(task).encode()).hexdigest()[:16]  # that of a family file can change
    if isinstance(controller, Learned):
        digest = hashlib.sha256()
        for tensor in controller.network.state_dict().values():
            digest.update(tensor.contiguous().numpy().tobytes())
        facts["policy"] = digest.hexdigest()[:16]
    return facts


class GrowCheckpointer:
    """Writes the checkpoints of a run. A failed write gives a warning and does not end the run."""

    def __init__(self, run: Run, settings: GrowSettings, exact: dict[str, str]) -> None:
        self.run = run
        self.settings = settings
        self.exact = exact
        self.checkpoints = Checkpoints(run.path / CHECKPOINTS, keep=KEEP)
        self.last = ""
        self.schedule = CheckpointSchedule(run.hub, CHECKPOINT_SHARE)

    def save_if_due(self, name: str, state: Callable[[], dict[str, Any]], *, always: bool = False) -> None:
        """Write a checkpoint of this name if one is due. The journal is flushed first, so that it has no gap.

        If it cannot be flushed, the checkpoint is postponed, unless `always` is set.
        """
        if name == self.last or not self.schedule.is_due(always=always):
            return
        self.run.directory.must_exist()  # do not create a removed directory again
        if not self.schedule.is_possible(self.schedule.flush(), always=always):
            return
        kept = SavedGrowth(
            settings=self.settings, exact=self.exact, next_seq=self.run.hub.next_seq, env_steps=self.run.env_steps
        )
        try:
            document, tensors = packed(state())
            documents = {GROW: document, RUN: msgspec.to_builtins(kept)}
            written = self.checkpoints.write(name, tensors={GROW: tensors}, documents=documents, kind=KINDS["grow"])
        except CheckpointError as error:
            warnings.warn(f"{error}. The run continues; its last checkpoint is an earlier one", stacklevel=2)
            return
        self._emit(written.path, written.size_bytes, "start" if not self.last else "epoch", written.write_ms)
        self.last = name
        self.schedule.record()

    def resume_from(self, saved: Saved) -> None:
        """Record which checkpoint the run continues from."""
        self.last = saved.name
        self._emit(saved.path, sum(file.stat().st_size for file in saved.path.iterdir()), "resumed", None)

    def _emit(self, path: Path, size: int, reason: str, write_ms: float | None) -> None:
        shown = f"{CHECKPOINTS}/{path.name}"
        self.run.emit(Checkpoint(path=shown, reason=reason, size_bytes=size, write_ms=write_ms))


@dataclass(slots=True)
class HostComparison:
    """Training of several hosts with the same task, data, world and budget, recorded in one run."""

    run: Run
    task: Task
    data: Dataset
    world: int
    config: EngineConfig
    rules: Rules
    level: Level
    checkpointer: GrowCheckpointer
    stop: Callable[[], None]
    """Called between epochs; raises SystemExit after a signal to stop."""
    progress: Callable[[str, Engine, Sequence[HostResult]], AbstractContextManager[Callable[[], None]]]
    """Opens the display of one host's training. The function it yields is called after every epoch."""
    phases: PhaseTimers = field(default_factory=PhaseTimers)
    results: list[HostResult] = field(default_factory=list)
    """Results of the finished hosts."""
    grown: Engine | None = None
    """The engine of the growing host, once it is finished."""
    saved: Mapping[str, Any] | None = None
    """The state to continue from; None after it was used."""

    def engine(self, task: Task | None = None) -> Engine:
        """Return a new engine of this task, data and world."""
        return Engine(
            task or self.task, [self.world], rules=self.rules, config=self.config, data=self.data, phases=self.phases
        )

    def emitter(self, name: str, engine: Engine) -> TelemetryEmitter:
        """Return the emitter of the host of this name."""
        return TelemetryEmitter(
            self.run.hub, slots=self.task.slots, worlds=[self.world], envs=[HOSTS_COMPARED.index(name)],
            host_params=engine.networks[0].host_size, level=self.level,
        )  # fmt: skip

    def load(self, saved: Saved, grown: Engine) -> None:
        """Continue from a checkpoint. The state of the growing host is loaded into `grown` if it was finished."""
        self.checkpointer.resume_from(saved)
        state = unpacked(saved.document(GROW), saved.tensors(GROW))
        self.results = [HostResult(**fields) for fields in state["results"]]
        if state["grown"] is not None:
            load_engine(grown, state["grown"])
        self.saved = state

    def train(self, name: str, engine: Engine, controller: Controller) -> HostResult:
        """Train one host for the task's remaining epochs, with display and telemetry. Return its result."""
        result = HostResult(name)
        helper = CounterfactualHelper()
        phases = self.phases
        emit = self.emitter(name, engine)
        if self.saved is None:
            emit.planted(engine.table)
        else:
            result = self._continue(engine, controller, emit)

        def keep(*, always: bool = False) -> None:
            if not engine.governor.is_failing:
                at = f"{name.replace(' ', '-')}-{len(result.history):05d}"
                self.checkpointer.save_if_due(at, lambda: self._state(result, engine, controller, emit), always=always)

        if name == GROWN:
            keep(always=not result.history)
        start = time.perf_counter() - result.seconds
        with self.progress(name, engine, [*self.results, result]) as show:
            epochs_left = engine.task.epochs - len(result.history)
            for step in rollout(
                engine, controller, epochs_left, before_step=lambda: self._check_for_stop(keep), phases=phases
            ):
                with phases("worth"):
                    worth = helper.process_batch(engine)
                with phases("telemetry"):
                    emit.step(engine.table, step.actions, step.result, step.allowed)
                    emit.governed(engine.alarms)
                    emit.worth(engine.table, worth)
                    emit.phases(phases)
                    self.run.env_steps += 1
                result.history.append(epoch_figures(engine))
                result.seconds = time.perf_counter() - start
                show()
                with phases("checkpoint"):
                    keep(always=len(result.history) == engine.task.epochs)
        result.accuracy, result.loss = engine.networks[0].test(engine.data.test)
        result.train_macs = int(engine.table.train_macs[0])
        result.params = int(network_params(engine.table, engine.networks[0].host_size)[0])
        emit.episode(engine.table, [name], test_quality=[result.accuracy], test_loss=[result.loss],
                     wall_s=[result.seconds])  # fmt: skip
        emit.phases(phases, last=True)
        self.results.append(result)
        return result

    def _check_for_stop(self, keep: Callable[..., None]) -> None:
        """Stop if a signal requested it, after writing a checkpoint of the last complete epoch."""
        try:
            self.stop()
        except SystemExit:
            keep(always=True)
            raise
        self.run.directory.must_exist()

    def _state(
        self, result: HostResult, engine: Engine, controller: Controller, emit: TelemetryEmitter
    ) -> dict[str, Any]:
        remembers = result.name == GROWN and isinstance(controller, Stateful)
        log = controller.log if isinstance(controller, Learned) else None
        return {
            "decisions": None if log is None else log.state_dict(),
            "results": [dataclasses.asdict(r) for r in self.results],
            "current": dataclasses.asdict(result),
            "engine": engine_state(engine),
            "grown": None if self.grown is None else engine_state(self.grown),
            "controller": controller.state_dict() if remembers and isinstance(controller, Stateful) else None,
            "counts": emit.counts,
        }

    def _continue(self, engine: Engine, controller: Controller, emit: TelemetryEmitter) -> HostResult:
        assert self.saved is not None
        state, self.saved = self.saved, None
        load_engine(engine, state["engine"])
        if state["controller"] is not None and isinstance(controller, Stateful):
            controller.load_state_dict(state["controller"])
        if isinstance(controller, Learned) and controller.log is not None:
            controller.log.load_state_dict(state["decisions"])
        emit.resume(engine.table, state["counts"])
        return HostResult(**state["current"])

    def compare(self) -> Iterator[HostResult]:
        """Train the hosts to compare with that are not finished, each with the same number of epochs."""
        assert self.grown is not None
        done = {result.name for result in self.results}
        if NO_GROWTH not in done:
            yield self.train(NO_GROWTH, self.engine(), Wait())
        structure = structure_of(self.grown, 0)
        if structure and FROM_START not in done:
            same = self.engine()
            if self.saved is None:
                same.plant_fossils(0, structure)
            yield self.train(FROM_START, same, Wait())
        if structure and WIDER not in done:
            size = int(network_params(self.grown.table, self.grown.networks[0].host_size)[0])
            yield self.train(WIDER, self.engine(self.task.widened(size)), Wait())


def epoch_figures(engine: Engine) -> dict[str, Any]:
    """Return the numbers of the current epoch."""
    t = engine.table
    return {
        "epoch": int(t.step[0]),
        "train_loss": float(t.train_loss[0]),
        "val_loss": float(t.val_loss[0]),
        "val_accuracy": float(t.quality[0]),
        "params": engine.networks[0].params,
        "stage": [SeedStage(int(s)).name for s in t.stage[0]],
        "alpha": [round(float(a), 4) for a in t.alpha[0]],
    }
