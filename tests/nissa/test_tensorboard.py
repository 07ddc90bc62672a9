"""TensorBoard files can be read back, and their step axes are monotonic."""

import math
import subprocess
import sys

import pytest

from esper.leyline.errors import EsperError
from esper.leyline.events import SeedWorth
from esper.nissa.hub import NissaHub
from esper.nissa.record import Record
from esper.nissa.sinks import Scalars, TensorBoardSink
from tests.support.trackers import EPISODE, STARTED, loaded, step, update


def test_tensorboard_reads_back_what_was_emitted(tmp_path):
    with NissaHub([TensorBoardSink(tmp_path)]) as hub:
        hub.emit(STARTED)
        for i in range(1, 4):
            hub.emit(step(step=i, quality=i / 4))
        hub.emit(SeedWorth(env=0, episode=0, step=3, slot="r0c1", seed=0, blueprint="b", contribution=0.5))
        hub.emit(update(0, entropy={"op": 0.75, "slot": None}, learnable={"op": 0.25}))
        hub.emit(EPISODE)
    scalars = loaded(tmp_path)
    assert scalars["env0/quality"] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert scalars["env0/params"] == [(1, 10.0), (2, 10.0), (3, 10.0)]
    assert scalars["env0/alpha/r0c1"] == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert scalars["env0/contribution/r0c1"] == [(3, 0.5)]
    assert scalars["update/kl"] == [(1, 0.5)]
    assert scalars["update/entropy/op"] == [(1, 0.75)]
    assert scalars["update/learnable/op"] == [(1, 0.25)]
    assert math.isnan(scalars["episode/quality"][0][1])
    assert scalars["episode/baseline_quality"] == [(1, 0.25)]
    absent = {"env0/train_loss", "env0/alpha/r0c0", "update/entropy/slot", "episode/test_quality"}
    assert not absent & scalars.keys()


def test_each_environment_has_a_monotonic_axis():
    scalars = Scalars()
    worth = {"slot": "a", "seed": 0, "blueprint": "b", "contribution": 1.0}
    order = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (3, 1)]
    assert [scalars.of(step(0, *at))[0] for at in order] == [1, 2, 3, 4, 5, 6]
    assert scalars.of(SeedWorth(env=0, episode=3, step=1, **worth))[0] == 6
    assert scalars.of(SeedWorth(env=0, episode=1, step=2, **worth))[0] == 6  # late: it does not move the axis back
    assert scalars.of(step(1, 0, 1))[0] == 1
    assert [scalars.of(update(round))[0] for round in (0, 0, 5)] == [1, 2, 3]


def test_data_can_be_read_while_the_run_continues(tmp_path):
    hub = NissaHub([TensorBoardSink(tmp_path)])
    hub.emit(step())
    assert hub.flush()
    assert loaded(tmp_path)["env0/quality"] == [(1, 0.5)]
    hub.close()


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("tensorboard.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EsperError, match=r"esper-lite\[tensorboard\]"):
        TensorBoardSink(tmp_path)


def test_sinks_import_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys; from esper.nissa.sinks import TensorBoardSink; TensorBoardSink(sys.argv[1]).close();"
        "sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def test_close_is_idempotent(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write([Record(0, 0.0, 0, step())])
    sink.close()
    sink.close()
    assert loaded(tmp_path)["env0/quality"] == [(1, 0.5)]
