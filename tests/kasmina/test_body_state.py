"""Test that `state_dict` rebuilds a grown body: in a new process, in a copy, inside another module."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint, blueprints_for, unregister
from esper.kasmina.body import STRUCTURE, Body
from esper.kasmina.graft import graft
from esper.kasmina.slot import Slot
from esper.leyline.actions import Operator
from esper.leyline.errors import BlueprintError, ConfigError, GraftError, UnknownNameError
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage
from tests.support import ROOT
from tests.support.models import ZOO, PlainCNN, call, grow, images, main_output, vectors

ALIVE = [
    (SeedStage.GERMINATED, 0.0), (SeedStage.TRAINING, 0.0), (SeedStage.BLENDING, 0.25), (SeedStage.HOLDING, 0.7),
    (SeedStage.FOSSILIZED, 1.0),
]  # fmt: skip


def grown(name: str = "cnn") -> Body:
    """Return a body with three seeds: one per operator, in three stages, at three alphas."""
    body = ZOO[name].body()
    slots = list(body.slots)
    for i, (stage, alpha) in enumerate(ALIVE[2:]):
        choices = blueprints_for(body.slots[slots[i]].spec.layout)
        grow(body, slots[i], choices[-1 - i], operator=Operator(i), stage=stage, alpha=alpha, seed=i + 3)
    return body


def same_function(a: nn.Module, b: nn.Module, name: str = "cnn") -> bool:
    x = ZOO[name].batch(4)
    return torch.equal(main_output(call(a.eval(), x)), main_output(call(b.eval(), x)))


def slot_state(slot: Slot) -> tuple[object, ...]:
    return slot.stage.name, slot.operator.name, slot.amplitude, slot.blueprint, float(slot.alpha)


REBUILD = """
import sys
sys.path.insert(0, {root!r})
import torch
from tests.kasmina.test_body_state import slot_state
torch.set_num_threads(1)
from tests.support.models import ZOO, call, main_output
from safetensors.torch import load_file
for name, file in {files!r}.items():
    case = ZOO[name]
    state = load_file(file)
    x, expected = case.batch(4), state.pop("expected")
    body = case.body(seed=77)
    body.load_state_dict(state)
    output = main_output(call(body.eval(), x))
    assert torch.equal(output, expected), name
    print(name, [slot_state(s) for s in body.slots.values()])
"""


def test_new_process_rebuilds_a_grown_body_from_a_file(tmp_path: Path):
    files, expect = {}, []
    for name in ("cnn", "residual", "transformer_host"):
        body = grown(name)
        expected = main_output(call(body.eval(), ZOO[name].batch(4))).detach()
        files[name] = str(tmp_path / f"{name}.safetensors")
        save_file({**{k: v.contiguous() for k, v in body.state_dict().items()}, "expected": expected}, files[name])
        expect.append(f"{name} {[slot_state(s) for s in body.slots.values()]}")
    script = REBUILD.format(root=str(ROOT), files=files)

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == expect


@pytest.mark.parametrize(("stage", "alpha"), ALIVE)
@pytest.mark.parametrize("operator", Operator)
def test_load_restores_stage_alpha_operator_and_requires_grad(stage: SeedStage, alpha: float, operator: Operator):
    body, again = ZOO["cnn"].body(), ZOO["cnn"].body()
    grow(body, "features.1", "conv_light", operator=operator, stage=stage, alpha=alpha)
    grow(again, "features.0", "norm")  # another seed at another slot

    with pytest.warns(UserWarning, match=r"no seed in features\.0: the seeds there are removed"):
        again.load_state_dict(body.state_dict())

    slot, slot_state = again.slots["features.1"], body.slots["features.1"]
    assert (slot.stage, slot.amplitude, slot.operator, slot.blueprint) == (stage, alpha, operator, "conv_light")
    assert float(slot.alpha) == pytest.approx(alpha)
    assert [p.requires_grad for p in slot.parameters()] == [p.requires_grad for p in slot_state.parameters()]
    assert again.slots["features.0"].seed is None
    assert again.structure() == body.structure()
    assert same_function(again, body)


def test_load_reuses_existing_parameters_of_matching_seeds():
    body = grown()
    seeds = [id(p) for p in body.parameters()]
    state = {k: v.clone() + 0.5 if v.is_floating_point() else v for k, v in body.state_dict().items()}

    body.load_state_dict(state)

    assert [id(p) for p in body.parameters()] == seeds  # an optimiser holds references to them
    assert all(torch.equal(v, state[k]) for k, v in body.state_dict().items())


def test_loading_a_plain_model_state_empties_the_slots():
    body = grown()
    with pytest.warns(
        UserWarning, match=r"no seed in features\.0, features\.1, features\.2: the seeds there are removed"
    ):
        body.load_state_dict(ZOO["cnn"].model().state_dict())
    assert body.structure() == {}
    assert same_function(body, ZOO["cnn"].model())


def test_on_load_callbacks_run_and_are_not_copied():
    body = grown()
    calls: list[str] = []
    body.on_load.append(lambda: calls.append("first"))
    clone = copy.deepcopy(body)

    clone.load_state_dict(body.state_dict())
    assert calls == []
    body.load_state_dict(clone.state_dict())
    assert calls == ["first"]
    outer = nn.ModuleDict({"inner": body})
    outer.load_state_dict(outer.state_dict())
    assert calls == ["first", "first"]


def test_deepcopy_is_independent():
    body = grown()
    clone = copy.deepcopy(body)
    assert same_function(clone, body)

    clone.slots["features.0"].remove_seed()
    with torch.no_grad():
        for p in clone.parameters():
            p.zero_()
    assert not main_output(clone.eval()(images(4))).any()
    assert same_function(body, grown())
    assert {id(m) for m in clone.modules()}.isdisjoint(id(m) for m in body.modules())
    hooks = [h.__self__ for m in clone.model.modules() for h in m._forward_hooks.values()]
    assert {id(s) for s in hooks} == {id(s) for s in clone.slots.values()}


class Ensemble(nn.Module):
    def __init__(self, *bodies: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.members = nn.ModuleList(bodies)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * sum(member(x) for member in self.members)


def test_nested_bodies_are_restored():
    one, other = Ensemble(grown(), ZOO["cnn"].body()), Ensemble(ZOO["cnn"].body(seed=1), ZOO["cnn"].body(seed=2))
    state = one.state_dict()
    assert f"members.0.{STRUCTURE}" in state
    assert f"members.1.{STRUCTURE}" not in state

    other.load_state_dict(state)

    assert same_function(other, one)
    assert other.members[0].structure() == one.members[0].structure()
    assert list(other.state_dict()) == list(state)


def test_load_with_assign_restores_the_body():
    body = grown()
    fresh = ZOO["cnn"].body(seed=5)
    fresh.load_state_dict(body.state_dict(), assign=True)
    assert same_function(fresh, body)


def test_state_dict_supports_prefix_and_keep_vars():
    body = grown()
    state = body.state_dict(prefix="x.", keep_vars=True)
    assert all(k.startswith("x.") for k in state)
    assert state["x.head.weight"] is body.model.head.weight
    with pytest.raises(TypeError, match="keywords only"):
        body.state_dict({})


# -- incompatible states


def with_structure(body: Body, **changes: object) -> dict[str, Tensor]:
    state = dict(body.state_dict())
    slot_state = json.loads(bytes(state[STRUCTURE].numpy()))
    slot_state["features.2"] |= changes
    state[STRUCTURE] = torch.frombuffer(bytearray(json.dumps(slot_state).encode()), dtype=torch.uint8)
    return state


def test_load_error_names_missing_slot():
    body = graft(PlainCNN(), ["features.0"], probe=images(3))
    with pytest.raises(
        GraftError, match=r"slot 'features.1', which this body does not have .*Graft at the same places"
    ):
        body.load_state_dict(grown().state_dict())


@pytest.mark.parametrize(
    "changes",
    [{"stage": 99}, {"operator": "add"}, {"alpha": None}, {"alpha": [1]}, {"blueprint": 3}, {"blueprint": "lora"}],
)
def test_invalid_structure_is_rejected_without_changes(changes: dict[str, object]):
    body = ZOO["cnn"].body()
    grow(body, "features.0", "norm")
    before = body.structure()
    with pytest.raises((ConfigError, UnknownNameError, BlueprintError), match=r"not readable|no blueprint|serves"):
        body.load_state_dict(with_structure(grown(), **changes))
    assert body.structure() == before


def test_truncated_structure_is_rejected():
    body = grown()
    state = dict(body.state_dict())
    state[STRUCTURE] = state[STRUCTURE][:-3].clone()
    with pytest.raises(ConfigError, match="not readable"):
        body.load_state_dict(state)


def test_load_error_names_unregistered_blueprint():
    blueprint("mine", layouts="vector")(lambda dim: zero_linear(dim))
    body = ZOO["mlp_host"].body()
    grow(body, "layers.0", "mine")
    state = body.state_dict()
    fresh = ZOO["mlp_host"].body()
    unregister("mine")

    with pytest.raises(UnknownNameError, match="no blueprint named 'mine'"):
        fresh.load_state_dict(state)

    blueprint("mine", layouts="vector")(lambda dim: zero_linear(dim))
    try:
        fresh.load_state_dict(state)
        assert torch.equal(fresh(vectors(3)), body(vectors(3)))
    finally:
        unregister("mine")


def zero_linear(dim: int) -> nn.Module:
    linear = nn.Linear(dim, dim)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def test_missing_and_unexpected_keys_are_reported_as_by_torch():
    body = grown()
    state = dict(body.state_dict())
    del state["head.bias"], state["esper.features/0.seed.0.weight"]
    state["nonsense"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*head\.bias.*"):
        body.load_state_dict(state)
    result = body.load_state_dict(state, strict=False)
    assert len(result.missing_keys) == 2
    assert len(result.unexpected_keys) == 1


def test_size_mismatch_is_rejected_with_the_key():
    wide = graft(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2)), ["0"], probe=vectors(3))
    narrow = graft(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), ["0"], probe=vectors(3))
    grow(wide, "0")
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.0\.weight"):
        narrow.load_state_dict(wide.state_dict())


# -- sync with the slot table


def test_sync_copies_stage_and_alpha_from_the_table():
    body = ZOO["cnn"].body()
    table = SlotTable.empty(2, 3)
    for s, name in enumerate(body.slots):
        body.plant(name, "conv_light", Operator.GATE)
        table.stage[1, s] = ALIVE[s + 1][0]
        table.alpha[1, s] = ALIVE[s + 1][1]
    table.alpha_from[1, 1], table.alpha_to[1, 1], table.ramp_len[1, 1] = 1.0, 0.0, 5  # alpha is ramping down: frozen

    body.sync(table, env=1)

    slots = list(body.slots.values())
    assert [s.stage for s in slots] == [SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING]
    assert [float(s.alpha) for s in slots] == pytest.approx([0.0, 0.25, 0.7])
    assert [all(p.requires_grad for p in s.parameters()) for s in slots] == [True, False, True]


def test_alpha_is_not_in_the_state_and_follows_dtype():
    body = grown()
    assert not any(k.endswith("alpha") for k in body.state_dict())
    body.double()
    assert body.eval()(images(3).double()).dtype == torch.float64


def test_costs_are_available_before_building():
    body = ZOO["residual"].body()
    costs = body.costs()
    assert set(costs) == set(body.slots)
    slot = grow(body, "stage1", "conv_heavy")
    assert costs["stage1"]["conv_heavy"].params == sum(p.numel() for p in slot.parameters())
    assert all(c.macs > 0 for c in costs["stage1"].values() if c.params > 100)
