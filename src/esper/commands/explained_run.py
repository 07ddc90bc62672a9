"""Explanations of recorded decisions as plain data, for the page and the report. torch is loaded when needed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from esper.leyline.errors import EsperError
from esper.leyline.run_files import DECISIONS

MOST_OPERATIONS = 20
"""Maximum number of explained operations per environment, the first ones."""
MOST_INFLUENCES = 10
"""Maximum number of features of an explained operation, those with the largest effects."""


def explain_run(path: Path, env: int | None) -> dict[str, Any] | None:
    """Return the explained operations of an environment, or with None the importance of every feature.

    None if the run has no recorded decisions. If they cannot be read, `damage` says why.
    """
    if not (path / DECISIONS).is_file():
        return None
    from esper.tamiyo.decision_record import DecisionRecord
    from esper.tamiyo.explanation import explain, importances, operations

    try:
        record = DecisionRecord.load(path)
        if env is None:
            rows = [importance.as_row() for importance in importances(record)]
            return {"decisions": int(record.lengths.sum()), "episode": record.facts.episode, "rows": rows}
        steps = operations(record, env)
        explained = [asdict(explain(record, env, step)) for step in list(steps)[:MOST_OPERATIONS]]
    except EsperError as error:
        return {"damage": str(error)}
    for each in explained:
        del each["influences"][MOST_INFLUENCES:]
    is_recorded = env < len(record.facts.worlds)
    return {"episode": record.facts.episode, "is_recorded": is_recorded, "all": len(steps), "rows": explained}
