"""Decisions of a policy with everything that they depend on: inputs, actions and weights.

    record.save(run / DECISIONS)          # written by `esper train` (last saved round) and `esper grow`
    record = DecisionRecord.load(run)     # read by `esper explain` and `esper features`

Legend: T steps, E environments, F features, M mask columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from esper.leyline.actions import NUM_HEADS
from esper.leyline.atomic_io import read_regular, write_atomically
from esper.leyline.checksums import check_tensors, seal_tensors
from esper.leyline.errors import DataError
from esper.leyline.run_files import DECISIONS
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork
from esper.tamiyo.policy.action_masks import MaskLayout
from esper.tamiyo.policy.features import num_features
from esper.tamiyo.policy_file import must_fit, view

FORMAT = "esper-decisions-2"
MOST_ENVS = 16
"""Decisions are kept for this many environments of a round, the first ones."""
MOST_BYTES = 1 << 30
_PREFIX = "policy/"
_TENSORS = ("obs", "masks", "actions", "lengths")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in the file that is not a tensor."""

    episode: int
    """Number of the episode in the journal; in `esper train` it is the round."""
    slots: tuple[str, ...]
    worlds: tuple[int, ...]
    blueprints: int
    network: NetworkConfig


@dataclass(frozen=True, slots=True, eq=False)
class DecisionRecord:
    """The decisions of one episode in each of some environments."""

    facts: Facts
    obs: Tensor  # [T, E, F]
    masks: Tensor  # [T, E, M] bool
    actions: Tensor  # [T, E, 8] int64
    lengths: Tensor  # [E] int64, steps of each episode
    weights: Mapping[str, Tensor]
    """State dict of the policy that decided."""

    @classmethod
    def of(
        cls, network: TamiyoNetwork, layout: MaskLayout, *, obs: Tensor, masks: Tensor, actions: Tensor,
        lengths: Tensor, slots: Sequence[str], worlds: Sequence[int], episode: int,
    ) -> DecisionRecord:  # fmt: skip
        """Return a copy of the first environments' decisions."""
        some = slice(min(len(worlds), MOST_ENVS))
        facts = Facts(
            episode=episode, slots=tuple(slots), worlds=tuple(worlds[some]), blueprints=layout.blueprints,
            network=network.config,
        )  # fmt: skip
        weights = {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}
        return cls(
            facts=facts, obs=obs[:, some].clone(), masks=masks[:, some].clone(), actions=actions[:, some].clone(),
            lengths=lengths[some].to(torch.int64).clone(), weights=weights,
        )  # fmt: skip

    @property
    def layout(self) -> MaskLayout:
        """Positions of the parts of a mask."""
        return MaskLayout(slots=len(self.facts.slots), blueprints=self.facts.blueprints)

    def network(self) -> TamiyoNetwork:
        """Return the policy that decided."""
        network = TamiyoNetwork(self.facts.network)
        network.load_state_dict(dict(self.weights))
        return network.eval()

    @property
    def valid(self) -> Tensor:
        """[T, E] which steps were taken."""
        return torch.arange(len(self.obs))[:, None] < self.lengths

    def save(self, path: Path) -> None:
        """Write the record atomically."""
        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        tensors |= {f"{_PREFIX}{name}": value.contiguous() for name, value in self.weights.items()}
        header = {"format": FORMAT, "view": view(), "facts": msgspec.json.encode(self.facts).decode()}
        write_atomically(path, seal_tensors(save(tensors, header)))

    @classmethod
    def load(cls, run: Path) -> DecisionRecord:
        """Return the record of a run directory. Raise DataError if there is none or if it is damaged."""
        file = run / DECISIONS
        if not file.is_file():
            raise DataError(
                f"{run} has no recorded decisions of a policy. `esper train` records those of its last saved round "
                "after the rounds of imitation, and `esper grow` with a trained policy (--controller tamiyo or a run) "
                "those of the grown host. Train for more --rounds, or with --set imitation=0"
            )
        try:
            content = read_regular(file, MOST_BYTES)
            header = check_tensors(content)
            if header.get("format") != FORMAT or header.get("view") != view():
                raise DataError(
                    f"{file} was written by another version of Esper: its policy or observations differ. Run it again"
                )
            facts = msgspec.json.decode(header["facts"], type=Facts)
            tensors = load(content)
            weights = {n.removeprefix(_PREFIX): t for n, t in tensors.items() if n.startswith(_PREFIX)}
            must_fit(facts.network, weights)
            record = cls(facts=facts, weights=weights, **{name: tensors[name] for name in _TENSORS})
            record.must_be_consistent()
        except (SafetensorError, msgspec.MsgspecError, KeyError, ValueError, OSError, json.JSONDecodeError) as error:
            raise DataError(f"{file} is damaged: {error}") from error
        return record

    def must_be_consistent(self) -> None:
        """Raise ValueError unless all shapes and numbers fit together."""
        layout = self.layout
        envs = len(self.facts.worlds)
        steps = len(self.obs)
        widths = {"obs": num_features(layout.slots), "masks": layout.size, "actions": NUM_HEADS}
        for name, width in widths.items():
            if tuple(getattr(self, name).shape) != (steps, envs, width):
                raise ValueError(f"{name} has shape {tuple(getattr(self, name).shape)}, not {(steps, envs, width)}")
        kinds = {"obs": torch.float32, "masks": torch.bool, "actions": torch.int64, "lengths": torch.int64}
        for name, kind in kinds.items():
            if getattr(self, name).dtype != kind:
                raise ValueError(f"{name} is {getattr(self, name).dtype}, not {kind}")
        sizes = torch.tensor(layout.head_sizes)
        if not ((self.actions >= 0) & (self.actions < sizes)).all():
            raise ValueError("an action has an option that does not exist")
        if tuple(self.lengths.shape) != (envs,) or not ((self.lengths >= 0) & (self.lengths <= steps)).all():
            raise ValueError(f"the lengths of the episodes are not {envs} numbers from 0 to {steps}")


class DecisionLog:
    """Collects the decisions of one environment, step by step."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Tensor]] = {"obs": [], "masks": [], "actions": []}

    def add(self, obs: Tensor, masks: Tensor, actions: Tensor) -> None:
        """Add one step [1, …] each."""
        for name, value in (("obs", obs), ("masks", masks), ("actions", actions)):
            self.rows[name].append(value.clone())

    def record(self, network: TamiyoNetwork, layout: MaskLayout, *, slots: Sequence[str], world: int) -> DecisionRecord:
        """Return the decisions so far; at least one must have been added."""
        columns = {name: torch.stack(rows) for name, rows in self.rows.items()}
        lengths = torch.tensor([len(self.rows["obs"])])
        return DecisionRecord.of(network, layout, **columns, lengths=lengths, slots=slots, worlds=[world], episode=1)

    def state_dict(self) -> dict[str, Any]:
        """Return the collected steps."""
        return {name: torch.stack(rows) for name, rows in self.rows.items() if rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        self.rows = {name: list(state[name]) if name in state else [] for name in self.rows}
