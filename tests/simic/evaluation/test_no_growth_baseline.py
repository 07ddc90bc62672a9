"""No-growth baselines: cached curves equal computed ones, every input is part of the key, damage is detected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from esper.simic.env import HostBackend
from esper.simic.evaluation import no_growth_baseline as module
from esper.simic.evaluation.no_growth_baseline import NoGrowthBaselines, ingredients
from esper.tamiyo.controllers import wait_everywhere
from esper.tolaria.data import Split
from esper.tolaria.engine_config import EngineConfig, GovernorConfig
from esper.tolaria.reproducibility import code_hash, syntax_without_prose
from esper.tolaria.tasks import get_task
from tests.support.fork_server import exit_codes, start

TASK = replace(get_task("digits"), epochs=3, batches_per_epoch=4)
DATA = TASK.load_data()


def baselines(directory: Path | None = None, **changes: Any) -> NoGrowthBaselines:
    settings = {"task": TASK, "data": DATA, "config": EngineConfig()} | changes
    return NoGrowthBaselines(
        settings["task"], settings["data"], settings["config"], [] if directory is None else [directory]
    )


def test_baseline_is_its_world_with_wait_only() -> None:
    worlds = [4, 0, 9]
    backend = HostBackend(TASK, data=DATA)
    backend.reset(worlds)
    played = []
    for _ in range(TASK.epochs):
        backend.step(wait_everywhere(3))
        played.append(backend.table.quality.copy())
        np.testing.assert_array_equal(backend.baseline_quality, backend.table.quality)
    np.testing.assert_array_equal(baselines().curves(worlds), np.stack(played, axis=1))


def test_curves_are_per_world_in_the_requested_order() -> None:
    trained = baselines()
    curves = trained.curves([2, 1, 2])
    assert curves.shape == (3, TASK.epochs)
    np.testing.assert_array_equal(curves[0], curves[2])
    assert (curves[0] != curves[1]).any()
    np.testing.assert_array_equal(trained.curves([1])[0], curves[1])


def test_curve_on_disk_equals_the_computed_curve(tmp_path: Path) -> None:
    computed = baselines(tmp_path).curves([1, 0])
    again = baselines(tmp_path)
    again.on_progress = lambda *_: pytest.fail("nothing was to be trained")
    np.testing.assert_array_equal(again.curves([1, 0]), computed)


def test_non_finite_curve_survives_the_disk(tmp_path: Path) -> None:
    one = baselines(tmp_path)
    one.cached[0] = [0.5, float("nan"), float("inf")]
    one._write(0)
    np.testing.assert_array_equal(baselines(tmp_path).curves([0])[0], one.cached[0])


def test_progress_counts_only_what_must_be_trained(tmp_path: Path) -> None:
    baselines(tmp_path).curves([0])
    result: list[tuple[int, int]] = []
    one = baselines(tmp_path)
    one.on_progress = lambda done, of: result.append((done, of))
    one.curves([0, 1, 2, 1])
    assert result == [(0, 2), (1, 2), (2, 2)]
    one.curves([2, 1])
    assert len(result) == 3


TASK_CHANGES = {
    "lr": 0.04, "momentum": 0.8, "weight_decay": 0.01, "batch": 16, "batches_per_epoch": 5, "epochs": 4, "clip": 0.5,
    "optimiser": "adamw", "host_kwargs": TASK.host_kwargs | {"width": 17}, "slots": ("r0c0",), "seed_lr": 0.01,
    "augment": True, "dataset": "other", "host": "cnn", "name": "other", "val_size": 100,
    "lr_schedule": "wsd", "warmup_epochs": 2.0, "decay_share": 0.5, "shrink": 2,
    "samples": 50, "label_noise": 0.5, "data_seed": 1, "blueprints": ("norm",),
}  # fmt: skip
ENGINE_CHANGES = {
    "incubation": "straight_through", "shadow_every": 3, "gradient_telemetry_stride": 5, "ema_decay": 0.9,
    "compile": True, "governor": GovernorConfig(patience=2),
}  # fmt: skip
DATA_CHANGES = {
    "sha256": "0" * 64,
    "val": Split(DATA.val.x[:100], DATA.val.y[:100]),
    "train": Split(DATA.train.x[:100], DATA.train.y[:100]),
}


def test_table_of_changes_covers_every_setting() -> None:
    fields = set(type(TASK).__slots__) - set(module._NO_BITS)
    assert fields == TASK_CHANGES.keys()
    assert {f.name for f in msgspec.structs.fields(EngineConfig)} - {"device", "strategy"} == ENGINE_CHANGES.keys()


@pytest.mark.parametrize("name", TASK_CHANGES)
def test_another_task_has_another_key(name: str) -> None:
    assert baselines(task=replace(TASK, **{name: TASK_CHANGES[name]})).key() != baselines().key()


@pytest.mark.parametrize("name", ENGINE_CHANGES)
def test_another_engine_has_another_key(name: str) -> None:
    config = msgspec.structs.replace(EngineConfig(), **{name: ENGINE_CHANGES[name]})
    assert baselines(config=config).key() != baselines().key()


@pytest.mark.parametrize("name", DATA_CHANGES)
def test_other_data_have_another_key(name: str) -> None:
    assert baselines(data=replace(DATA, **{name: DATA_CHANGES[name]})).key() != baselines().key()


def test_threads_and_torch_settings_change_the_key() -> None:
    key, threads, precision = baselines().key(), torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(threads + 1)
        assert baselines().key() != key
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("medium" if precision != "medium" else "high")
        assert baselines().key() != key
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    assert baselines().key() == key


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch, "__version__", "9.9.9"),
        (module, "code_hash", lambda: "other code"),
        (module, "processor", lambda _: ["another processor"]),
    ],
)
def test_another_torch_code_or_processor_has_another_key(
    owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = baselines().key()
    monkeypatch.setattr(owner, name, value)
    assert baselines().key() != key


def test_code_that_trains_hosts_is_part_of_the_key() -> None:
    assert ingredients(TASK, DATA, EngineConfig())["code"] == code_hash()
    assert len(code_hash()) == 64


def test_description_of_a_task_does_not_change_its_key() -> None:
    assert baselines(task=replace(TASK, question="something else?")).key() == baselines().key()


def damaged_texts(text: str) -> dict[str, str]:
    result = json.loads(text)
    other = dict(result, quality=[result["quality"][0] + 0.1, *result["quality"][1:]])
    return {
        "empty": "",
        "truncated": text[: len(text) // 2],
        "another number": json.dumps(other),
        "a number left out": json.dumps(dict(result, quality=result["quality"][:-1])),
        "not numbers": json.dumps(dict(result, quality=["a"])),
        "no checksum": json.dumps({"quality": result["quality"]}),
        "a list": "[1, 2]",
        "null": "null",
    }


@pytest.mark.parametrize("damage", list(damaged_texts('{"quality": [1.0, 2.0], "sha256": ""}')))
def test_damaged_file_is_recomputed_with_a_warning(damage: str, tmp_path: Path) -> None:
    first = baselines(tmp_path)
    curve = first.curves([0])
    file = first.directories[0] / "0.json"
    assert file is not None
    whole = file.read_text()
    file.write_text(damaged_texts(whole)[damage])
    with pytest.warns(UserWarning, match=r"baseline of world 0 .* is damaged"):
        np.testing.assert_array_equal(baselines(tmp_path).curves([0]), curve)
    assert file.read_text() == whole


def test_runs_share_curves_and_keep_copies_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = NoGrowthBaselines(TASK, DATA, EngineConfig(), [tmp_path / "one", tmp_path / "shared"])
    curve = first.curves([0])
    monkeypatch.setattr(module, "trained", None)  # nothing may be trained again
    second = NoGrowthBaselines(TASK, DATA, EngineConfig(), [tmp_path / "two", tmp_path / "shared"])
    np.testing.assert_array_equal(second.curves([0]), curve)
    alone = NoGrowthBaselines(TASK, DATA, EngineConfig(), [tmp_path / "two"])
    np.testing.assert_array_equal(alone.curves([0]), curve)


def test_curve_of_another_world_is_not_used(tmp_path: Path) -> None:
    first = baselines(tmp_path)
    first.curves([0, 1])
    zero, one = (first.directories[0] / f"{world}.json" for world in (0, 1))
    assert zero is not None
    assert one is not None
    zero.write_bytes(one.read_bytes())
    with pytest.warns(UserWarning, match="damaged"):
        np.testing.assert_array_equal(baselines(tmp_path).curves([0]), first.curves([0]))


def test_unwritable_directory_falls_back_to_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one = baselines(tmp_path / "file")
    with pytest.warns(UserWarning, match="cannot write the baseline"):
        assert np.isfinite(one.curves([0])).all()


def _train(directory: str, worlds: list[int]) -> None:
    torch.set_num_threads(1)
    baselines(Path(directory)).curves(worlds)


@pytest.mark.slow
def test_two_processes_sharing_a_directory_lose_nothing(tmp_path: Path) -> None:
    assert exit_codes([start(_train, str(tmp_path), worlds) for worlds in ([0, 1, 2, 3], [3, 2, 5, 4])]) == [0, 0]
    cached = baselines(tmp_path)
    cached.on_progress = lambda *_: pytest.fail("nothing was to be trained")
    np.testing.assert_array_equal(cached.curves(range(6)), baselines().curves(range(6)))
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("source", "is_same"),
    [
        ('# other comment\ndef f(x):\n    """Other text."""\n\n    return x + 1\n', True),
        ("def f(x):\n    return x + 1  # why\n", True),
        ("def f(x):\n    return x + 2\n", False),
        ("def f(x, y=0):\n    return x + 1\n", False),
    ],
)
def test_code_hash_ignores_comments_and_docstrings_only(source: str, is_same: bool) -> None:
    first = 'def f(x):\n    """Text."""\n    return x + 1\n'
    assert (syntax_without_prose(source) == syntax_without_prose(first)) == is_same
