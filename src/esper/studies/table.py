"""The study table: one row per study. Add a study by adding a row."""

from __future__ import annotations

from esper.leyline.errors import unknown_name
from esper.studies.contract import Arm, Claim, Study

FULL = {"blueprint": "conv_heavy"}
"""The full structure: this blueprint in every slot of the task."""

_ROWS = (
    Study(
        name="open_birth",
        question="Is it cheaper to add the structure I want during training than to train it from step 0?",
        task=("rescue", "quick"),
        arms=(
            Arm(name="from_start", kind="static", settings=FULL),
            Arm(name="from_start_steps", kind="static", settings={**FULL, "steps_of": "open_birth"}),
            Arm(name="no_growth", kind="static", settings={"steps_of": "open_birth"}),
            Arm(name="small_host", kind="static"),
            Arm(name="wider_host", kind="static", settings={"host": "wider", "size_of": "from_start"}),
            Arm(name="deeper_host", kind="static", settings={"host": "deeper", "size_of": "from_start"}),
            Arm(name="isolated_birth", kind="planted", settings={**FULL, "birth": "isolated"}),
            Arm(name="open_birth", kind="planted", settings={**FULL, "birth": "open", "ramp_epochs": 0}),
            Arm(name="open_birth_ramped", kind="planted", settings={**FULL, "birth": "open", "ramp_epochs": 8}),
        ),
        budgets=(0.4, 0.6, 0.8, 1.0),
        worlds=(100, 16),
        claims=(
            Claim(arm="open_birth", against="from_start"),
            Claim(arm="open_birth", against="small_host"),
            Claim(arm="open_birth", against="isolated_birth"),
            Claim(arm="open_birth", against="from_start_steps", at="equal steps"),
            Claim(arm="open_birth", against="from_start", at="frontier area"),
        ),
        min_worlds=16,
    ),
)
STUDIES = {study.name: study for study in _ROWS}


def get_study(name: str) -> Study:
    """Return the study of this name. Raise UnknownNameError if there is none."""
    if name not in STUDIES:
        raise unknown_name("study", name, STUDIES)
    return STUDIES[name]
