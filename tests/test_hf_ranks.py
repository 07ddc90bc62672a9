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


def train(directory: Path, case: str, ranks: int) -> list[dict[str, Any]]:
    """Return the weights and the numbers of seeds of each rank."""
    directory.mkdir(exist_ok=True)
    start = TORCHRUN if ranks == 2 else []
    command = [sys.executable, "-m", *start, "tests.support.hf_ranks", str(directory), case]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(directory / f"{case}-{rank}.pt", weights_only=True) for rank in range(ranks)]


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0.0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("case", ["plain", "accumulation", "best", "reentrant checkpointing"])
def test_two_ranks_train_the_weights_of_one_process(case: str, tmp_path: Path) -> None:
    """Reentrant checkpointing needs the settings of DDP that Trainer chooses for a model of transformers."""
    first, second = train(tmp_path / "two", case, 2)
    (alone,) = train(tmp_path / "one", case, 1)
    assert first["seeds"] == second["seeds"] == alone["seeds"] == [1, 2, 2]
    assert_close(first["state"], second["state"], 0.0)
    assert_close(first["state"], alone["state"], 2e-4)


def test_two_ranks_resume_bit_for_bit(tmp_path: Path) -> None:
    plain, resumed = train(tmp_path, "plain", 2), train(tmp_path, "resumed", 2)
    for straight, again in zip(plain, resumed, strict=True):
        assert again["seeds"] == [1, 2, 2]
        assert_close(straight["state"], again["state"], 0.0)
