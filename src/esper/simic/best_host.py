"""The best host that a run has grown, kept whole: a run's other result, besides its policy.

    best = BestHost()
    best.offer(engine, utility, round)         # after each round: kept if it beats what is kept
    best.save(run / BEST_HOST)                 # and BestHost.load(run / BEST_HOST)

Best means the highest utility at the end of an episode. The test split is never looked at. Kept are the averaged
weights, which are what quality was measured on; what is needed to build the same body again; and the answers it gave
to a few validation samples, so that whoever rebuilds or exports it can tell whether it is still the same model.

Legend: E environments, N samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.body import Body
from esper.kasmina.graft import graft
from esper.kasmina.hosts import HOSTS
from esper.kasmina.probing import PROBE_SAMPLES, quietly
from esper.leyline.errors import DataError, EsperError
from esper.leyline.events import spelled, unspelled
from esper.tolaria.checkpoint import Checkpoints
from esper.tolaria.engine import Engine
from esper.tolaria.tasks import Task

BEST_HOST = "best_host"
"""Its directory in a run's, and its name within a checkpoint."""
FORMAT = "esper-host-1"
SAMPLES = 8
"""Validation samples whose answers are kept."""
CLOSE = 1e-5
"""How far answers may differ and be the same, relative to the largest or to 1."""


@dataclass(frozen=True, slots=True, eq=False)
class GrownHost:
    """One host as it was measured."""

    task: Task  # without its data
    data: dict[str, Any]
    """Of the data: name, kind, sha256, and the vocabulary of a text."""
    world: int
    quality: float
    round: int | None
    utility: float | None
    """None where there is no no-growth twin to compare with."""
    state: dict[str, Tensor]
    """Of the body, averaged weights."""
    probe: Tensor
    """[3, …] samples that the body is grafted with."""
    inputs: Tensor
    """[N, …] validation samples."""
    answers: Tensor
    """[N, V] the output for them; of a text, at the last token."""

    @classmethod
    def of(cls, engine: Engine, env: int, *, utility: float | None = None, round: int | None = None) -> Self:
        """The host of an environment as it stands. It goes on living: everything is copied."""
        plot, data = engine.networks[env], engine.data
        inputs = data.val.x[:SAMPLES]
        with plot.average.applied(), torch.no_grad():
            state = {name: _kept(value) for name, value in plot.body.state_dict().items()}
            answers = answers_of(quietly(plot.body, inputs))
        told = {"name": data.name, "kind": data.kind, "sha256": data.sha256, "vocabulary": data.vocabulary}
        return cls(
            task=dataclasses.replace(engine.task, data=None), data=told, world=engine.worlds[env],
            quality=float(engine.table.quality[env]), round=round, utility=utility, state=state,
            probe=_kept(data.train.x[:PROBE_SAMPLES]), inputs=_kept(inputs), answers=_kept(answers),
        )  # fmt: skip

    @property
    def is_finite(self) -> bool:
        tensors = (*self.state.values(), self.answers)
        return math.isfinite(self.quality) and all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())

    def body(self) -> Body:
        """The body anew, in eval. DataError if it is not the one that was kept."""
        try:
            self._must_fit()
            host = self.task.build_host(self.world)
            if self.probe.dim() == 4:
                host = host.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            sites = host.sites()
            body = graft(host, {slot: sites[slot] for slot in self.task.slots}, probe=self.probe)
            body.load_state_dict(self.state)
        except (RuntimeError, ValueError, TypeError, OverflowError, KeyError, EsperError) as error:
            raise DataError(f"the kept host cannot be built again: {error}") from error
        body.eval()
        with torch.no_grad():
            self.compare(body(self.inputs), "the host built again")
        return body

    def compare(self, output: Tensor, what: str) -> float:
        """How far an output for `inputs` is from the answers kept; DataError if it is another model's."""
        found = answers_of(output).detach()
        away = float((found - self.answers).abs().max()) if found.shape == self.answers.shape else math.inf
        scale = max(1.0, float(self.answers.abs().max()))
        if not away <= CLOSE * scale:
            raise DataError(
                f"{what} does not answer as the host did when it was measured: largest difference {away:.2g}, "
                f"answers up to {scale:.3g}. The files are another host's, or this version computes otherwise"
            )
        return away

    def _must_fit(self) -> None:
        """The host that the settings describe has the shapes of the weights: checked before memory is taken for it."""
        weights = {name: tuple(t.shape) for name, t in self.state.items() if not name.startswith("esper.")}
        room = sum(t.numel() for t in self.state.values()) + self.probe.numel()
        sizes = {k: v for k, v in self.task.host_kwargs.items() if isinstance(v, int) and v > room}
        if sizes:
            raise DataError(f"its settings {sizes} are larger than all its weights")
        with torch.device("meta"):
            host = HOSTS[self.task.host](**self.task.host_kwargs)
        asked = {name: tuple(t.shape) for name, t in host.state_dict().items()}
        if wrong := sorted(set(asked.items()) ^ set(weights.items())):
            raise DataError(f"its weights do not fit its settings, for instance {wrong[0][0]!r} of shape {wrong[0][1]}")

    def document(self) -> dict[str, Any]:
        """Everything but tensors, as JSON has it."""
        settings = {f.name: getattr(self.task, f.name) for f in dataclasses.fields(Task) if f.name != "data"}
        settings |= {"host_kwargs": dict(self.task.host_kwargs), "slots": list(self.task.slots)}
        return {
            "format": FORMAT, "task": spelled(settings), "data": self.data, "world": self.world,
            "quality": self.quality, "round": self.round, "utility": self.utility,
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        state = {f"state/{name}": value for name, value in self.state.items()}
        return state | {"probe": self.probe, "inputs": self.inputs, "answers": self.answers}

    @classmethod
    def restored(cls, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """The host of a document and tensors; what they hold may be a stranger's."""
        try:
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']!r} is not {FORMAT!r}")
            settings = dict(unspelled(document["task"]))
            task = Task(**settings | {"slots": tuple(settings["slots"])})
            host = cls(
                task=task, data=dict(document["data"]), world=int(document["world"]),
                quality=float(document["quality"]), round=document["round"], utility=document["utility"],
                state={n.removeprefix("state/"): t for n, t in tensors.items() if n.startswith("state/")},
                probe=tensors["probe"], inputs=tensors["inputs"], answers=tensors["answers"],
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, EsperError) as error:
            raise DataError(f"this is not a host that Esper kept: {error!r}") from error
        if not host.is_finite:
            raise DataError("the kept host has weights or answers that are NaN or infinite; it cannot be used")
        return host


class BestHost:
    """The best of the hosts offered so far; none at first."""

    def __init__(self, host: GrownHost | None = None) -> None:
        self.host = host

    def offer(self, engine: Engine, utility: Sequence[float] | np.ndarray[Any, Any], round: int) -> bool:
        """Keep the host with the highest utility [E], if it beats what is kept; a sick one is passed over."""
        scores = np.asarray(utility, dtype=np.float64)
        scores = np.where(np.isfinite(scores), scores, np.nan)
        for env in np.argsort(-scores, kind="stable"):  # NaN comes last
            if np.isnan(scores[env]) or (self.host is not None and not self._beaten_by(scores[env])):
                return False
            host = GrownHost.of(engine, int(env), utility=float(scores[env]), round=round)
            if host.is_finite:
                self.host = host
                return True
        return False

    def _beaten_by(self, utility: float) -> bool:
        assert self.host is not None
        return self.host.utility is None or utility > self.host.utility

    def document(self) -> dict[str, Any]:
        return {} if self.host is None else self.host.document()

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.host is None else self.host.tensors()

    @classmethod
    def restored(cls, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """From `document()` and `tensors()`, as a run's checkpoint holds them."""
        return cls(GrownHost.restored(document, tensors) if document else None)

    def save(self, directory: Path) -> Path | None:
        """Keep it in a directory, in place of the one before; nothing if there is none yet."""
        if self.host is None:
            return None
        name = "host" if self.host.round is None else f"round-{self.host.round}"
        kept = Checkpoints(directory, keep=1).write(
            name, tensors={BEST_HOST: self.tensors()}, documents={BEST_HOST: self.document()}, kind="host"
        )
        return kept.path

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The host that was saved last; DataError if there is none that is whole."""
        saved = Checkpoints(directory, keep=1).newest() if directory.is_dir() else None
        if saved is None or saved.kind != "host":
            raise DataError(
                f"there is no grown host in {directory} that is whole: it was removed or damaged. A run that has not "
                "ended keeps its next best one when it is resumed; otherwise train or grow again"
            )
        return cls.restored(saved.document(BEST_HOST), saved.tensors(BEST_HOST))


def answers_of(output: Tensor) -> Tensor:
    """[N, V] of an output: as it is, or of a text at the last token, which depends on all before it."""
    return output if output.dim() == 2 else output[:, -1]


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
