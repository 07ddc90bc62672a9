"""Controllers that need no training, as references for policies on the simulator: a plan for all worlds, and planners.

utility = reference_utility("informed_planner", config, worlds)  # [W] U in each world
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from esper.leyline.slot_table import Floats
from esper.simic.evaluation.comparison import play
from esper.simic.evaluation.informed_planner import InformedPlanner
from esper.simic.evaluation.replacing_planner import ReplacingPlanner
from esper.simic.evaluation.sim_oracle import FollowPlans, best_schedule
from esper.simic.simulated_worlds import draw_worlds
from esper.simic.simulator import Simulator
from esper.simic.training.config import TrainConfig
from esper.tamiyo.controllers import Controller

BEAM = 48
"""Number of plans that the search for a schedule keeps at each length."""
FITTED_ON = range(64)
"""Training worlds that the best fixed schedule is fitted on."""
AVERAGED = range(4096)
"""Training worlds whose mean the uninformed planner expects in every world."""


def fixed_schedule(config: TrainConfig, _sim: Simulator) -> Controller:
    """Return the controller that follows the plan of the highest mean U in training worlds."""
    plan, _ = best_schedule(config.sim, FITTED_ON, config.rules, config.reward, beam=BEAM)
    return FollowPlans([plan])


def uninformed_planner(config: TrainConfig, sim: Simulator) -> Controller:
    """Return the planner that expects the mean over training worlds in every world; it prunes by measurement."""
    return InformedPlanner(sim, config.reward, draw_worlds(AVERAGED, config.sim).expected.mean(axis=0))


def oracle(config: TrainConfig, sim: Simulator) -> Controller:
    """Return the controller that follows the best plan of each world, by search on its true parameters."""
    plans = [best_schedule(config.sim, [world], config.rules, config.reward, beam=BEAM)[0] for world in sim.worlds]
    return FollowPlans(plans)


CONTROLLERS: dict[str, Callable[[TrainConfig, Simulator], Controller]] = {
    "best_schedule": fixed_schedule,
    "uninformed_planner": uninformed_planner,
    "informed_planner": lambda config, sim: InformedPlanner(sim, config.reward),
    "replacing_planner": lambda config, sim: ReplacingPlanner(sim, config.reward),
    "oracle": oracle,
}
"""Controllers for the worlds of a simulator. The last three read the parameters of each world."""


def reference_utility(name: str, config: TrainConfig, worlds: Sequence[int]) -> Floats:
    """Return U of one of `CONTROLLERS` in each of these worlds, [W]."""
    sim = Simulator(config.sim, worlds, config.rules)
    return play(sim, CONTROLLERS[name](config, sim), worlds, config.reward).utility
