"""Train policies on the simulator with several settings and training seeds, and compare them in the same worlds.

    python scripts/policy_studies.py reward_modes      # run the missing trainings of a study, then print its table
    python scripts/policy_studies.py --tables          # write the tables into docs/studies/
    python scripts/policy_studies.py --check           # exit with code 1 if a table is not up to date

Each finished training is one line of `studies/policies/NAME.jsonl`: ending the command loses only the training under
way. A change of an arm's settings makes its trainings missing again. Policies play by sampling, without the uniform
share of exploration. Leads are paired by world, each world's U being the mean over training seeds; their bootstrap
95 % intervals are over worlds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from esper.leyline.paired import compare
from esper.leyline.slot_table import Floats
from esper.simic.evaluation.comparison import play
from esper.simic.rewards import REWARDS
from esper.simic.simulator import Simulator
from esper.simic.training.config import HELD_OUT_FROM, TrainConfig, load_config
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tamiyo.controllers.learned import Learned
from esper.tamiyo.network import TamiyoNetwork


class PolicyStudy(msgspec.Struct, frozen=True, kw_only=True):
    """Arms to train with the preset `sim`, and where to play them. The first arm is the reference."""

    arms: dict[str, tuple[str, ...]]  # settings in addition to those of the preset, as for `esper train --set`
    seeds: tuple[int, ...]  # training seeds
    worlds: tuple[int, int]  # first world and number of worlds


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One finished training."""

    arm: str
    settings: tuple[str, ...]
    seed: int
    cpu_s: float
    first_world: int
    utility: list[float]  # [W] in each world, by sampling without the uniform share
    curve: list[float]  # [rounds] mean U of the training episodes


_FROM_SCRATCH = (
    "imitation=0", "rounds=20", "envs=256", "ppo.groups=2", "ppo.epochs=3", "ppo.lr=3e-3", "ppo.entropy_coef=0.05",
    "reward.gamma=1.0",
)  # fmt: skip
STUDIES = {
    "reward_modes": PolicyStudy(
        arms={mode: (*_FROM_SCRATCH, f"reward.mode={mode}") for mode in REWARDS},
        seeds=(0, 1),
        worlds=(HELD_OUT_FROM, 256),
    ),
}
BEGIN, END = "<!-- policy table: begin -->", "<!-- policy table: end -->"


def main() -> None:
    """Run a study and print its table, or write or check the tables of all studies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", choices=STUDIES)
    parser.add_argument("--tables", action="store_true", help="write the tables of all studies into docs/studies/")
    parser.add_argument("--check", action="store_true", help="fail if a table is not up to date")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository root")
    options = parser.parse_args()
    if options.study:
        run(options.study, options.root)
        print(table(options.study, options.root))
    outdated = [name for name in STUDIES if is_outdated(name, options.root, write=options.tables)]
    if options.check and outdated:
        sys.exit(f"not up to date: {', '.join(outdated)}. Run: python scripts/policy_studies.py --tables")


def run(name: str, root: Path) -> None:
    """Run the trainings of a study that have no record with the present settings."""
    study, path = STUDIES[name], records_path(name, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    for seed in study.seeds:  # all arms of a seed first, so that the ranking is complete early
        for arm in study.arms:
            if (arm, seed) in records(name, root):
                continue
            record = trained(study, arm, seed)
            with path.open("a") as file:
                file.write(msgspec.json.encode(record).decode() + "\n")
            print(f"{arm} seed {seed}: U {np.mean(record.utility):+.4f}, {record.cpu_s:.0f} s CPU", flush=True)


def trained(study: PolicyStudy, arm: str, seed: int) -> Record:
    """Train one policy and play it."""
    config = load_config(preset="sim", sets=[*study.arms[arm], f"seed={seed}"])
    start = time.process_time()
    result = train_ppo_vectorized(config)
    cpu_s = time.process_time() - start
    first, count = study.worlds
    utility = played(result.network, config, list(range(first, first + count)))
    return Record(
        arm=arm, settings=study.arms[arm], seed=seed, cpu_s=round(cpu_s, 1), first_world=first,
        utility=utility.round(6).tolist(), curve=[round(float(r.utility.mean()), 6) for r in result.rounds],
    )  # fmt: skip


def played(network: TamiyoNetwork, config: TrainConfig, worlds: list[int], *, sample: bool = True) -> Floats:
    """Return U of a policy in these worlds, without the uniform share of exploration."""
    network.config = msgspec.structs.replace(network.config, epsilon=0.0)
    controller = Learned(network, fixed=config.fixed_heads(), sample=sample)
    return play(Simulator(config.sim, worlds, config.rules), controller, worlds, config.reward).utility


def records_path(name: str, root: Path) -> Path:
    """Return the results file of a study."""
    return root / "studies" / "policies" / f"{name}.jsonl"


def records(name: str, root: Path) -> dict[tuple[str, int], Record]:
    """Return the current records of a study by arm and training seed."""
    study, path = STUDIES[name], records_path(name, root)
    lines = path.read_text().splitlines() if path.exists() else []
    all_records = [msgspec.json.decode(line, type=Record) for line in lines]
    return {
        (r.arm, r.seed): r
        for r in all_records
        if r.seed in study.seeds
        and (study.arms.get(r.arm), study.worlds) == (r.settings, (r.first_world, len(r.utility)))
    }


def table(name: str, root: Path) -> str:
    """Return the ranking of a study's arms as Markdown."""
    study, finished = STUDIES[name], records(name, root)
    by_arm = {arm: [finished[arm, seed] for seed in study.seeds if (arm, seed) in finished] for arm in study.arms}
    means = {arm: np.mean([r.utility for r in some], axis=0) for arm, some in by_arm.items() if some}
    reference = next(iter(study.arms))
    first, count = study.worlds
    all_jobs = len(study.arms) * len(study.seeds)
    unfinished = f" **Unfinished: {len(finished)} of {all_jobs} trainings.**" if len(finished) < all_jobs else ""
    lines = [
        f"Command: `python scripts/policy_studies.py {name}`; worlds {first} to {first + count - 1}, training seeds "
        f"{', '.join(map(str, study.seeds))}.{unfinished}",
        "",
        f"| arm | U | of each training seed | lead over `{reference}` |",
        "|---|---|---|---|",
    ]
    for arm, utility in sorted(means.items(), key=lambda item: -item[1].mean()):
        own = compare(utility, 0 * utility)
        seeds = ", ".join(f"{np.mean(r.utility):+.4f}" for r in by_arm[arm])
        lead = compare(utility, means[reference])
        shown = "–" if arm == reference else f"{lead.mean:+.4f} [{lead.low:+.4f}, {lead.high:+.4f}]"
        lines.append(f"| `{arm}` | {own.mean:+.4f} [{own.low:+.4f}, {own.high:+.4f}] | {seeds} | {shown} |")
    return "\n".join(lines).replace("-0.", "−0.")


def is_outdated(name: str, root: Path, *, write: bool) -> bool:
    """Return whether the page of a study does not have its present table; write it there if `write`."""
    page = root / "docs" / "studies" / f"{name}.md"
    text = page.read_text() if page.exists() else f"# {name}\n\n{BEGIN}{END}\n"
    wanted = text[: text.index(BEGIN)] + f"{BEGIN}\n{table(name, root)}\n{END}" + text[text.index(END) + len(END) :]
    if write:
        page.write_text(wanted)
    return wanted != text


if __name__ == "__main__":
    main()
