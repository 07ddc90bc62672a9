"""Test the task table, deterministic hosts and minibatches, and per-sample scores."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from esper.leyline.actions import Operator
from esper.leyline.errors import ConfigError, DataError, UnknownNameError
from esper.tolaria.data import from_tensors
from esper.tolaria.engine import HostNetwork
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.tasks import TASKS, Task, get_task, per_sample_correct, per_sample_loss

SIZES = {
    "cifar_baseline": 6_418,
    "cifar_scale": 99_922,
    "cifar_impaired": 77,
    "cifar_minimal": 164,
    "cifar_multichannel": 6_418,
    "cifar_postpool": 24_346,
    "cifar_highres": 24_346,
    "cifar_deep_multichannel": 99_922,
    "cifar_deep_impaired": 1_140,
    "tinystories": 30_044_544,
}
EMBEDDED = ("quick", "fashion", "rescue", "standard", "digits", "moby", "moby_deep")


@pytest.mark.parametrize("name", TASKS)
def test_every_task_builds_its_host_with_its_slots(name):
    task = TASKS[name]
    assert task.name == name
    with torch.device("meta"):
        host = task.build_host(0)
    assert set(task.slots) <= set(host.sites())
    assert [s for s in host.sites() if s in task.slots] == list(task.slots)  # in execution order
    if name in SIZES:
        assert sum(p.numel() for p in host.parameters()) == SIZES[name]


def test_presets_have_the_documented_settings():
    for name, epochs in {"quick": 40, "rescue": 40, "standard": 110, "cifar": 40}.items():
        task = TASKS[name]
        assert (task.optimiser, task.lr, task.momentum, task.batch) == ("sgd", 0.1, 0.9, 64)
        assert (task.batches_per_epoch, task.val_size, len(task.slots)) == (20, 2_000, 3)
        assert task.epochs == epochs


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_task_runs_a_training_step(name):
    task = get_task(name)
    data, host = task.load_data(), task.build_host(1)
    x, y = next(task.minibatches(data, world=3, step=0))
    assert len(x) == task.batch
    assert len(data.val) <= task.val_size

    loss = per_sample_loss(host(x), y)

    assert loss.shape == (task.batch,)
    assert loss.mean().item() == pytest.approx(data.chance_loss, rel=0.25)
    loss.mean().backward()


@pytest.mark.parametrize("name", ["digits", "quick", "resnet_fashion", "moby_deep"])
def test_build_host_is_deterministic_and_keeps_global_rng_state(name):
    task = get_task(name)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, other, again = task.build_host(1), task.build_host(2), task.build_host(1)
    assert torch.rand(3).equal(expected)
    assert all(a.equal(b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not all(a.equal(b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_residual_host_trains_deterministically_by_world():
    noise = torch.Generator().manual_seed(0)
    x, y = torch.randn(80, 1, 28, 28, generator=noise), torch.arange(80) % 10
    task = replace(get_task("resnet_fashion"), data=from_tensors("mine", x, y), batch=8, batches_per_epoch=3)
    states = []
    for world in (1, 1, 2):
        network = HostNetwork(task, task.load_data(), world, EngineConfig())
        network.body.plant("r0c1", "conv_heavy", Operator.ADD, rng_seed=0)
        network.regroup()
        network.train_epoch(0)
        states.append(network.body.state_dict())
    one, again, other = states
    assert all(one[key].equal(again[key]) for key in one if key != "esper.structure")
    assert not one["stem.weight"].equal(other["stem.weight"])


def test_minibatches_are_a_function_of_world_and_step():
    task = Task.from_tensors(
        "mine",
        torch.randn(60, 3, 8, 8),
        torch.arange(60) % 3,
        black=(0.0, 0.0, 0.0),
        augment=True,
        batch=8,
        batches_per_epoch=4,
    )
    data = task.load_data()
    one, again, other = ([x for x, _ in task.minibatches(data, 1, step)] for step in (2, 2, 3))
    assert len(one) == 4
    assert all(a.equal(b) for a, b in zip(one, again, strict=True))
    assert not one[0].equal(other[0])


def test_per_sample_scores_of_a_classifier_match_formulas():
    output = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    target = torch.tensor([0, 1, 1])
    expected = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(-1)), math.log(1 + math.exp(3))]
    assert per_sample_loss(output, target).tolist() == pytest.approx(expected)
    assert per_sample_correct(output, target).tolist() == [1.0, 1.0, 0.0]


def test_per_sample_scores_of_a_language_model_are_means_over_tokens():
    output = torch.randn(3, 5, 7)
    target = torch.randint(0, 7, (3, 5))
    log_p = output.log_softmax(-1).gather(2, target[..., None])[..., 0]
    torch.testing.assert_close(per_sample_loss(output, target), -log_p.mean(1))
    right = (output.argmax(-1) == target).float().mean(1)
    torch.testing.assert_close(per_sample_correct(output, target), right)


@pytest.mark.parametrize(
    ("x", "y", "host"),
    [
        (torch.randn(50, 3, 8, 8), torch.arange(50) % 5, "cnn"),
        (torch.randn(50, 3, 8, 8), torch.arange(50) % 5, "resnet"),
        (torch.randn(50, 7), torch.arange(50) % 5, "mlp"),
        (torch.randint(0, 9, (50, 6)), torch.randint(0, 9, (50, 6)), "transformer"),
    ],
)
def test_from_tensors_builds_a_matching_host(x, y, host):
    task = Task.from_tensors("mine", x, y, host="resnet" if host == "resnet" else None)
    data = task.load_data()
    assert task.host == host
    batch, target = next(task.minibatches(data, 0, 0))
    assert per_sample_loss(task.build_host(0)(batch), target).isfinite().all()


def test_from_tensors_accepts_settings_and_rejects_invalid_ones():
    x, y = torch.randn(50, 3, 8, 8), torch.arange(50) % 5
    task = Task.from_tensors("mine", x, y, host="mlp", host_kwargs={"width": 4}, lr=0.3, slots=("r0c1",))
    assert (task.host_kwargs["width"], task.lr, task.slots) == (4, 0.3, ("r0c1",))
    with pytest.raises(UnknownNameError, match="r0c0"):
        Task.from_tensors("mine", x, y, slots=("r0c9",))
    with pytest.raises(UnknownNameError, match="cnn"):
        Task.from_tensors("mine", x, y, host="cmn")
    with pytest.raises(ConfigError, match="lr"):
        Task.from_tensors("mine", x, y, lr=float("nan"))
    with pytest.raises(DataError, match="16×16"):
        Task.from_tensors("mine", x, y, host_kwargs={"blocks": 4})
    with pytest.raises(DataError, match="images of 3 channels and at least 16×16"):
        Task.from_tensors("mine", x, y, host="resnet", host_kwargs={"stages": 5})
    with pytest.raises(DataError, match="5 classes"):
        Task.from_tensors("mine", x, y, host_kwargs={"classes": 4})
    with pytest.raises(DataError, match="black"):
        Task.from_tensors("mine", x, y, augment=True)


def test_data_that_does_not_fit_the_host_is_rejected(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(0x4E00 + i % 100) for i in range(4000)))
    moby = get_task("moby")
    with pytest.raises(DataError, match="100 classes, the host of task 'mine' has 81"):
        Task(
            name="mine", question="", host="transformer", host_kwargs=moby.host_kwargs, dataset="text",
            slots=moby.slots,
        ).load_data(path)  # fmt: skip


def test_text_for_a_host_of_images_is_rejected():
    images = get_task("quick")
    with pytest.raises(DataError, match="needs images of 1 channels"):
        replace(images, dataset="moby", host_kwargs={**images.host_kwargs, "classes": 81}).load_data()


@pytest.mark.parametrize("name", ["quick", "digits", "moby", "moby_deep", "resnet_fashion"])
def test_enlarged_host_is_the_first_of_at_least_the_size(name):
    task = get_task(name)

    def size(of: Task) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in of.build_host(0).parameters())

    least = 2 * size(task)
    for enlarge in (Task.widened, Task.deepened):
        larger = task
        while size(larger) < least:
            larger = enlarge(larger, size(larger) + 1)
        assert enlarge(task, least) == larger
        assert enlarge(task, size(task)) == task


def test_unknown_task_error_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'rescue'"):
        get_task("rescu")


def test_images_are_reduced_by_averaging_squares():
    task = replace(get_task("quick"), shrink=2)
    whole, small = get_task("quick").load_data(), task.load_data()
    assert small.train.x.shape[1:] == (1, 7, 7)
    for split in ("train", "val", "test"):
        x, y = whole.splits[split].x, small.splits[split].x
        corners = [x[:, :, row::2, column::2] for row in (0, 1) for column in (0, 1)]
        torch.testing.assert_close(y, sum(corners) / 4)
        assert torch.equal(whole.splits[split].y, small.splits[split].y)


@pytest.mark.parametrize(("name", "factor", "message"), [
    ("moby", 2, "only images can be reduced. Set shrink=1"),
    ("quick", 15, "smaller than shrink=15"),
])  # fmt: skip
def test_data_that_cannot_be_reduced_is_refused(name, factor, message):
    with pytest.raises(DataError, match=message):
        replace(get_task(name), shrink=factor).load_data()
