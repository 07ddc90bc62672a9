"""Run directories as a real run writes them, with exactly known content."""

import json
import math
import random
from pathlib import Path

from msgspec.structs import replace

from esper.leyline.checksums import seal_json
from esper.leyline.events import (
    Checkpoint,
    Decision,
    Episode,
    GovernorAlarm,
    Health,
    Lifecycle,
    PhaseProfile,
    RunFinished,
    RunStarted,
    SeedWorth,
    Step,
    Update,
)
from esper.leyline.stages import SeedStage as Stage
from esper.nissa.record import Record, line

SLOTS = ("r0c0", "r0c1", "r1c0")
LIFE = (  # slot, blueprint, epoch of germination, epochs in training / blending / holding, how it ends
    (0, "conv_light", 3, (8, 5, 4), Stage.FOSSILIZED),
    (1, "norm", 10, (6, 5, 3), Stage.PRUNED),
    (2, "attention", 16, (7, 8, 60), Stage.HOLDING),
)
HEADS = ("slot", "blueprint", "style", "tempo", "op")


class Journal:
    """A run directory that is written one event at a time."""

    def __init__(self, path: Path, *, status="finished", start_s=1_763_245_000.0, **manifest):
        self.path, self.seq, self.time_s = path, 0, start_s
        (path / "events").mkdir(parents=True)
        first = {
            "schema": 2,
            "run_id": path.name,
            "status": status,
            "started": "2025-11-15T22:16:40Z",
            "versions": {"esper": "0.1.0", "python": "3.11", "torch": "2.13"},
            "config": {"task": {"name": "rescue", "batch": 64}, "rules": {"thresholds": {"z": 2.5}}, "seed": 1},
        }
        (path / "manifest.json").write_bytes(seal_json(json.dumps(first | manifest).encode()))
        self.file = (path / "events" / "rank0-00000.jsonl").open("wb")

    def write(self, event, *, lose=0):
        self.seq += lose
        self.file.write(line(Record(self.seq, self.time_s, 0, event)))
        self.seq += 1
        self.time_s += 0.013

    def close(self):
        self.file.close()
        return self.path


STARTED = RunStarted(run_id="sample", command="esper grow --task rescue", task="rescue", controller="heuristic", seed=1,
                     env_names=("grown",), slots=SLOTS, steps=40, host_params=1_234)  # fmt: skip
STEP = Step(env=0, episode=0, step=1, world=1, op="WAIT", quality=0.5, committed_quality=0.5, val_loss=1.0,
            train_loss=1.1, params=1_234, stages=(0, 0, 0), alphas=(0.0,) * 3, blueprints=("", "", ""))  # fmt: skip
MOVE = Lifecycle(env=0, episode=0, step=1, slot="r0c0", seed=0, blueprint="norm", was="", now="", cause="rules",
                 params=64, alpha=0.0, dwell_epochs=1)  # fmt: skip


def started(**changed):
    return replace(STARTED, **changed)


def step(n, **changed):
    return replace(STEP, step=n, **changed)


def moved(n, slot, was, now, *, dwell=1, **changed):
    return replace(MOVE, step=n, slot=slot, was=was.name, now=now.name, dwell_epochs=dwell, **changed)


def life_of(plan, epochs):
    """Return (stage, alpha) of one slot for each epoch."""
    _, _, birth, (training, blending, holding), end = plan
    course = [Stage.GERMINATED] + [Stage.TRAINING] * training + [Stage.BLENDING] * blending + [Stage.HOLDING] * holding
    course += [Stage.PRUNED] + [Stage.EMBARGOED] * 5 + [Stage.RESETTING] if end == Stage.PRUNED else [end] * epochs
    rows = [(Stage.DORMANT, 0.0)] * (birth - 1)
    for k, stage in enumerate(course):
        ramp = (k - training) / blending
        alpha = {Stage.BLENDING: ramp, Stage.HOLDING: 1.0, Stage.FOSSILIZED: 1.0}.get(stage, 0.0)
        rows.append((stage, round(alpha, 4)))
    return (rows + [(Stage.DORMANT, 0.0)] * epochs)[:epochs]


def grow_like(journal, env, name, *, episode=0, epochs=40, grows=True, skill=0.0, seed=0, decisions=True):
    """Write one episode as `esper grow` does: steps, decisions, lifecycles, worth, result."""
    rng = random.Random(1_000 * seed + 10 * env + episode)
    lives = [life_of(plan, epochs) if grows else [(Stage.DORMANT, 0.0)] * epochs for plan in LIFE]
    gains = (0.14, -0.01, 0.09)
    quality = best = 0.0
    counts = dict.fromkeys((Stage.GERMINATED, Stage.FOSSILIZED, Stage.PRUNED), 0)
    for n in range(1, epochs + 1):
        row = [life[n - 1] for life in lives]
        before = [life[n - 2] if n > 1 else (Stage.DORMANT, 0.0) for life in lives]
        names = tuple(
            LIFE[s][1] if Stage.GERMINATED <= stage <= Stage.FOSSILIZED else "" for s, (stage, _) in enumerate(row)
        )
        op = "WAIT"
        for s, ((was, _), (now, alpha)) in enumerate(zip(before, row, strict=True)):
            if was != now:
                counts[now] = counts.get(now, 0) + 1
                by_controller = now in (Stage.GERMINATED, Stage.PRUNED, Stage.FOSSILIZED)
                op = {Stage.GERMINATED: "GERMINATE", Stage.PRUNED: "PRUNE", Stage.FOSSILIZED: "FOSSILIZE"}.get(now, op)
                if by_controller and decisions:
                    journal.write(Decision(env=env, episode=episode, step=n, op=op, slot=SLOTS[s], happened=True,
                                           blueprint=LIFE[s][1] if op == "GERMINATE" else "", style="SIGMOID_ADD",
                                           legal_ops=("WAIT", op), entropy=0.4, value=0.1 * s))  # fmt: skip
                judged = 0.1 * s + 0.02 if by_controller and now != Stage.GERMINATED else None
                journal.write(moved(n, SLOTS[s], was, now, env=env, episode=episode, blueprint=LIFE[s][1], dwell=4,
                                    seed=s, alpha=alpha, cause="controller" if by_controller else "rules",
                                    contribution=judged, contribution_se=0.01 if judged else None))  # fmt: skip
        grown = sum(gain * alpha for gain, (_, alpha) in zip(gains, row, strict=True))
        base = 0.1 + (0.45 + skill) * (1 - math.exp(-n / 9))
        quality = min(0.99, base + grown + rng.gauss(0, 0.006))
        best = max(best, quality)
        live = any(a > 0 and st != Stage.FOSSILIZED for st, a in row)
        journal.write(
            step(
                n,
                env=env,
                episode=episode,
                quality=quality,
                committed_quality=base if live else quality,
                val_loss=2.3 * (1 - quality) + 0.1,
                train_loss=2.2 * (1 - quality) + rng.gauss(0, 0.02),
                op=op,
                stages=tuple(int(st) for st, _ in row),
                alphas=tuple(a for _, a in row),
                blueprints=names,
                params=1_234 + sum(300 * (s + 1) for s, b in enumerate(names) if b),
            )
        )
        for s, (stage, alpha) in enumerate(row):
            if Stage.TRAINING <= stage <= Stage.FOSSILIZED:
                worth = gains[s] * alpha + rng.gauss(0, 0.008)
                training = stage == Stage.TRAINING
                journal.write(SeedWorth(env=env, episode=episode, step=n, slot=SLOTS[s], seed=s, blueprint=LIFE[s][1],
                                    committed=stage == Stage.FOSSILIZED, contribution=None if training else worth,
                                    contribution_se=None if training else 0.011, interaction=0.004,
                                    shapley=None if training else worth * 0.9, shapley_se=None if training else 0.012,
                                    prospect=gains[s] * 0.6 + rng.gauss(0, 0.01) if training else None,
                                    prospect_se=0.012 if training else None))  # fmt: skip
    alive = {SLOTS[s]: LIFE[s][1] for s in range(3) if lives[s][-1][0] in (Stage.HOLDING, Stage.FOSSILIZED)}
    journal.write(Episode(env=env, episode=episode, world=1, name=name, steps=epochs, quality=quality,
                          quality_best=best, test_quality=quality - 0.007, test_loss=0.7, baseline_quality=0.53,
                          params=1_234 + 600 * len(alive), host_params=1_234, germinated=counts[Stage.GERMINATED],
                          fossilized=counts[Stage.FOSSILIZED], pruned=counts[Stage.PRUNED], structure=alive,
                          wall_s=21.5, utility=quality - 0.55, episode_return=quality - 0.5))  # fmt: skip


def phases(journal, scale=1.0):
    for name, wall, cpu, calls in (("train", 61_200, 60_100, 160), ("validate", 14_800, 14_700, 160),
                                   ("coalitions", 11_900, 11_700, 96), ("rules", 310, 300, 160),
                                   ("checkpoint", 120, 40, 3)):  # fmt: skip
        journal.write(PhaseProfile(phase=name, wall_ms=wall * scale, cpu_ms=cpu * scale, calls=calls))


def grow_run(path, *, controller="heuristic", seed=1, names=("grown", "no growth", "same structure from step 0", "wider host of equal size"), skill=0.0):  # fmt: skip  # noqa: E501
    """Write a finished `esper grow`: the grown host, and the hosts to compare it with."""
    journal = Journal(path)
    journal.write(started(run_id=path.name, controller=controller, seed=seed, env_names=names))
    for env, name in enumerate(names):
        grow_like(journal, env, name, grows=env == 0, skill=skill + (0, 0, 0.27, 0.12)[env % 4], seed=seed)
    journal.write(Checkpoint(path="checkpoints/final", reason="end", size_bytes=81_920, write_ms=12.5))
    phases(journal)
    journal.write(RunFinished(status="finished", wall_s=91.4, env_steps=160))
    return journal.close()


def train_run(path, *, envs=8, rounds=30, epochs=40, status="finished", clean=True):
    """Write a PPO run: many environments, many episodes, an update after each round."""
    journal = Journal(path, status=status)
    names = tuple(f"world {e}" for e in range(envs))
    journal.write(started(run_id=path.name, command="esper train", controller="tamiyo", env_names=names, rounds=rounds,
                          steps=epochs))  # fmt: skip
    for r in range(rounds):
        for env in range(envs):
            skill = 0.15 * r / rounds + 0.02 * env / envs
            grow_like(journal, env, names[env], episode=r, epochs=epochs, skill=skill, decisions=r >= rounds - 2)
        entropy = {head: 0.9 * math.exp(-r / 25) + 0.02 * k for k, head in enumerate(HEADS)}
        entropy["alpha_curve"] = None if r < 5 else 0.6
        journal.write(Update(round=r, epochs=3, minibatches=12, policy_loss=-0.02, value_loss=0.4 / (r + 1),
                             entropy_loss=-0.5, kl=0.012 + 0.004 * math.sin(r), clip_fraction=0.12, ratio_min=0.7,
                             ratio_max=1.5, explained_variance=1 - 1.2 * math.exp(-r / 6), value_nrmse=0.9 / (r + 1),
                             grad_norm=0.8, lr=3e-4, entropy=entropy, learnable=dict.fromkeys(HEADS, 0.3),
                             return_mean=0.05 + 0.2 * r / rounds, return_sd=0.05, wall_ms=410.0))  # fmt: skip
    if not clean:
        journal.write(GovernorAlarm(env=1, episode=rounds - 1, step=12, alarm="loss_not_finite", action="rolled back",
                               value=math.nan, limit=4.2, restored_step=10))  # fmt: skip
        journal.write(Health(source="tensorboard", severity="error", text="sink retired after 3 failures: disk full",
                             counters={"dropped": 412}), lose=5)  # fmt: skip
    phases(journal, 20.0)
    if status == "finished":
        journal.write(RunFinished(status="finished", wall_s=1_912.0, env_steps=envs * rounds * epochs))
    return journal.close()
