"""When checkpoints are due, and when they are postponed."""

import pytest

from esper.leyline.events import NullReceiver
from esper.tolaria import checkpoint_schedule
from esper.tolaria.checkpoint_schedule import CheckpointSchedule


class Journal(NullReceiver):
    """A journal that is on disk or not."""

    def __init__(self, *, flushes: bool, has_lost: bool = False) -> None:
        self.flushes = flushes
        self.has_lost = has_lost

    def flush(self) -> bool:
        return self.flushes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock whose time is its last entry."""
    times = [0.0]
    monkeypatch.setattr(checkpoint_schedule.time, "monotonic", lambda: times[-1])
    return times


def test_cost_of_the_last_checkpoint_delays_the_next(clock: list[float]) -> None:
    schedule = CheckpointSchedule(NullReceiver(), share=0.1)
    assert schedule.is_due()
    clock.append(2.0)  # the checkpoint took 2 s, so the next one is due 20 s after its end
    schedule.record()
    clock.append(21.9)
    assert not schedule.is_due()
    assert schedule.is_due(always=True)
    clock.append(22.0)
    assert schedule.is_due()


def test_checkpoint_that_is_not_recorded_is_due_again(clock: list[float]) -> None:
    schedule = CheckpointSchedule(NullReceiver(), share=0.1)
    assert schedule.is_due()
    clock.append(2.0)
    assert schedule.is_due()


def test_share_of_1_makes_every_checkpoint_due(clock: list[float]) -> None:
    schedule = CheckpointSchedule(NullReceiver(), share=1)
    assert schedule.is_due()
    clock.append(5.0)
    schedule.record()
    assert schedule.is_due()


@pytest.mark.parametrize(
    ("journal", "flushed"),
    [
        (NullReceiver(), True),
        (Journal(flushes=True), True),
        (Journal(flushes=False), False),
        (Journal(flushes=False, has_lost=True), True),
    ],
)
def test_journal_is_flushed_or_has_lost_its_events(journal: NullReceiver, flushed: bool) -> None:
    assert CheckpointSchedule(journal, share=1).flush() is flushed


def test_checkpoint_without_its_journal_is_postponed_unless_it_is_the_last(recwarn: pytest.WarningsRecorder) -> None:
    schedule = CheckpointSchedule(NullReceiver(), share=1)
    assert schedule.is_possible(True)
    assert schedule.is_possible(False, always=True)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="this checkpoint is postponed"):
        assert not schedule.is_possible(False)
