import time

import pytest

from esper.leyline.phases import Phases


def spin(ms: float) -> None:
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        pass


def test_a_phase_within_another_pauses_it_so_that_parts_add_up():
    phases = Phases()
    start = time.perf_counter()
    with phases("validate"):
        spin(4)
        with phases("norms"):
            spin(8)
        spin(4)
    whole = (time.perf_counter() - start) * 1e3
    told = phases.totals()
    assert told["norms"].wall_ms >= 8
    assert told["validate"].wall_ms >= 8
    assert told["validate"].wall_ms + told["norms"].wall_ms == pytest.approx(whole, abs=1.0)


def test_waiting_is_wall_time_but_not_cpu_time():
    phases = Phases()
    with phases("telemetry"):
        time.sleep(0.03)
    told = phases.totals()["telemetry"]
    assert told.wall_ms >= 30
    assert told.cpu_ms < 15


def test_time_outside_all_phases_is_nobodys_and_errors_close_their_phase():
    phases = Phases()
    with pytest.raises(ValueError), phases("train"):
        raise ValueError
    spin(5)
    assert phases.totals()["train"].wall_ms < 5
    assert phases.totals()["train"].calls == 1


def test_totals_of_an_open_phase_count_what_has_passed():
    phases = Phases()
    with phases("train"):
        spin(5)
        assert phases.totals()["train"].wall_ms >= 5
