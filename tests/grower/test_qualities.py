"""Named qualities: what each scores, which shapes it accepts, and how a wrong shape is reported."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import esper
from esper.grower.qualities import (
    QUALITIES,
    accuracy,
    log_probability,
    mean_iou,
    multilabel_accuracy,
    negative_mse,
    pixel_accuracy,
)
from esper.leyline.errors import ConfigError, UnknownNameError


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def grower_of(model: nn.Module, at: str, probe: torch.Tensor, **options) -> esper.Grower:
    body = esper.graft(model, at=[at], probe=probe)
    return esper.Grower(body, torch.optim.SGD(body.parameters(), lr=0.1), **{"controller": "none", **options})


def vector_grower(outputs: int = 3, **options) -> esper.Grower:
    torch.manual_seed(0)
    return grower_of(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs)), "1", noise(4, 6), **options)


# -- classification


@pytest.mark.parametrize("positions", [(), (7,), (4, 5), (2, 3, 4)])
def test_classes_may_be_on_axis_1_or_last(positions):
    logits, target = noise(5, *positions, 6), classes(6, 5, *positions)
    first = logits.movedim(-1, 1)
    right = (logits.argmax(-1) == target).float().reshape(5, -1).mean(1)
    loss = nn.functional.cross_entropy(first, target, reduction="none").reshape(5, -1).mean(1)
    for output in (logits, first):
        assert torch.allclose(accuracy(output, target), right)
        assert torch.allclose(log_probability(output, target), -loss, atol=1e-6)


def test_ambiguous_class_axis_is_refused_and_can_be_named():
    logits, target = noise(5, 4, 4), classes(4, 5, 4)
    with pytest.raises(ConfigError, match=r"could both be the classes: got logits \[5, 4, 4\] .*class_axis=1"):
        accuracy(logits, target)
    last = functools.partial(accuracy, class_axis=-1)(logits, target)
    assert torch.equal(last, (logits.argmax(-1) == target).float().mean(1))
    assert torch.equal(accuracy(logits, target, class_axis=1), (logits.argmax(1) == target).float().mean(1))


def test_ignored_pixels_do_not_count():
    logits, target = noise(2, 3, 4, 4), classes(3, 2, 4, 4)
    target[:, 1:] = -100
    right = (logits.argmax(1) == target)[:, 0].float().mean(1)
    assert torch.equal(pixel_accuracy(logits, target), right)


def test_mean_iou_is_the_mean_over_the_classes_of_each_sample():
    target = torch.tensor([[[0, 0], [1, 1]], [[2, 2], [2, 2]]])
    predicted = torch.tensor([[[0, 1], [1, 1]], [[2, 2], [2, 2]]])
    logits = nn.functional.one_hot(predicted, 4).movedim(-1, 1).float()
    assert torch.allclose(mean_iou(logits, target), torch.tensor([(1 / 2 + 2 / 3) / 2, 1.0]))


def test_multilabel_accuracy_decides_at_logit_zero():
    logits = torch.tensor([[2.0, -1.0, 0.5, -3.0], [1.0, 1.0, 1.0, 1.0]])
    labels = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    assert torch.equal(multilabel_accuracy(logits, labels), torch.tensor([0.75, 0.25]))
    assert torch.equal(multilabel_accuracy(logits[:, 0], labels[:, 0].bool()), torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("name", ["accuracy", "mean_iou", "pixel_accuracy"])
def test_non_finite_logits_score_nan(name):
    logits = noise(2, 3, 4, 4)
    logits[0] = torch.nan
    scores = QUALITIES[name](logits, classes(3, 2, 4, 4))
    assert scores[0].isnan()
    assert scores[1].isfinite()


# -- regression


def test_negative_mse_does_not_broadcast_a_column_against_a_row():
    values, target = noise(6, 1), noise(6, seed=1)
    assert torch.allclose(negative_mse(values, target), -(values[:, 0] - target).square())
    assert torch.allclose(negative_mse(values[:, 0], target[:, None]), -(values[:, 0] - target).square())


@pytest.mark.parametrize("outputs", [1, 3])
def test_mean_of_r2_over_uneven_batches_is_r2_of_the_validation_set(outputs):
    grower = vector_grower(outputs, quality="r2")
    x, y = noise(50, 6), 5 + 2 * noise(50, outputs, seed=1)
    predicted = grower.body.eval()(x)
    expected = 1 - (predicted - y).square().sum() / (y - y.mean(0)).square().sum()
    report = grower.step((x[a:b], y[a:b]) for a, b in ((0, 7), (7, 40), (40, 50)))
    assert report.quality == pytest.approx(expected.item(), rel=1e-5)


def test_r2_works_for_worth_and_seeds():
    grower = vector_grower(1, quality="r2")
    x, y = noise(30, 6), noise(30, 1, seed=1)
    grower.germinate("1", "lora")
    for _ in range(3):
        grower.step([(x, y)])
    assert grower.worth([(x, y)]).slots == ("1",)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([torch.ones(5, 1)], "their variance is 0. Use more validation samples"),
        ([1.0], "got a float. Convert it with torch.as_tensor"),
        ([noise(5, 1), noise(5, 2)], r"got \[1, 2\]. Pad or cut them to one size"),
    ],
)
def test_r2_refuses_unusable_targets(targets, message):
    with pytest.raises(ConfigError, match=message):
        vector_grower(1, quality="r2").step([(noise(5, 6), target) for target in targets])


def test_label_out_of_range_is_refused_at_the_first_step():
    grower = vector_grower()
    x, y = noise(8, 6), classes(3, 8) + 1
    with pytest.raises(ConfigError, match="target contains class 3, but the logits have 3 classes: 0 to 2"):
        grower.step([(x, y)])
    assert grower.table.step[0] == 0


# -- wrong shapes


WRONG = {
    "one-hot target": (noise(8, 3), classes(2, 8, 3), "accuracy", r"got logits \[8, 3\] and target int64 \[8, 3\]"),
    "column target": (noise(8, 3), classes(3, 8, 1), "accuracy", r"got logits \[8, 3\] and target int64 \[8, 1\]"),
    "float target": (noise(8, 3), noise(8), "log_probability", "takes class indices .* 'negative_mse' or 'r2'"),
    "one logit": (noise(8, 1), classes(2, 8), "accuracy", "only one class: .*use 'multilabel_accuracy'"),
    "bare logits": (noise(8), classes(2, 8), "accuracy", r"takes logits \[B, C\]"),
    "tuple output": ((noise(8, 3), noise(8)), classes(3, 8), "accuracy", r"returns tuple \(float32 \[8, 3\], float32"),
    "mapping": ({"out": noise(8, 3)}, classes(3, 8), "accuracy", r"returns \{'out': float32 \[8, 3\]\}"),
    "classes last": (noise(8, 4, 5, 3), classes(3, 8, 4, 5), "pixel_accuracy", r"got logits \[8, 4, 5, 3\]"),
    "two shapes": (noise(8, 3), noise(8), "negative_mse", r"got \[8, 3\] and float32 \[8, 1\]"),
    "labels": (noise(8, 3), noise(8, 2), "multilabel_accuracy", r"got \[8, 3\] and float32 \[8, 2\]. Reshape one"),
    "pixels, one-hot": (noise(2, 3, 4, 4), classes(2, 2, 3, 4, 4), "pixel_accuracy", r"pass target.argmax\(1\)"),
    "pixels, channel": (noise(2, 3, 4, 4), classes(3, 2, 1, 4, 4), "pixel_accuracy", r"target.squeeze\(1\)"),
    "pixels, size": (noise(2, 3, 4, 4), classes(3, 2, 8, 8), "pixel_accuracy", r"\[B, C, H, W\].*interpolate"),
    "class too large": (noise(8, 3), classes(3, 8) + 1, "accuracy", "contains class 3, but the logits have 3 classes"),
    "negative class": (noise(8, 3), classes(3, 8) - 1, "log_probability", "contains class -1, .*use -100 for targets"),
    "pixel class": (noise(2, 3, 4, 4), classes(3, 2, 4, 4) + 253, "mean_iou", "class 25[345], but"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_shape_names_expected_and_actual(case):
    output, target, name, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        QUALITIES[name](output, target)


def test_check_tries_the_quality_before_the_first_epoch():
    grower = vector_grower()
    before = grower.table.clone()
    grower.check((noise(8, 6), classes(3, 8)))
    with pytest.raises(ConfigError, match=r"got logits \[8, 3\] and target int64 \[8, 2\]"):
        grower.check((noise(8, 6), classes(3, 8, 2)))
    assert not grower.table.diff(before)
    assert grower.body.training


@pytest.mark.parametrize("incubation", ["straight_through", "shadow"])
def test_failed_measurement_can_be_repeated_with_a_fixed_quality(incubation):
    grower = vector_grower(quality=lambda output, _target: output[0, 0, 0], incubation=incubation)
    grower.germinate("1", "lora")
    grower.step()
    x, y = noise(8, 6), classes(3, 8)
    nn.functional.cross_entropy(grower.body(x), y).backward()
    if incubation == "shadow":
        grower.shadow(lambda: nn.functional.cross_entropy(grower.body(x), y))
    grower.optimizer.step()
    before = grower.table.clone()
    with pytest.raises(ConfigError, match=r"<lambda> fails with IndexError: .* output float32 \[16, 3\] and target"):
        grower.step([(x, y)])
    assert not grower.table.diff(before)
    grower.quality = "accuracy"
    report = grower.step([(x, y)])
    assert 0 <= report.quality <= 1
    assert grower.table.step[0] == before.step[0] + 1
    assert grower.table.grad_norm[0, 0] > 0  # sampled in the epoch before the failed call


def test_unknown_quality_lists_every_name():
    with pytest.raises(UnknownNameError, match=r"no quality named 'acuracy'. Did you mean 'accuracy'") as error:
        vector_grower(quality="acuracy")
    assert all(name in str(error.value) for name in QUALITIES)


@pytest.mark.parametrize("quality", [None, 3])
def test_non_callable_quality_is_refused_at_construction(quality):
    with pytest.raises(ConfigError, match="quality must be a function"):
        vector_grower(quality=quality)


def test_documentation_lists_every_named_quality():
    page = (Path(__file__).parents[2] / "docs" / "graft.md").read_text()
    assert [name for name in QUALITIES if f'`"{name}"`' not in page] == []


def test_segmentation_model_grows_under_a_named_quality():
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    grower = grower_of(model, "1", noise(3, 2, 6, 5), quality="accuracy")
    x, y = noise(9, 2, 6, 5), classes(4, 9, 6, 5)
    report = grower.step([(x, y)])
    assert report.quality == pytest.approx((model.eval()(x).argmax(1) == y).float().mean().item())
