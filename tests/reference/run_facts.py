"""The facts of a run, computed from all entries of its journal at once: slow and obvious."""

from __future__ import annotations

import math
from typing import Any

from esper.nissa.journal_reader import Entry

STEP = ("step", "train_macs", "quality", "committed_quality", "val_loss", "train_loss", "utility", "reward", "params")
WORTH = ("step", "seed", "committed", "contribution", "contribution_se", "shapley", "shapley_se", "prospect",
         "prospect_se", "interaction")  # fmt: skip


def run_facts(entries: list[Entry]) -> dict[str, Any]:
    """Return the facts that `RunState` folds one by one. Of every environment the newest episode counts."""

    def of(kind: str) -> list[dict[str, Any]]:
        return [entry.data for entry in entries if entry.kind == kind]

    steps, moves, decisions, results = of("step"), of("lifecycle"), of("decision"), of("episode")
    newest = {d["env"]: d["episode"] for d in steps}
    kinds = [entry.kind for entry in entries]
    ops = [d["op"] for d in steps]
    ended = [d for d in results if d["quality"] is not None and math.isfinite(d["quality"])]
    best = max(ended, key=lambda d: d["quality"], default=None)
    phases = {(entry.rank, entry.data["phase"]): entry.data for entry in entries if entry.kind == "phase_profile"}

    def is_newest(d: dict[str, Any]) -> bool:
        return newest.get(d["env"]) == d["episode"]

    def cause(d: dict[str, Any]) -> str | None:
        if d["cause"] != "controller":
            return None
        place = [d[name] for name in ("env", "episode", "step", "slot")]
        chosen = [c["op"] for c in decisions if [c[name] for name in ("env", "episode", "step", "slot")] == place]
        return chosen[-1] if chosen else None

    return {
        "kinds": {kind: kinds.count(kind) for kind in kinds},
        "ops": {op: ops.count(op) for op in ops},
        "env_steps": len(steps),
        "steps": {
            env: [tuple(d.get(name) for name in STEP) for d in steps if d["env"] == env and is_newest(d)]
            for env in newest
        },
        "worth": _grouped(((d["env"], d["slot"]), tuple(d.get(n) for n in WORTH)) for d in of("worth") if is_newest(d)),
        "moves": _grouped(
            ((d["env"], d["seed"]), (d["step"], d["was"], d["now"], d["cause"], cause(d)))
            for d in moves
            if is_newest(d)
        ),
        "blueprints": {
            name: tuple(
                sum(d["blueprint"] == name and d["now"] == now for d in moves)
                for now in ("GERMINATED", "FOSSILIZED", "PRUNED")
            )
            for name in {d["blueprint"] for d in moves}
        },
        "quality_by_round": {
            number: (sum(values) / len(values), min(values), max(values))
            for number, values in _grouped((d["episode"], d["quality"]) for d in ended).items()
        },
        "best": best and (best["env"], best["episode"]),
        "kl": [d["kl"] for d in of("update")],
        "phases": {
            name: tuple(sum(d[key] for (_, phase), d in phases.items() if phase == name)
                        for key in ("wall_ms", "cpu_ms", "calls"))
            for name in {phase for _, phase in phases}
        },
        "rollbacks": [(d["env"], d["step"]) for d in of("governor") if d["action"] == "rolled back"],
    }  # fmt: skip


def _grouped(pairs: Any) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
