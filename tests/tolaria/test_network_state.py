"""An engine that has loaded a state continues bit-identically, through growth, commits and rollbacks."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch

from esper.leyline.errors import CheckpointError
from esper.leyline.lifecycle import Rules, legal
from esper.leyline.stages import Thresholds
from esper.tamiyo.controllers import Schedule
from esper.tolaria.engine import Engine
from esper.tolaria.network_state import engine_state, load_engine
from esper.tolaria.packing import packed, unpacked
from esper.tolaria.tasks import get_task

STEPS = 24
POISONED = 16
"""The step before which weights are made non-finite, so that the governor restores its snapshot."""


def engine(task: str, worlds: int = 2) -> Engine:
    name, _, birth = task.partition(" ")
    small = dataclasses.replace(get_task(name), epochs=STEPS, batches_per_epoch=3, batch=16, val_size=100)
    if birth:  # with a ramp and a learning rate that changes
        open_birth = Rules(birth="open", open_ramp=3)
        return Engine(dataclasses.replace(small, lr_schedule="wsd"), range(worlds), rules=open_birth)
    return Engine(small, range(worlds), rules=Rules(birth="isolated", thresholds=Thresholds(blend_dwell=2)))


def advance(it: Engine, first: int, last: int) -> None:
    controller = Schedule()
    for step in range(first, last):
        if step == POISONED:
            next(it.networks[0].body.model.parameters()).data.fill_(float("nan"))
        it.step(controller.act(it.table, legal(it.table, it.rules)))


def tensors(it: Engine) -> list[torch.Tensor]:
    values = []
    for network in it.networks:
        values += [*network.body.state_dict().values(), *network.average.average]
        values += [
            v for state in network.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)
        ]
    return values


@cache
def uninterrupted(task: str) -> Engine:
    whole = engine(task)
    advance(whole, 0, STEPS)
    return whole


@pytest.mark.parametrize("task", ["digits", "rescue", "rescue open"])
@pytest.mark.parametrize("stopped", [0, 3, 9, POISONED, POISONED + 1])
def test_loaded_engine_continues_bit_for_bit(task: str, stopped: int) -> None:
    whole, first, second = uninterrupted(task), engine(task), engine(task)
    advance(first, 0, stopped)
    document, copies = packed(engine_state(first))
    copies = {name: tensor.clone() for name, tensor in copies.items()}
    advance(first, stopped, STEPS)  # later changes of the first must not affect the second
    load_engine(second, unpacked(document, copies))
    advance(second, stopped, STEPS)
    assert whole.table.rollbacks[0] == 1
    for name, column in whole.table.arrays().items():
        assert np.array_equal(column, getattr(second.table, name), equal_nan=column.dtype.kind == "f"), name
    assert len(tensors(whole)) == len(tensors(second))
    assert all(torch.equal(a, b) for a, b in zip(tensors(whole), tensors(second), strict=True))


def test_state_of_another_number_of_environments_is_refused() -> None:
    with pytest.raises(CheckpointError, match="2 environments, this engine has 1"):
        load_engine(engine("digits", 1), engine_state(engine("digits", 2)))
