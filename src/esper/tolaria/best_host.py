"""The best grown host of a run: its second result besides the policy.

    GrownHost.of(engine, env).save(run / BEST_HOST)
    body = GrownHost.load(run / BEST_HOST).body()

Saved are the averaged weights, statistics of norms that are estimated with them (`HostNetwork.final`), the data needed
to rebuild the body, and its outputs for a few validation samples, which verify a rebuilt or exported model. The quality
is that of the last epoch, measured as during training. The test split is not used.

Legend: N samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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
"""Name of its subdirectory in a run directory, and of its entry in a checkpoint."""
FORMAT = "esper-host-1"
SAMPLES = 8
"""Number of validation samples whose outputs are saved."""
CLOSE = 1e-5
"""Tolerance for equal outputs, relative to the largest output or to 1."""


@dataclass(frozen=True, slots=True, eq=False)
class GrownHost:
    """One host as it was measured, with everything needed to rebuild it. `esper grow` and `esper train` save one.

    Example:
        >>> task = esper.Task.from_tensors("mine", torch.randn(100, 6), torch.arange(100) % 3)
        >>> host = esper.GrownHost.of(esper.Engine(task, worlds=[0]), 0)
        >>> host.body()(host.inputs).shape
        torch.Size([8, 3])
    """

    task: Task  # without its data
    data: dict[str, Any]
    """Name, kind, sha256 and, for text, vocabulary of the data."""
    world: int
    quality: float
    round: int | None
    utility: float | None
    """None if there is no no-growth baseline to compare with."""
    state: dict[str, Tensor]
    """State dict of the body, as `HostNetwork.final`."""
    probe: Tensor
    """[3, …] samples for grafting the body."""
    inputs: Tensor
    """[N, …] validation samples."""
    answers: Tensor
    """[N, V] outputs for the validation samples; for text, at the last token."""

    @classmethod
    def of(cls, engine: Engine, env: int, *, utility: float | None = None, round: int | None = None) -> Self:
        """Return a copy of an environment's current host. The environment can continue."""
        network = engine.networks[env]
        data = engine.data
        inputs = data.val.x[:SAMPLES]
        with network.final(), torch.no_grad():
            state = {name: _copied(value) for name, value in network.body.state_dict().items()}
            answers = answers_of(quietly(network.body, inputs))
        source = {"name": data.name, "kind": data.kind, "sha256": data.sha256, "vocabulary": data.vocabulary}
        return cls(
            task=dataclasses.replace(engine.task, data=None), data=source, world=engine.worlds[env],
            quality=float(engine.table.quality[env]), round=round, utility=utility, state=state,
            probe=_copied(data.train.x[:PROBE_SAMPLES]), inputs=_copied(inputs), answers=_copied(answers),
        )  # fmt: skip

    @property
    def is_finite(self) -> bool:
        """Whether quality, weights and outputs are finite."""
        tensors = (*self.state.values(), self.answers)
        return math.isfinite(self.quality) and all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())

    def body(self) -> Body:
        """Rebuild the body.

        Returns:
            The body in eval mode. It can be grown further.

        Raises:
            DataError: It cannot be rebuilt, or its outputs differ from the saved ones.
        """
        try:
            self._must_fit()
            host = self.task.build_host(self.world)
            if self.probe.dim() == 4:
                host = host.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            sites = host.sites()
            body = graft(host, {slot: sites[slot] for slot in self.task.slots}, probe=self.probe)
            body.load_state_dict(self.state)
        except (RuntimeError, ValueError, TypeError, OverflowError, KeyError, EsperError) as error:
            raise DataError(f"the saved host cannot be rebuilt: {error}") from error
        body.eval()
        with torch.no_grad():
            self.compare(body(self.inputs), "the rebuilt host")
        return body

    def compare(self, output: Tensor, what: str) -> float:
        """Return the largest difference of `output` for `inputs` from the saved outputs.

        Raise DataError above the tolerance.
        """
        outputs = answers_of(output).detach()
        error = float((outputs - self.answers).abs().max()) if outputs.shape == self.answers.shape else math.inf
        scale = max(1.0, float(self.answers.abs().max()))
        if not error <= CLOSE * scale:
            raise DataError(
                f"the outputs of {what} differ from those of the measured host by up to {error:.2g}, at values up to "
                f"{scale:.3g}. The files belong to another host, or this version computes differently"
            )
        return error

    def _must_fit(self) -> None:
        """Raise DataError unless the settings describe a host with the weights' shapes.

        Allocates no memory for the host.
        """
        weights = {name: tuple(t.shape) for name, t in self.state.items() if not name.startswith("esper.")}
        num_values = sum(t.numel() for t in self.state.values()) + self.probe.numel()
        sizes = {k: v for k, v in self.task.host_kwargs.items() if isinstance(v, int) and v > num_values}
        if sizes:
            raise DataError(f"its settings {sizes} are larger than all its weights")
        with torch.device("meta"):
            host = HOSTS[self.task.host](**self.task.host_kwargs)
        expected = {name: tuple(t.shape) for name, t in host.state_dict().items()}
        if wrong := sorted(set(expected.items()) ^ set(weights.items())):
            raise DataError(f"its weights do not fit its settings, for example {wrong[0][0]!r} of shape {wrong[0][1]}")

    def document(self) -> dict[str, Any]:
        """Return everything except tensors as JSON data."""
        settings = {f.name: getattr(self.task, f.name) for f in dataclasses.fields(Task) if f.name != "data"}
        settings |= {"host_kwargs": dict(self.task.host_kwargs), "slots": list(self.task.slots)}
        return {
            "format": FORMAT, "task": spelled(settings), "data": self.data, "world": self.world,
            "quality": self.quality, "round": self.round, "utility": self.utility,
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, by name."""
        state = {f"state/{name}": value for name, value in self.state.items()}
        return state | {"probe": self.probe, "inputs": self.inputs, "answers": self.answers}

    @classmethod
    def restored(cls, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Return the host of a document and tensors, which may be untrusted. Raise DataError if they are invalid."""
        try:
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']!r} is not {FORMAT!r}")
            settings = dict(unspelled(document["task"]))
            lists = {name: tuple(settings.get(name, ())) for name in ("slots", "blueprints")}
            task = Task(**settings | lists)
            host = cls(
                task=task, data=dict(document["data"]), world=int(document["world"]),
                quality=float(document["quality"]), round=document["round"], utility=document["utility"],
                state={n.removeprefix("state/"): t for n, t in tensors.items() if n.startswith("state/")},
                probe=tensors["probe"], inputs=tensors["inputs"], answers=tensors["answers"],
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, EsperError) as error:
            raise DataError(f"this is not a host saved by Esper: {error!r}") from error
        if not host.is_finite:
            raise DataError("the saved host cannot be used: it has weights or outputs that are NaN or infinite")
        return host

    def save(self, directory: Path) -> Path:
        """Write the host to a directory of its own, replacing the previous one.

        Args:
            directory: The directory.

        Returns:
            Its path.
        """
        name = "host" if self.round is None else f"round-{self.round}"
        tensors, documents = {BEST_HOST: self.tensors()}, {BEST_HOST: self.document()}
        return Checkpoints(directory, keep=1).write(name, tensors=tensors, documents=documents, kind="host").path

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Return the host saved last.

        Args:
            directory: The directory given to `save`, such as `best_host` of a run directory.

        Returns:
            The host.

        Raises:
            DataError: There is no intact one.
        """
        saved = Checkpoints(directory, keep=1).newest() if directory.is_dir() else None
        if saved is None or saved.kind != "host":
            raise DataError(
                f"there is no complete grown host in {directory}: it was removed or damaged. A resumed run saves its "
                "next best one; otherwise train or grow again"
            )
        return cls.restored(saved.document(BEST_HOST), saved.tensors(BEST_HOST))


def answers_of(output: Tensor) -> Tensor:
    """Return the outputs [N, V]; for text those at the last token, which depends on all tokens before it."""
    return output if output.dim() == 2 else output[:, -1]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
