"""`esper tasks` and `esper blueprints`."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from esper.commands import plainly
from esper.kasmina.blueprints import blueprints_for, cost
from esper.kasmina.blueprints.registry import FeatureSpec, Layout
from esper.tolaria.families import FAMILIES, world_task
from esper.tolaria.host_building import build_body
from esper.tolaria.tasks import TASKS

EXAMPLES = {
    Layout.MAP: FeatureSpec(Layout.MAP, 16, (16, 14, 14)),
    Layout.SEQUENCE: FeatureSpec(Layout.SEQUENCE, 64, (64, 64)),
    Layout.VECTOR: FeatureSpec(Layout.VECTOR, 64, (64,)),
}
FAMILY_SAMPLE = 64
"""Number of worlds of a family whose slots are counted."""
EMBEDDED = ("digits", "fashion", "moby")


def list_tasks() -> None:
    """Print a row of facts per task and its question below. Both fit into 80 columns."""
    rows: list[tuple[str, ...]] = [("task", "host", "parameters", "data", "slots", "epochs")]
    for task in TASKS.values():
        with torch.device("meta"):
            size = sum(p.numel() for p in task.build_host(0).parameters())
        data = task.dataset if task.dataset in EMBEDDED else f"{task.dataset}*"
        rows.append((task.name, task.host, f"{size:,}", data, str(len(task.slots)), str(task.epochs)))
    for family in FAMILIES.values():
        data = "/".join(d if d in EMBEDDED else f"{d}*" for d in family.datasets)
        slots = {len(family.task(world).slots) for world in range(FAMILY_SAMPLE)}
        epochs = family.epochs
        ranges = [f"{min(each)}–{max(each)}" if len(set(each)) > 1 else str(max(each)) for each in (slots, epochs)]
        rows.append((family.name, family.host, "varies", data, *ranges))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    console = Console()
    questions = [*(task.question for task in TASKS.values()), *(family.question for family in FAMILIES.values())]
    for row, question in zip(rows, ["", *questions], strict=True):
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, "<<><>>", widths, strict=True)]
        plainly(console, "  ".join(cells))
        if question:
            console.print(Padding(Text(question, "dim"), (0, 0, 0, 2), expand=False))
    console.print()
    plainly(console, "* needs data files of your own: esper grow --task NAME --data DIR")
    plainly(console, "parameters vary: a task family, in which every world has its own host and data")


def list_blueprints(task_name: str | None) -> None:
    """Print the blueprints and their costs, at a task's slots or for example shapes."""
    console = Console()
    if task_name is None:
        for layout, spec in EXAMPLES.items():
            shape = " × ".join(map(str, spec.shape))
            table = Table("blueprint", "parameters", "multiply-adds", title=f"{layout} features, here {shape}")
            for name in blueprints_for(layout):
                price = cost(name, spec)
                table.add_row(name, f"{price.params:,}", f"{price.macs:,}")
            console.print(table)
        console.print("For the costs at the slots of a task: esper blueprints --task NAME")
        return
    task = world_task(task_name, 0)
    body = build_body(task, task.load_data(), world=0)
    for slot, prices in body.costs().items():
        spec = body.slots[slot].spec
        shape = " × ".join(map(str, spec.shape))
        table = Table("blueprint", "parameters", "multiply-adds", title=f"{task.name} {slot}: {spec.layout} {shape}")
        for name, price in prices.items():
            table.add_row(name, f"{price.params:,}", f"{price.macs:,}")
        console.print(table)
