"""Run directories with any manifest and journal, as somebody else may have written them."""

from __future__ import annotations

import json
from pathlib import Path

from esper.leyline.checksums import seal_json
from esper.nissa.journal_reader import segment_name
from esper.nissa.record import sealed

FINISHED = {"schema": 1, "run_id": "run", "task": "digits", "status": "finished"}


def entry(seq: int, kind: str = "health", *, rank: int = 0, time_s: float = 1.0, **data: object) -> bytes:
    result = json.dumps({"seq": seq, "time_s": time_s, "rank": rank, "kind": kind} | data)
    return sealed(result[:-1].encode())


def a_run(path: Path, *lines: bytes, **manifest: object) -> Path:
    (path / "events").mkdir(parents=True)
    (path / "manifest.json").write_bytes(seal_json(json.dumps(FINISHED | manifest).encode()))
    if lines:
        (path / "events" / segment_name(0, 0)).write_bytes(b"".join(lines))
    return path


ACTS = "\x1b]0;owned\x07\x9b31m\u202ereversed\u2028\r\n\t\x00\x7f"
"""Sets a terminal's title, its colour and its direction, and breaks the line."""


def run_with_control_characters(name: str) -> Path:
    """Return a run in which every text, name and kind contains terminal control characters."""
    place = {"env": 0, "episode": 0, "step": 1}
    lines = [
        entry(0, "run_started", run_id=ACTS, command=ACTS, task=ACTS, controller=ACTS, seed=1, env_names=[ACTS],
              slots=[ACTS], steps=3, rounds=1, host_params=5, threads=1, telemetry=ACTS, device=ACTS),
        entry(1, "step", **place, op=ACTS, quality=0.5, stages=[2], alphas=[0.1], blueprints=[ACTS], params=9),
        entry(2, "lifecycle", **place, slot=ACTS, blueprint=ACTS, was=ACTS, now=ACTS, cause=ACTS, alpha=0.1),
        entry(3, "decision", **place, op=ACTS, slot=ACTS, blueprint=ACTS, style=ACTS, legal_ops=[ACTS]),
        entry(4, "episode", env=0, episode=0, steps=3, quality=0.5, name=ACTS, structure={ACTS: ACTS}),
        entry(5, "health", source=ACTS, severity="error", text=ACTS, counters={ACTS: 1, "sink " + ACTS: 3}),
        entry(6, "governor", **place, alarm=ACTS, action=ACTS, value=1.0),
        entry(7, "phase_profile", phase=ACTS, wall_ms=1.0, cpu_ms=1.0, calls=1),
        entry(8, "update", round=0, epochs=1, kl=0.1, entropy={ACTS: 0.1}),
        entry(9, "worth", **place, slot=ACTS, contribution=0.1),
        entry(10, "checkpoint", path=ACTS, round=1),
        entry(11, ACTS, text=ACTS),
        entry(12, "run_finished", status=ACTS, error=ACTS, wall_s=1.0, env_steps=1),
    ]  # fmt: skip
    result = {"task": ACTS, "controller": ACTS, "status": ACTS, "error": ACTS, "command": ACTS, "started": ACTS}
    return a_run(Path(name), *lines, **result, config={ACTS: ACTS}, versions={"esper": ACTS})
