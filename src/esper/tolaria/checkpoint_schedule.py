"""When a run writes a checkpoint: as often as a share of its time allows, with the journal on disk first.

    schedule = CheckpointSchedule(hub, share=0.01)
    if schedule.is_due() and schedule.is_possible(schedule.flush()):
        write_checkpoint()
        schedule.record()      # its cost determines when the next one is due

`esper train` and `esper grow` both use it; `checkpoint.py` writes the files.
"""

from __future__ import annotations

import math
import time
import warnings

from esper.leyline.events import EventReceiver


class CheckpointSchedule:
    """Limits the time that a run spends on checkpoints, and postpones one whose journal would have a gap.

    hub    the journal of the run; a receiver without `flush` has nothing to write
    share  maximum share of the time spent on checkpoints, in (0, 1]; with 1 every checkpoint is due
    """

    def __init__(self, hub: EventReceiver, share: float) -> None:
        self.hub = hub
        self.share = share
        self._started = 0.0  # of the last checkpoint, as the next two
        self._ended = -math.inf
        self._cost_s = 0.0

    def is_due(self, *, always: bool = False) -> bool:
        """Return whether another checkpoint keeps to the share. The clock of its cost starts here."""
        self._started = time.monotonic()
        return always or self.share == 1 or (self._started - self._ended) * self.share >= self._cost_s

    def flush(self) -> bool:
        """Return whether all events so far are on disk or permanently lost: no later checkpoint could have more."""
        flush = getattr(self.hub, "flush", None)
        return flush is None or bool(flush()) or bool(getattr(self.hub, "has_lost", False))

    def is_possible(self, flushed: bool, *, always: bool = False) -> bool:
        """Return whether a checkpoint may be written now; warn that it is postponed if the journal is not on disk."""
        if flushed or always:
            return True
        warnings.warn("the journal cannot be flushed to disk; this checkpoint is postponed", stacklevel=3)
        return False

    def record(self) -> None:
        """Record the end of a checkpoint that was due. The next one is due when its cost is within the share."""
        self._ended = time.monotonic()
        self._cost_s = self._ended - self._started
