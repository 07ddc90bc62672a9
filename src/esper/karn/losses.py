"""Who missed what, by the hub's counters."""

from __future__ import annotations

import math

GIVEN_UP = ".given_up"


def missed_by_sinks(counters: object) -> dict[str, float]:
    """Sink → events that it never got because it was retired. They are in the journal all the same.

    The journal cannot say this of its own sink: what that one misses is a hole in the sequence numbers, or its end.
    """
    told = counters if isinstance(counters, dict) else {}
    return {
        str(name).removesuffix(GIVEN_UP): float(count)
        for name, count in told.items()
        if str(name).endswith(GIVEN_UP) and isinstance(count, int | float) and math.isfinite(count) and count > 0
    }
