"""The TensorBoard sink: the run's numbers as scalars, written without torch or TensorFlow."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esper.leyline.errors import EsperError
from esper.nissa.record import Record
from esper.nissa.sinks.scalars import Scalars


class TensorBoardSink:
    """Write one event file in `directory`, passed to the system with every batch."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event as TbEvent  # type: ignore[import, unused-ignore]
            from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import, unused-ignore]
            from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import, unused-ignore]
        except ImportError as error:
            raise EsperError(
                f"the TensorBoard sink needs the package tensorboard ({error}). "
                "Install it with: pip install 'esper-lite[tensorboard]'"
            ) from error
        self._event, self._summary = TbEvent, Summary
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}.esper"  # the reader looks for tfevents
        self._file = path.open("xb")
        self._writer = RecordWriter(self._file)
        self._scalars = Scalars()
        self._write(TbEvent(wall_time=time.time(), file_version="brain.Event:2"))
        self._file.flush()

    def write(self, records: Sequence[Record]) -> None:
        """Write the scalars of these records."""
        for record in records:
            step, scalars = self._scalars.of(record.event)
            values = [
                self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items() if value is not None
            ]
            if values:
                self._write(self._event(wall_time=record.time_s, step=step, summary=self._summary(value=values)))
        self._file.flush()

    def close(self) -> None:
        """Close the event file. Idempotent."""
        if not self._file.closed:
            self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
