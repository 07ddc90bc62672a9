"""Events missed by individual sinks, according to the hub's counters."""

from __future__ import annotations

import math

GIVEN_UP = ".given_up"


def missed_by_sinks(counters: object) -> dict[str, float]:
    """Return sink → events it did not receive because it was retired. The journal still has them.

    Events missing from the journal itself appear as gaps in its sequence numbers, or at its end.
    """
    totals = counters if isinstance(counters, dict) else {}
    return {
        str(name).removesuffix(GIVEN_UP): float(count)
        for name, count in totals.items()
        if str(name).endswith(GIVEN_UP) and isinstance(count, int | float) and math.isfinite(count) and count > 0
    }
