"""Test fork plans in isolation, and that a body with seeds in every stage compiles to one graph."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.kasmina.forking import ForkError, ForkPlan, ForkPoint, argument_form, batched_leaves
from esper.kasmina.graft import graft
from esper.kasmina.hosts import CNNHost, MLPHost, TransformerHost
from esper.leyline.actions import Operator
from esper.leyline.stages import SeedStage
from esper.tolaria.coalitions import evaluate
from tests.support.models import (
    ZOO,
    Case,
    PlainCNN,
    Siamese,
    grow,
    grow_everywhere,
    images,
    images_last,
    main_output,
    tokens,
    vectors,
)

SLOTS = ["a", "b", "c"]
POINTS = {s: ForkPoint(False, s) for s in SLOTS}
ALL = list(product((False, True), repeat=3))
WORTH = {"a": 1.0, "b": 10.0, "c": 100.0}


def plan_of(
    configs: list[tuple[bool, ...]], main: tuple[bool, ...], points: dict[str, ForkPoint] | None = None
) -> ForkPlan:
    points = points or POINTS
    sequence = sorted(dict.fromkeys(points[s] for s in SLOTS), key=lambda p: not p.at_input)  # the root comes first
    plan = ForkPlan.build(configs, SLOTS, points, sequence, main)
    plan.batch = 2
    return plan


def walk(plan: ForkPlan, x: Tensor) -> list[Tensor]:
    """Run three slots in sequence, each adding its value from `WORTH`. Return the features at every level."""
    (x,) = plan.at_input("", (x,))
    outputs = [x]
    for slot in SLOTS:
        x = plan.at_slot(slot, x, lambda h, out, slot=slot: torch.add(h, WORTH[slot], out=out))
        outputs.append(x)
    plan.finish()
    return outputs


@given(
    st.lists(st.sampled_from(ALL), min_size=1, max_size=8, unique=True),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.data(),
)
def test_each_configuration_gets_its_own_row_of_every_output(configs: Any, at_root: list[bool], data: Any):
    """Includes outputs that leave the network early and any mixture of fork points."""
    points = {s: ForkPoint(True, "") if root else POINTS[s] for s, root in zip(SLOTS, at_root, strict=True)}
    main = data.draw(st.sampled_from(configs))
    plan = plan_of(configs, main, points)
    x = torch.tensor([[1.0], [2.0]])

    rows = plan.split(walk(plan, x))

    for config, outputs in zip(configs, rows, strict=True):
        total = x
        assert torch.equal(outputs[0], x)
        for slot, on, out in zip(SLOTS, config, outputs[1:], strict=True):
            total = total + WORTH[slot] * on
            assert torch.equal(out, total), (config, slot)
    if not plan.alone:
        assert torch.equal(rows[configs.index(main)][-1], walk_main(plan, x))


def walk_main(plan: ForkPlan, x: Tensor) -> Tensor:
    plan.done = 0
    last = walk(plan, x)[-1]
    return last[plan.main_row * 2 : (plan.main_row + 1) * 2]


def test_plan_forks_only_where_configurations_differ():
    plan = plan_of([(False, False, False), (False, False, True)], (False, False, True))
    assert [f.point.name for f in plan.forks] == ["c"]  # all seeds before c are off: no fork there
    assert [len(f.parents) for f in plan_of(ALL, ALL[-1]).forks] == [2, 4, 8]
    assert [len(f.parents) for f in plan_of([ALL[3], ALL[5]], ALL[5]).forks] == [2, 2, 2]


def test_two_slot_example_of_the_documentation():
    """The plan in the docstring of `ForkState`."""
    model = nn.Sequential(OrderedDict(a=nn.Linear(8, 8), b=nn.Linear(8, 8), head=nn.Linear(8, 2)))
    body = graft(model, ["a", "b"], probe=vectors(3))

    plan = body.forking.plan([(False, False), (False, True), (True, False), (True, True)], ["a", "b"], (True, True))

    assert body.forking.points == {"a": (False, "a"), "b": (False, "b")}
    assert [fork.parents for fork in plan.forks] == [[0, 0], [0, 1, 0, 1]]
    assert plan.forks[0].on == {"a": [False, True]}
    assert plan.forks[1].on == {"a": [False, True, False, True], "b": [False, False, True, True]}
    assert plan.forks[1].main == 3
    assert plan.order == [0, 2, 1, 3]


def test_outputs_without_rows_are_none():
    plan = plan_of(ALL, ALL[-1])
    features = walk(plan, torch.ones(2, 1))[-1]
    row = plan.split({"loss": features.mean(), "odd": features[:5], "note": "text", "logits": features})[0]
    assert row["loss"] is None
    assert row["odd"] is None
    assert row["note"] == "text"
    assert row["logits"].shape == (2, 1)


def test_wrong_number_of_samples_at_a_slot_raises():
    plan = plan_of(ALL, ALL[-1])
    with pytest.raises(ForkError, match="slot 'a' received 3 samples, expected 1 × 2"):
        plan.at_slot("a", torch.zeros(3, 1), lambda h, _out: h)
    plan.at_slot("a", torch.zeros(2, 1), lambda h, _out: h)
    with pytest.raises(ForkError, match="slot 'b' received 2 samples, expected 2 × 2"):
        plan.at_slot("b", torch.zeros(2, 1), lambda h, _out: h)
    with pytest.raises(ForkError, match="reached 1 of 3 forks"):
        plan.finish()


def test_single_configuration_accepts_any_batch_dimension():
    plan = ForkPlan.single((True, False, True), SLOTS)
    plan.batch = 2
    out = walk(plan, torch.zeros(7, 2, 1))
    assert torch.equal(out[-1], torch.full((7, 2, 1), 101.0))
    assert plan.split(out) == [out]


def test_unbatched_tensor_of_batch_size_is_not_forked():
    arguments = ((torch.zeros(5, 2), torch.zeros(3, 3)), {"mask": None, "flag": True})
    form = argument_form(arguments, 5)
    now = ((torch.zeros(3, 2), torch.zeros(3, 3)), {"mask": torch.zeros(3), "flag": True})
    assert batched_leaves(now, 3) == [True, True, True, False]
    assert batched_leaves(now, 3, form) == [True, False, True, False]
    assert batched_leaves(((torch.zeros(3, 3),), {}), 3, form) == [True]  # unknown structure: by size


@pytest.mark.parametrize("layout", [images, images_last])
def test_forked_rows_keep_their_memory_format(layout: Any):
    model = (
        PlainCNN().eval().to(memory_format=torch.channels_last if layout is images_last else torch.contiguous_format)
    )
    body = graft(model, ["features.0", "features.1"], probe=layout(3))
    grow_everywhere(body)
    contiguous: list[bool] = []
    last = layout is images_last

    def look(_module: nn.Module, args: Any) -> None:
        contiguous.append(args[0].is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format))

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(look)
    evaluate(body, [(layout(6), torch.arange(6))], lambda out, _: main_output(out))
    assert all(contiguous)


def test_replaced_norm_forward_is_kept_and_called():
    body = graft(Siamese().eval(), ["tower.0"], probe=(images(3), images(3)))
    grow(body, "tower.0")
    norm = body.model.tower[1][1]
    plain = norm.forward
    calls: list[int] = []

    def wrapped(x: Tensor) -> Tensor:
        calls.append(x.shape[0])
        return plain(x)

    norm.forward = wrapped
    evaluate(body, [((images(4), images(4)), torch.arange(4))], lambda out, _: main_output(out))
    assert norm.forward is wrapped
    assert calls


# -- compile

STAGES = [
    (SeedStage.GERMINATED, 0.0), (SeedStage.TRAINING, 0.0), (SeedStage.BLENDING, 0.3), (SeedStage.HOLDING, 1.0),
    (SeedStage.FOSSILIZED, 1.0),
]  # fmt: skip


def step(body: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(body(x).flatten(0, -2), y)


FIVE_SLOTS = {
    "mlp": Case(lambda: MLPHost(inputs=8, classes=5, width=8, layers=5), vectors,
                tuple(f"layers.{i}" for i in range(5))),
    "cnn": Case(lambda: CNNHost(in_channels=3, classes=5, base=4, blocks=3, pools=2), images_last,
                ("blocks.0", "pools.0", "blocks.1", "pools.1", "blocks.2")),
    "transformer": Case(lambda: TransformerHost(vocab=11, dim=8, heads=2, layers=5, segments=5, block_size=6), tokens,
                        tuple(f"blocks.{i}" for i in range(5))),
}  # fmt: skip
QUICK = {("cnn", "straight_through")}


@pytest.mark.parametrize("operator", Operator)
@pytest.mark.parametrize(
    ("host", "incubation"),
    [
        pytest.param(h, i, marks=() if (h, i) in QUICK else pytest.mark.slow)
        for h in FIVE_SLOTS
        for i in ("shadow", "straight_through")
    ],
)
def test_seeds_of_every_stage_compile_to_one_graph(host: str, incubation: Any, operator: Operator):
    case = FIVE_SLOTS[host]
    x = case.batch(6)
    y = torch.zeros(36 if host == "transformer" else 6, dtype=torch.long)
    body = case.body().train()
    body.incubation = incubation
    for name, (stage, alpha) in zip(body.slots, STAGES, strict=True):
        grow(body, name, operator=operator, stage=stage, alpha=alpha)
    clone = copy.deepcopy(body)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")

    loss, expected = compiled(body, x, y), step(clone, x, y)
    loss.backward(), expected.backward()

    assert torch.allclose(loss, expected)
    for (name, p), q in zip(body.named_parameters(), clone.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None), name
        assert p.grad is None or torch.allclose(p.grad, q[1].grad, atol=1e-6), name
    learns = body.slots[case.at[1]].parameters()
    assert incubation == "shadow" or any(p.grad is not None and p.grad.any() for p in learns)
    with torch.no_grad():
        assert torch.allclose(compiled(body.eval(), x, y), step(clone.eval(), x, y))


def test_changing_alpha_does_not_recompile():
    body = ZOO["mlp_host"].body()
    slot = grow(body, "layers.1", stage=SeedStage.BLENDING, alpha=0.1)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x: body(x), fullgraph=True, backend=counter)
    for alpha in (0.1, 0.5, 0.9, 1.0):
        body.set_slot(slot, SeedStage.BLENDING, alpha)
        assert torch.allclose(compiled(vectors(4)), body(vectors(4)))
    assert counter.frame_count == 1


def test_body_compiled_in_place_evaluates_coalitions():
    case = ZOO["mlp_host"]
    body, clone = case.body(), case.body()
    for each in (body, clone):
        grow_everywhere(each)
    torch._dynamo.reset()
    body.compile(backend="eager")
    body(vectors(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, expected = (
            evaluate(b, [(vectors(9), torch.arange(9))], lambda out, _: main_output(out)).scores for b in (body, clone)
        )
    assert torch.allclose(loss, expected, atol=1e-6)


@pytest.mark.slow
def test_inductor_loss_equals_eager():
    body = ZOO["mlp_host"].body().train()
    grow_everywhere(body)
    torch._dynamo.reset()
    loss = torch.compile(step, fullgraph=True)(body, vectors(6), torch.zeros(6, dtype=torch.long))
    assert torch.allclose(loss, step(body, vectors(6), torch.zeros(6, dtype=torch.long)), atol=1e-5)
