"""Growers and their reports as HTML, for notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterable

from esper.grower.explanations import SlotView
from esper.leyline.html import html_table

HEADER = ("slot", "stage", "blueprint", "alpha", "parameters", "contribution ± standard error", "waits for")


def grower_html(views: Iterable[SlotView], note: str) -> str:
    """Return the table of all slots, with a note below it."""
    rows = [
        (
            view.name,
            view.stage.name,
            view.blueprint,
            f"{view.alpha:.2f}" if view.blueprint else "",
            f"{view.params:,}" if view.blueprint else "",
            f"{view.contribution:+.4f} ± {view.contribution_se:.4f}" if math.isfinite(view.contribution) else "",
            view.waits_for,
        )
        for view in views
    ]
    return html_table("Grower", HEADER, rows, numbers=(3, 4, 5), note=note)
