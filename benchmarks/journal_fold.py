"""Time and memory to open a journal; by default a synthetic one of a million events."""

from __future__ import annotations

import argparse
import math
import random
import resource
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from esper.karn.document import document
from esper.karn.run_state import RunState
from esper.leyline.events import Decision, Episode, Event, Gradient, Lifecycle, RunStarted, SeedWorth, Step, Update
from esper.nissa.record import Record, line

SLOTS = ("r0c0", "r0c1", "r0c2")
ENVS, STEPS = 16, 40


def events() -> Iterator[Event]:
    """Yield an endless training run in the proportions of a real one: per 100 events about 40 steps, 20 worths,
    20 gradients, 12 moves and 5 decisions."""
    rng = random.Random(0)
    names = tuple(f"env {e}" for e in range(ENVS))
    yield RunStarted(command="train", task="sim", controller="tamiyo", seed=0, env_names=names, slots=SLOTS,
                     steps=STEPS, rounds=10**6, host_params=6_274)  # fmt: skip
    episode = 0
    while True:
        episode += 1
        for step in range(1, STEPS + 1):
            for env in range(ENVS):
                yield from _step(env, episode, step, rng)
        for env in range(ENVS):
            yield Episode(env=env, episode=episode, world=env, name=names[env], steps=STEPS, quality=rng.random(),
                          quality_best=0.9, params=7_000, host_params=6_274, germinated=2, fossilized=1, pruned=1,
                          structure={SLOTS[0]: "norm"})  # fmt: skip
        yield Update(round=episode, epochs=3, minibatches=12, policy_loss=0.1, value_loss=0.1, entropy_loss=0.1,
                     kl=0.01, clip_fraction=0.1, ratio_min=0.9, ratio_max=1.1, explained_variance=0.5, value_nrmse=0.5,
                     grad_norm=0.4, lr=3e-4, entropy={"op": 0.5, "slot": 0.4}, return_mean=rng.random())  # fmt: skip


def _step(env: int, episode: int, step: int, rng: random.Random) -> Iterator[Event]:
    slot = SLOTS[step % 3]
    place: dict[str, Any] = {"env": env, "episode": episode, "step": step}
    op = "GERMINATE" if step in (3, 20) else "PRUNE" if step in (15, 35) else "WAIT"
    if op != "WAIT":
        was, now = ("DORMANT", "GERMINATED") if op == "GERMINATE" else ("TRAINING", "PRUNED")
        yield Decision(**place, op=op, slot=SLOTS[0], blueprint="norm", happened=True, legal_ops=("WAIT", op),
                       entropy=rng.random(), value=0.1)  # fmt: skip
        for before, after, cause in ((was, now, "controller"), (now, "TRAINING", "rules"), ("TRAINING", now, "rules")):
            yield Lifecycle(**place, slot=SLOTS[0], seed=step // 20, blueprint="norm", was=before, now=after,
                            cause=cause, params=512, alpha=0.0, dwell_epochs=1)  # fmt: skip
    quality = 1 - math.exp(-step / 10) * rng.random()
    is_live = 3 <= step < 15 or 20 <= step < 35
    yield Step(**place, world=env, op=op, quality=quality, committed_quality=quality, val_loss=1 - quality,
               train_loss=1 - quality, reward=0.01, utility=0.1, value=0.1, params=7_000, train_macs=10**7 * step,
               stages=(2 if is_live else 0, 0, 0), alphas=(0.0, 0.0, 0.0),
               blueprints=("norm" if is_live else "", "", ""))  # fmt: skip
    if step % 2:
        yield SeedWorth(**place, slot=slot, seed=0, blueprint="norm", contribution=rng.random(), contribution_se=0.01)
        yield Gradient(**place, slot=slot, norm=0.1, ratio=0.2, health=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument(
        "--repeats", type=int, default=3, help="Number of times to open the journal; the fastest counts."
    )
    parser.add_argument("--keep", type=Path, help="Run directory to write and keep.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        path: Path = options.keep or Path(place) / "run"
        (path / "events").mkdir(parents=True)
        with (path / "events" / "rank0-00000.jsonl").open("wb") as file:
            for seq, event in enumerate(islice(events(), options.events)):
                file.write(line(Record(seq, 1e9 + seq / 1000, 0, event)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        wall = cpu = float("inf")
        for _ in range(options.repeats):
            wall_start, cpu_start = perf_counter(), process_time()
            run = RunState.of(path)
            content = document(run)
            wall, cpu = min(wall, perf_counter() - wall_start), min(cpu, process_time() - cpu_start)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{run.position:,} events: {cpu:.2f} s of CPU, {wall:.2f} s, {after:.0f} MB at most ({before:.0f} before)"
        )
        print(f"kinds: {run.kinds}; document of {len(str(content)):,} characters; {run.unreadable} unreadable")


if __name__ == "__main__":
    main()
