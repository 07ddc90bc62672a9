"""`esper explain`: why a policy decided as it did at a step, and what happened to the seed afterwards."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from esper.commands import plainly
from esper.leyline.errors import DataError
from esper.nissa.journal_reader import read
from esper.nissa.run_list import find_run
from esper.tamiyo.decision_record import DecisionRecord
from esper.tamiyo.explanation import Explanation, explain, operations

SHOWN = 12
"""Number of influences shown in a table."""
MOVE = ("step", "seed", "blueprint", "was", "now", "cause", "contribution", "contribution_se")
END = ("quality", "baseline_quality", "utility", "episode_return", "structure")
"""Fields of the events `lifecycle` and `episode` that are shown."""
NOTES = """\
probability: slots given the operation, other options given operation and slot
effect: log-probability of the chosen action minus that with the feature at its neutral value; above 0, the actual value
made the action more likely
neutral: mean of the feature over all recorded steps"""


def run_explain(run: Path, *, env: int, step: int | None, as_json: bool) -> None:
    """Explain one decision of a run."""
    path = find_run(run)
    if path is None:
        raise DataError(f"there is no run in {run}")
    record = DecisionRecord.load(path)
    chosen = next(iter(operations(record, env)), 1) if step is None else step  # 1 if it always waited
    explanation = explain(record, env, chosen)
    life = seed_life(path, record, explanation)
    if as_json:
        tree = dataclasses.asdict(explanation) | {"episode": record.facts.episode, "seed": life}
        print(json.dumps(tree, indent=1))
        return
    console = Console()
    if step is None:
        plainly(console, operations_line(record, env))
    show(console, explanation, record.facts.episode)
    console.print(life_table(life) if life else Text(no_seed(explanation), "dim"))


def operations_line(record: DecisionRecord, env: int) -> str:
    """Return a line that lists the steps to choose from."""
    steps = operations(record, env)
    if not steps:
        return f"environment {env} waited at every step; --step N explains one of them"
    return "steps with an operation: " + ", ".join(f"{step} {op}" for step, op in steps.items()) + "  (--step N)"


def show(console: Console, explanation: Explanation, episode: int) -> None:
    """Print an explanation as tables."""
    what = " ".join([explanation.op, explanation.slot, *(v for v in explanation.heads.values())])
    console.print()
    plainly(
        console,
        f"environment {explanation.env}, episode {episode}, world {explanation.world}, step {explanation.step}: "
        f"{what}  (probability {explanation.probability:.3f}, expected return {explanation.value:+.4f})",
    )
    alternatives = Table("head", "probabilities of the alternatives", box=None, pad_edge=False)
    for head, chances in (("op", explanation.ops), ("slot", explanation.slots), *explanation.options.items()):
        if len(chances) > 1:
            alternatives.add_row(head, "  ".join(f"{escape(name)} {p:.3f}" for name, p in chances.items()))
    console.print(alternatives)
    console.print()
    table = Table("feature", "slot", "value", "neutral", "effect", box=None, pad_edge=False)
    for each in explanation.influences[:SHOWN]:
        table.add_row(each.name, escape(each.slot), f"{each.value:.3f}", f"{each.neutral:.3f}", f"{each.effect:+.3f}")
    for column in (2, 3, 4):
        table.columns[column].justify = "right"
    console.print(table)
    console.print(Text(NOTES, "dim"))
    console.print()


def seed_life(path: Path, record: DecisionRecord, explanation: Explanation) -> list[dict[str, Any]]:
    """Return the events of the seed in the chosen slot, from this step on, and the end of the episode.

    Empty if the operation has no slot.
    """
    if not explanation.slot:
        return []
    life: list[dict[str, Any]] = []
    seed: int | None = None
    for entry in read(path):
        data = entry.data
        if (data.get("env"), data.get("episode")) != (explanation.env, record.facts.episode):
            continue
        if (
            entry.kind == "lifecycle"
            and data.get("slot") == explanation.slot
            and data.get("step", 0) >= explanation.step
        ):
            seed = data.get("seed") if seed is None else seed
            if data.get("seed") == seed:
                life.append({name: data.get(name) for name in MOVE})
        elif entry.kind == "episode":
            life.append({"step": data.get("steps"), "now": "end of the episode"} | {n: data.get(n) for n in END})
    return life


def life_table(life: list[dict[str, Any]]) -> Table:
    """Return the moves of a seed and the end of its episode."""
    table = Table(
        "step", "seed", "was", "now", "by", "contribution ± se, points", box=None, pad_edge=False,
        title="What happened to the seed", title_justify="left",
    )  # fmt: skip
    for row in life:
        if row["now"] == "end of the episode":
            table.add_row(str(row["step"]), "", "", row["now"], "", end_text(row))
            continue
        measured = isinstance(row["contribution"], (int, float)) and isinstance(row["contribution_se"], (int, float))
        worth = f"{100 * row['contribution']:+.1f} ± {100 * row['contribution_se']:.1f}" if measured else ""
        seed = escape(f"{row['seed']} ({row['blueprint']})")
        table.add_row(str(row["step"]), seed, str(row["was"]), str(row["now"]), str(row["cause"]), worth)
    return table


def end_text(row: Mapping[str, Any]) -> str:
    """Return the result of an episode: its quality, and its utility where there is one."""
    columns = (("quality", "quality", ".3f"), ("without growth", "baseline_quality", ".3f"), ("U", "utility", "+.4f"))
    parts = [f"{name} {row[key]:{form}}" for name, key, form in columns if isinstance(row.get(key), (int, float))]
    return ", ".join(parts)


def no_seed(explanation: Explanation) -> str:
    """Return why there is no seed to follow."""
    if not explanation.slot:
        return f"{explanation.op} acts on no seed"
    return f"the journal has no move of a seed in {explanation.slot} from step {explanation.step} on"
