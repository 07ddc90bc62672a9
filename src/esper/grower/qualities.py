"""Named qualities: one score per sample [B] from a model's output and the target, higher is better.

A quality is a function (output, target) → [B]. One that needs all targets of a validation pass first, such as `r2`, has
a method `fitted(targets)` that returns such a function.

Legend: B samples, C classes, P positions (tokens or pixels) of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from esper.leyline.errors import ConfigError, EsperError, unknown_name
from esper.tolaria.tasks import IGNORED, per_sample_correct, per_sample_loss

Quality = Callable[[Any, Any], Tensor]


@runtime_checkable
class NeedsTargets(Protocol):
    """A quality that needs every target of a validation pass before it can score a sample."""

    def fitted(self, targets: Iterable[Tensor]) -> Quality:
        """Return the function that scores samples of a validation pass with these targets."""
        ...


# -- classification


def accuracy(output: Any, target: Tensor, *, class_axis: int | None = None) -> Tensor:
    """Return the share of correct predictions per sample, from logits [B, C], [B, …, C] or [B, C, …].

    `class_axis` is the axis of the classes; by default it is inferred from the shapes.
    """
    return per_sample_correct(*_classes_last(_prediction(output), target, class_axis))


def log_probability(output: Any, target: Tensor, *, class_axis: int | None = None) -> Tensor:
    """Return the mean log-probability of the target per sample, from logits as for `accuracy`."""
    return -per_sample_loss(*_classes_last(_prediction(output), target, class_axis))


def next_token_accuracy(output: Any, target: Tensor) -> Tensor:
    """Return the accuracy of a causal language model whose labels are its inputs: each position predicts the next."""
    return accuracy(_prediction(output)[:, :-1], target[:, 1:], class_axis=-1)


def next_token_log_probability(output: Any, target: Tensor) -> Tensor:
    """Return the mean log-probability of the token after each position; labels as for `next_token_accuracy`."""
    return log_probability(_prediction(output)[:, :-1], target[:, 1:], class_axis=-1)


def pixel_accuracy(output: Any, target: Tensor) -> Tensor:
    """Return the share of correct pixels per sample, from logits [B, C, H, W] and classes [B, H, W]."""
    return accuracy(output, target, class_axis=1)


def mean_iou(output: Any, target: Tensor) -> Tensor:
    """Return the intersection over union of each sample, averaged over the classes in its target or prediction.

    The mean over samples is the per-image mean IoU. It differs from the IoU over all pixels of a data set, which is not
    a mean over samples. Shapes as for `pixel_accuracy`.
    """
    logits, target = _classes_last(_prediction(output), target, 1)  # [B, P, C], [B, P]
    counted = (target != IGNORED)[..., None]
    classes = torch.arange(logits.shape[-1], device=logits.device)
    predicted = (logits.argmax(-1)[..., None] == classes) & counted  # [B, P, C]
    expected = (target[..., None] == classes) & counted
    union = (predicted | expected).sum(1)  # [B, C]
    iou = (predicted & expected).sum(1) / union.clamp(min=1)
    mean = iou.sum(1) / (union > 0).sum(1)
    return torch.where(logits.isfinite().all(-1).all(-1), mean, torch.nan)


def multilabel_accuracy(output: Any, target: Tensor) -> Tensor:
    """Return the share of correct binary labels per sample, thresholded at logit 0; logits and labels of one shape."""
    logits, target = _same_shape(_prediction(output), target)
    right = torch.where(logits.isfinite(), ((logits > 0) == (target > 0.5)).float(), torch.nan)
    return right.flatten(1).mean(1)


# -- regression


def negative_mse(output: Any, target: Tensor) -> Tensor:
    """Return minus the mean squared error of each sample, from a prediction and a target of one shape."""
    values, target = _same_shape(_prediction(output), target)
    return -(values.float() - target.float()).square().flatten(1).mean(1)


class R2:
    """R², the coefficient of determination, as a score per sample: 1 − (mean squared error of the sample) / V.

    V is the variance of the targets of the validation pass, averaged over their elements, so the mean of the scores is
    R² (for several outputs, weighted by variance). A single score may be negative.
    """

    def fitted(self, targets: Iterable[Tensor]) -> Quality:
        """Return the function that scores samples by the variance of these targets."""
        rows = []
        for target in targets:
            if not isinstance(target, Tensor) or target.ndim == 0:
                raise ConfigError(
                    f"quality 'r2' takes tensors [B, …] as targets; got {described(target)}. Convert it with "
                    "torch.as_tensor, and add an axis for the batch if there is none"
                )
            rows.append(target.double().reshape(len(target), -1))
        widths = {row.shape[1] for row in rows}
        if len(widths) > 1:
            raise ConfigError(
                f"quality 'r2' takes targets with equally many values per sample; got {sorted(widths)}. Pad or cut "
                "them to one size, or use 'negative_mse'"
            )
        variance = float(torch.cat(rows).var(0, correction=0).mean()) if rows else 0.0
        if not variance > 0:
            raise ConfigError(
                f"quality 'r2' needs targets that differ; their variance is {variance:g}. Use more validation samples, "
                "or 'negative_mse'"
            )
        return lambda output, target: 1 + negative_mse(output, target) / variance


QUALITIES: dict[str, Quality | NeedsTargets] = {
    "accuracy": accuracy,
    "log_probability": log_probability,
    "next_token_accuracy": next_token_accuracy,
    "next_token_log_probability": next_token_log_probability,
    "pixel_accuracy": pixel_accuracy,
    "mean_iou": mean_iou,
    "multilabel_accuracy": multilabel_accuracy,
    "negative_mse": negative_mse,
    "r2": R2(),
}


def find_quality(quality: Any) -> Quality | NeedsTargets:
    """Return the quality of this name, or the given function; raise ConfigError for anything else."""
    if isinstance(quality, str):
        if quality not in QUALITIES:
            raise unknown_name("quality", quality, QUALITIES)
        return QUALITIES[quality]
    if not callable(quality) and not isinstance(quality, NeedsTargets):
        raise ConfigError(
            f"quality must be a function (output, target) → [B] or one of {', '.join(QUALITIES)}; got {quality!r}"
        )
    own: Quality | NeedsTargets = quality
    return own


def quality_name(quality: object) -> str:
    """Return the name in `QUALITIES`, or the qualified name of a user's function."""
    names = {id(each): name for name, each in QUALITIES.items()}
    return names.get(id(quality)) or str(getattr(quality, "__qualname__", type(quality).__name__))


def guarded(quality: Quality) -> Quality:
    """Wrap a quality so that its errors are raised as ConfigError with the shapes of its arguments."""

    def score(output: Any, target: Any) -> Tensor:
        try:
            return quality(output, target)
        except (EsperError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ConfigError(
                f"the quality {quality_name(quality)} fails with {type(error).__name__}: {error}. It was given output "
                f"{described(output)} and target {described(target)}. Assign a corrected one to grower.quality "
                "and repeat the call: nothing was changed."
            ) from error

    return score


def scored(
    val_batches: Iterable[Any],
    quality: Quality | NeedsTargets,
    gather: Callable[[list[Any]], list[Any]] = lambda targets: targets,
) -> tuple[Iterable[tuple[Any, Any]], Quality]:
    """Return validation batches as (inputs, target), and the function that scores them.

    `gather` returns the targets of all ranks, given those of this rank.
    """
    batches: Iterable[tuple[Any, Any]] = (split_batch(b) for b in val_batches)
    if not isinstance(quality, NeedsTargets):
        return batches, guarded(quality)
    batches = list(batches)  # iterated twice
    return batches, guarded(quality.fitted(gather([target for _, target in batches])))


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return inputs and target of a validation batch."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise ConfigError(
                f"a validation batch that is a mapping needs a key 'labels', it has {list(batch)}. Give (inputs, "
                "target) instead: in Lightning by GrowthCallback(unpack=...), in Trainer by overriding growth_batches"
            )
        return {k: v for k, v in batch.items() if k != "labels"}, batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"a validation batch is (inputs, target) or a mapping with 'labels', got {type(batch).__name__}"
        + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        + ". Pass a list of batches, such as grower.step([(inputs, target)])"
    )


# -- shapes


def _prediction(output: Any) -> Tensor:
    """Return the output's logits, or the output itself if it is a tensor."""
    logits = output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"a named quality takes a tensor, or an output with 'logits'; the model returns {described(output)}. "
            "Pass a function, such as quality=lambda output, target: esper.grower.qualities.accuracy(output[0], target)"
        )
    return logits


def _classes_last(logits: Tensor, target: Tensor, class_axis: int | None) -> tuple[Tensor, Tensor]:
    """Return logits [B, C] and classes [B], or [B, P, C] and [B, P], from any axis of the classes."""
    shapes = f"got logits {list(logits.shape)} and target {described(target)}"
    if not isinstance(target, Tensor) or target.is_floating_point() or target.dtype == torch.bool:
        raise ConfigError(
            f"this quality takes class indices as target; {shapes}. For yes/no labels use 'multilabel_accuracy', for "
            "values 'negative_mse' or 'r2'"
        )
    fitting = [a for a in ((1, -1) if class_axis is None else (class_axis,)) if _fits(logits, target, a)]
    if not fitting:
        expected = "logits [B, C] and target [B], or [B, C, …] or [B, …, C] and [B, …]"
        if class_axis == 1:
            expected = "logits [B, C, H, W] and target [B, H, W]"
        raise ConfigError(f"this quality takes {expected}; {shapes}. {_class_shape_hint(logits, target)}")
    if len(fitting) == 2 and logits.ndim > 2:
        raise ConfigError(
            f"axis 1 and the last axis of the logits could both be the classes: {shapes}. Choose one: "
            "quality=functools.partial(esper.grower.qualities.accuracy, class_axis=1), or -1"
        )
    logits = logits.movedim(fitting[0], -1)
    classes = logits.shape[-1]
    if classes == 1:
        raise ConfigError(f"there is only one class: {shapes}. For one yes/no logit use 'multilabel_accuracy'")
    outside = target[((target < 0) | (target >= classes)) & (target != IGNORED)]
    if outside.numel():  # sync: once per scored batch; such a target would count as wrong, or crash a CUDA kernel
        raise ConfigError(
            f"target contains class {int(outside[0])}, but the logits have {classes} classes: 0 to {classes - 1}. "
            f"Number the classes from 0, or widen the output; use {IGNORED} for targets to ignore"
        )
    if target.ndim == 1:
        return logits, target.long()
    return logits.flatten(1, -2), target.flatten(1).long()


def _class_shape_hint(logits: Tensor, target: Tensor) -> str:
    """Return how to make logits and class indices fit."""
    if target.shape == logits.shape:
        return "If the target is one-hot, pass target.argmax(1)"
    if target.ndim == logits.ndim and target.shape[1] == 1:
        return "Remove the target's axis of size 1: target.squeeze(1)"
    if target.ndim == logits.ndim - 1 and target.shape[:1] == logits.shape[:1]:
        return "Resize the output or the target to the same positions, for example with torch.nn.functional.interpolate"
    return "Reshape one of them, or give your own function (output, target) → [B]"


def _fits(logits: Tensor, target: Tensor, class_axis: int) -> bool:
    if logits.ndim != target.ndim + 1 or logits.ndim < 2:
        return False
    sizes = list(logits.shape)
    del sizes[class_axis]
    return sizes == list(target.shape)


def _same_shape(values: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as [B, …]; [B] and [B, 1] count as the same shape, which broadcasting would expand to [B, B]."""
    if isinstance(target, Tensor):
        values, target = (x[:, None] if x.ndim == 1 else x for x in (values, target))
        if values.ndim > 1 and values.shape == target.shape:
            return values, target
    raise ConfigError(
        f"this quality takes a prediction and a target of one shape [B, …]; got {list(values.shape)} and "
        f"{described(target)}. Reshape one of them, for example with output.squeeze(-1) or target.view_as(output)"
    )


def described(value: Any) -> str:
    """Return a description of type and shapes of an output or a target, for error messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {described(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} ({', '.join(described(each) for each in value)})"
    return "None" if value is None else f"a {type(value).__name__}"
