"""Hugging Face's Trainer with growth under torchrun: two gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ROOT

pytestmark = pytest.mark.slow
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
CASES = ["plain", "accumulation", "best", "reentrant checkpointing"]


def train(directory: Path, cases: list[str], ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Return the weights and the numbers of seeds of each rank, by case. The cases share their processes."""
    start = TORCHRUN if ranks == 2 else []
    command = [sys.executable, "-m", *start, "tests.support.hf_ranks", str(directory), *cases]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        case: [torch.load(directory / f"{case}-{rank}.pt", weights_only=True) for rank in range(ranks)]
        for case in cases
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return train(tmp_path_factory.mktemp("two"), [*CASES, "resumed"], 2)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return train(tmp_path_factory.mktemp("one"), CASES, 1)


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0.0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_the_weights_of_one_process(case: str, two: dict[str, Any], one: dict[str, Any]) -> None:
    """Reentrant checkpointing needs the settings of DDP that Trainer chooses for a model of transformers."""
    first, second = two[case]
    (alone,) = one[case]
    assert first["seeds"] == second["seeds"] == alone["seeds"] == [1, 2, 2]
    assert_close(first["state"], second["state"], 0.0)
    assert_close(first["state"], alone["state"], 2e-4)


def test_two_ranks_resume_bit_for_bit(two: dict[str, Any]) -> None:
    for straight, again in zip(two["plain"], two["resumed"], strict=True):
        assert again["seeds"] == [1, 2, 2]
        assert_close(straight["state"], again["state"], 0.0)
