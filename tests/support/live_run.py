"""A synthetic run for the tests of the terminal view: valid events of invented growth.

python -m tests.support.live_run DIRECTORY --events-per-s 10      keeps appending, as a hub's sink would
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

from esper.leyline.checksums import seal_json
from esper.leyline.events import (
    Checkpoint,
    Decision,
    Episode,
    Gradient,
    Health,
    Lifecycle,
    RunFinished,
    RunStarted,
    SeedWorth,
    Step,
    Update,
)  # fmt: skip
from esper.leyline.stages import SeedStage
from esper.nissa.journal_reader import Entry, decoded_entry
from esper.nissa.record import Record, line

LIFE = [(2, "GERMINATED"), (4, "TRAINING"), (9, "BLENDING"), (13, "HOLDING"), (16, "FOSSILIZED")]
BLUEPRINTS = ["conv_light", "attention", "norm", "depthwise"]


def started(envs=4, slots=3, steps=30, rounds=2, names=None, **more):
    return RunStarted(
        run_id="r", command="esper train", task="digits", controller="tamiyo", seed=7,
        env_names=tuple(names or (f"digits/{i}" for i in range(envs))),
        slots=tuple(f"r{i // 5}c{i % 5}" for i in range(slots)), steps=steps, rounds=rounds, host_params=12_345, **more,
    )  # fmt: skip


def stage_at(step, slot):
    """Return the stage at a step: slot k germinates at step 2 + 3k; every fourth seed is pruned while it blends."""
    age = step - 3 * slot
    if slot % 4 == 3 and age >= 11:
        return SeedStage.PRUNED if age < 12 else SeedStage.EMBARGOED if age < 17 else SeedStage.DORMANT
    now = [SeedStage[name] for begin, name in LIFE if age >= begin]
    return now[-1] if now else SeedStage.DORMANT


def alpha_at(stage, step, slot):
    if stage == SeedStage.BLENDING:
        return (step - 3 * slot - 8) / 5
    return 1.0 if stage in (SeedStage.HOLDING, SeedStage.FOSSILIZED) else 0.0


def step_events(env, episode, t, slots, rng):
    """Return the events of one environment in one step."""
    was, now = ([stage_at(u, s) for s in range(slots)] for u in (t - 1, t))
    names = [f"r{i // 5}c{i % 5}" for i in range(slots)]
    prints = [BLUEPRINTS[(i + env) % 4] for i in range(slots)]
    op = "WAIT"
    for s in range(slots):
        if was[s] == now[s]:
            continue
        ops = {"GERMINATED": "GERMINATE", "BLENDING": "ADVANCE", "FOSSILIZED": "FOSSILIZE", "PRUNED": "PRUNE"}
        op = ops.get(now[s].name, op)
        if now[s].name in ops:
            yield Decision(env=env, episode=episode, step=t, op=op, slot=names[s], happened=True,
                           legal_ops=("WAIT", op), blueprint=prints[s] if op == "GERMINATE" else "",
                           style="LINEAR_ADD" if op == "GERMINATE" else "", entropy=0.7)  # fmt: skip
        worth = 0.012 + 0.004 * s if now[s] >= SeedStage.HOLDING else None
        yield Lifecycle(env=env, episode=episode, step=t, slot=names[s], seed=s, blueprint=prints[s], was=was[s].name,
                        now=now[s].name, cause="controller" if now[s].name in ops else "rules", params=512,
                        alpha=alpha_at(now[s], t, s), dwell_epochs=3, contribution=worth,
                        contribution_se=None if worth is None else 0.004)  # fmt: skip
    quality = 0.5 + 0.42 * (1 - math.exp(-t / 9)) + rng.gauss(0, 0.004) + 0.005 * env
    live = [s if s != SeedStage.DORMANT else SeedStage.DORMANT for s in now]
    yield Step(env=env, episode=episode, step=t, world=env, op=op, quality=min(0.999, quality),
               committed_quality=min(0.999, quality - 0.01), val_loss=1.2 * math.exp(-t / 12) + 0.2,
               train_loss=1.3 * math.exp(-t / 11) + 0.15, reward=rng.gauss(0.01, 0.02), utility=None,
               params=12_345 + 512 * sum(SeedStage.GERMINATED <= s <= SeedStage.FOSSILIZED for s in live),
               stages=tuple(int(s) for s in live), alphas=tuple(alpha_at(s, t, i) for i, s in enumerate(live)),
               blueprints=tuple(prints[i] if 0 < s <= 5 else "" for i, s in enumerate(live)))  # fmt: skip
    for s in range(slots):
        if now[s] in (SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED):
            yield SeedWorth(env=env, episode=episode, step=t, slot=names[s], seed=s, blueprint=prints[s],
                        contribution=rng.gauss(0.01, 0.006), contribution_se=0.004, shapley=rng.gauss(0.01, 0.004),
                        shapley_se=0.003, solo=0.008, solo_se=0.004, interaction=-0.001)  # fmt: skip
        elif now[s] == SeedStage.TRAINING:
            yield SeedWorth(env=env, episode=episode, step=t, slot=names[s], seed=s, blueprint=prints[s],
                        prospect=rng.gauss(0.008, 0.004), prospect_se=0.003)  # fmt: skip
        if SeedStage.GERMINATED <= now[s] <= SeedStage.HOLDING:
            yield Gradient(env=env, episode=episode, step=t, slot=names[s], norm=0.3, ratio=rng.uniform(0.3, 2),
                           health=rng.uniform(0.6, 1.0))  # fmt: skip


def ended(env, episode, steps, slots, name):
    return Episode(
        env=env, episode=episode, world=env, name=name, steps=steps,
        quality=min(0.99, 0.91 + 0.004 * env + 0.003 * episode), quality_best=min(0.99, 0.92 + 0.004 * env),
        test_quality=0.90, baseline_quality=0.89, params=13_881, host_params=12_345,
        germinated=slots, fossilized=slots // 2, pruned=1, wall_s=31.0,
        structure={"r0c0": "conv_light", "r0c1": "norm"},
    )  # fmt: skip


def update(round, **more):
    values = {
        "policy_loss": -0.011, "value_loss": 0.21, "entropy_loss": -0.8, "kl": 0.0121, "clip_fraction": 0.14,
        "ratio_min": 0.7, "ratio_max": 1.4, "explained_variance": 0.42, "value_nrmse": 0.74, "grad_norm": 0.93,
        "lr": 3e-4, "entropy": {"op": 0.71, "slot": 0.8, "blueprint": 0.9}, "wall_ms": 812.0, "return_mean": 0.21,
        "learnable": {"op": 0.8, "slot": 0.3, "blueprint": 0.1}, "return_sd": 0.08, "epochs": 4, "minibatches": 16,
    }  # fmt: skip
    return Update(round=round, **(values | more))


def run_events(envs=4, slots=3, steps=30, rounds=2, names=None, seed=0, ends=True):
    """Return the events of a whole run."""
    rng = random.Random(seed)
    first = started(envs, slots, steps, rounds, names)
    yield first
    for r in range(rounds):
        for t in range(1, steps + 1):
            for env in range(envs):
                yield from step_events(env, r, t, slots, rng)
        for env in range(envs):
            yield ended(env, r, steps, slots, first.env_names[env])
        yield update(r)
        yield Checkpoint(path=f"checkpoints/round-{r:04d}", reason="round", round=r, size_bytes=184_000, write_ms=4.0)
    if ends:
        yield Health(source="hub", severity="info", text="all written", counters={"coalesced": 0.0})
        yield RunFinished(status="finished", wall_s=61.0, env_steps=envs * steps * rounds)


def lines_of(events, at=1000.0, apart=0.1):
    return [line(Record(i, at + apart * i, 0, e)) for i, e in enumerate(events)]


def entries_of(events, at=1000.0, apart=0.1) -> list[Entry]:
    """Return events as a reader of the journal sees them, encoded and decoded."""
    entries = [decoded_entry(raw.rstrip(b"\n"), 0) for raw in lines_of(events, at, apart)]
    assert None not in entries
    return [e for e in entries if e is not None]


def write_run(path: Path, events, at=None, apart=0.1, status=None):
    """Write a run directory with a journal; with `status`, a manifest too."""
    (path / "events").mkdir(parents=True, exist_ok=True)
    events = list(events)
    at = time.time() - apart * len(events) if at is None else at
    if status:
        (path / "manifest.json").write_bytes(seal_json(json.dumps({"status": status}).encode()))
    (path / "events" / "rank0-00000.jsonl").write_bytes(b"".join(lines_of(events, at, apart)))
    return path


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--events-per-s", type=float, default=10.0)
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1000)
    args = parser.parse_args()
    (args.directory / "events").mkdir(parents=True, exist_ok=True)
    with (args.directory / "events" / "rank0-00000.jsonl").open("wb", buffering=0) as file:
        begin = time.time()
        for i, event in enumerate(run_events(args.envs, args.slots, args.steps, args.rounds)):
            time.sleep(max(0.0, begin + i / args.events_per_s - time.time()))
            file.write(line(Record(i, time.time(), 0, event)))


if __name__ == "__main__":
    main()
