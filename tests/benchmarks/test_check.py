"""Test that `benchmarks.check` fails exactly when a ratio exceeds its stored value by more than the limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.check import RATIOS, figures, read, run_check
from esper.leyline.errors import DataError


def test_check_fails_only_beyond_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "ratios.json"
    assert run_check(file, repeats=3, update=True, measure=lambda n: {"a": 1.0, "b": 0.002})
    assert json.loads(file.read_text()) == {"a": 1.0, "b": 0.002}
    assert run_check(file, repeats=3, update=False, measure=lambda n: {"a": 1.14, "b": 0.0001})
    assert not run_check(file, repeats=3, update=False, measure=lambda n: {"a": 1.16, "b": 0.002})


def test_check_uses_the_median_of_repeats(tmp_path: Path) -> None:
    file = tmp_path / "ratios.json"
    stored = iter([0.8, 1.0, 1.3])
    run_check(file, repeats=3, update=True, measure=lambda n: {"a": next(stored)})
    assert json.loads(file.read_text()) == {"a": 1.0}
    moments = iter([1.5, 1.0, 1.05, 1.5])
    assert run_check(file, repeats=3, update=False, measure=lambda n: {"a": next(moments)})
    lasting = iter([1.5, 1.5, 1.5, 1.0])
    assert not run_check(file, repeats=3, update=False, measure=lambda n: {"a": next(lasting)})


def test_part_of_the_figures_leaves_the_others_as_stored(tmp_path: Path) -> None:
    file = tmp_path / "ratios.json"
    run_check(file, repeats=3, update=True, measure=lambda n: {"a": 1.0, "b": 2.0})
    assert run_check(file, repeats=3, update=True, whole=False, measure=lambda n: {"b": 3.0})
    assert json.loads(file.read_text()) == {"a": 1.0, "b": 3.0}
    assert run_check(file, repeats=3, update=False, whole=False, measure=lambda n: {"a": 1.0})
    assert not run_check(file, repeats=3, update=False, whole=False, measure=lambda n: {"a": 1.2})
    with pytest.raises(DataError, match="b"):
        run_check(file, repeats=3, update=False, measure=lambda n: {"a": 1.0})


def test_features_and_masks_are_compared_with_numpy_operations() -> None:
    assert set(figures(1, ["observations"])) <= set(read(RATIOS))


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"a": "x"}'])
def test_invalid_ratio_file_raises_data_error(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "ratios.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=r"ratios\.json"):
        run_check(file, repeats=3, update=False, measure=lambda n: {"a": 1.0})
