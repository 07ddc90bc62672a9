import pytest

from esper.tolaria import rollout as phases_module
from esper.tolaria.rollout import PhaseTimers


class Clock:
    """Fake wall and CPU clocks that a test advances."""

    def __init__(self) -> None:
        self.wall_ms = 0.0
        self.cpu_ms = 0.0

    def work(self, ms: float) -> None:
        self.wall_ms += ms
        self.cpu_ms += ms

    def wait(self, ms: float) -> None:
        self.wall_ms += ms


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(phases_module, "perf_counter_ns", lambda: round(clock.wall_ms * 1e6))
    monkeypatch.setattr(phases_module, "thread_time_ns", lambda: round(clock.cpu_ms * 1e6))
    return clock


def test_nested_phase_pauses_the_outer_phase(clock):
    phases = PhaseTimers()
    with phases("validate"):
        clock.work(4)
        with phases("norms"):
            clock.work(8)
        clock.work(5)
    assert phases.totals() == {"validate": (9, 9, 1), "norms": (8, 8, 1)}


def test_waiting_is_wall_time_but_not_cpu_time(clock):
    phases = PhaseTimers()
    with phases("telemetry"):
        clock.work(2)
        clock.wait(30)
    assert phases.totals() == {"telemetry": (32, 2, 1)}


def test_time_outside_phases_is_not_counted_and_errors_close_phases(clock):
    phases = PhaseTimers()
    with pytest.raises(ValueError), phases("train"):
        raise ValueError
    clock.work(5)
    assert phases.totals() == {"train": (0, 0, 1)}


def test_totals_include_open_phases(clock):
    phases = PhaseTimers()
    with phases("train"):
        clock.work(5)
        assert phases.totals() == {"train": (5, 5, 1)}


def test_phases_read_the_system_clocks():
    phases = PhaseTimers()
    with phases("train"):
        sum(range(100_000))
    total = phases.totals()["train"]
    assert total.wall_ms > 0
    assert total.cpu_ms > 0
