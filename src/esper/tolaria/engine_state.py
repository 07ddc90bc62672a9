"""The state of an engine between two steps, as a tree of tensors, arrays and plain values.

    tree = engine_state(engine)          # for `tolaria.packing.packed`
    load_engine(engine, tree)            # into an engine of the same task, worlds and config

An engine that has loaded the state continues bit for bit as the saved one. Data order and dropout are functions of
(world, step), so the state contains no random generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from esper.leyline.errors import CheckpointError
from esper.leyline.slot_table import SlotTable
from esper.tolaria.engine import Engine
from esper.tolaria.network_state import NetworkState, load_network, network_state, state_tree, weights_of


def engine_state(engine: Engine) -> dict[str, Any]:
    """Return everything that determines how the engine continues. Tensors are not copied: write them at once."""
    return {
        "table": engine.table.arrays(),
        "networks": [state_tree(network_state(network)) for network in engine.networks],
        "weights": [weights_of(network.body) for network in engine.networks],
        "governor": engine.governor.state_dict(),
    }


def load_engine(engine: Engine, state: Mapping[str, Any]) -> None:
    """Load what `engine_state` returned into a newly built engine."""
    if len(state["networks"]) != len(engine.networks):
        raise CheckpointError(
            f"the state has {len(state['networks'])} environments, this engine has {len(engine.networks)}"
        )
    engine.table.restore(SlotTable(**state["table"]))
    saved = zip(state["networks"], state["weights"], strict=True)
    for env, (network, (tree, weights)) in enumerate(zip(engine.networks, saved, strict=True)):
        load_network(network, msgspec.convert(tree, NetworkState), weights, {}, engine.table, env)
    engine.governor.load_state_dict(state["governor"])
