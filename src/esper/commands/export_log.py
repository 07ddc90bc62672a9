"""`esper export-log`: send the journal of a run to an experiment tracker."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from esper.commands import plainly
from esper.leyline.errors import ConfigError
from esper.nissa.journal_rows import PORTION, OtherRow, follow
from esper.nissa.record import Record
from esper.nissa.run_list import manifest_of
from esper.nissa.sinks import TENSORBOARD, must_be_available, tracker_sink


def run_export_log(run: Path, to: str, out: Path | None) -> None:
    """Send every recorded event of a run to a tracker."""
    must_be_available([to])
    if out is not None and to != TENSORBOARD:
        raise ConfigError(f"--out is the directory of TensorBoard files; {to} chooses its own place. Remove --out")
    manifest, _ = manifest_of(run)
    where = (out or run / TENSORBOARD) if to == TENSORBOARD else None
    if where is not None and where.exists() and any(where.iterdir()):
        raise ConfigError(f"{where} is not empty; nothing is overwritten. Use --out to choose another directory")
    sink = tracker_sink(to, run, manifest, out=where, most_lag_s=None)
    count = 0
    follower = follow(run)
    try:
        while rows := follower.poll(PORTION):
            events = [row for row in rows if type(row) is not OtherRow]
            sink.write([Record(row.seq, row.time_s, row.rank, row, row.replaced) for row in events])
            count += len(events)
    finally:
        sink.close()
    plainly(Console(), f"{count} events of {run} sent to {to}" + ("" if where is None else f": {where}"))
