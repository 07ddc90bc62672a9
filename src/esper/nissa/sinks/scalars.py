"""Conversion of events to scalars: one mapping for TensorBoard and all other trackers.

Each namespace has its own monotonic step axis: `env3/…` counts that environment's steps over all its episodes,
`update/…` counts PPO updates, `episode/…` counts finished episodes.
"""

from __future__ import annotations

from esper.leyline.events import Episode, Event, Gradient, Number, RunStarted, Step, Update, Worth

STEP_FIELDS = ("quality", "committed_quality", "val_loss", "train_loss", "reward", "utility", "value", "params",
               "train_macs")  # fmt: skip
WORTH_FIELDS = ("contribution", "solo", "shapley", "interaction", "prospect")
EPISODE_FIELDS = (
    "quality",
    "test_quality",
    "baseline_quality",
    "utility",
    "episode_return",
    "params",
    "fossilized",
    "pruned",
)
HEAD_FIELDS = ("entropy", "learnable")  # fields of an update with one value per head


class Scalars:
    """Convert events to scalars: a step, and values by tag."""

    def __init__(self) -> None:
        self._slots: tuple[str, ...] = ()
        self._progress: dict[
            int, tuple[int, int, int]
        ] = {}  # env → episode, its furthest step, steps of earlier episodes
        self._updates = self._episodes = 0

    def of(self, event: Event) -> tuple[int, dict[str, Number]]:
        """Return the step of an event and its values by tag; no values for events without scalars."""
        match event:
            case RunStarted():
                self._slots = event.slots
            case Step():
                values = {name: getattr(event, name) for name in STEP_FIELDS}
                seeds = zip(event.alphas, event.blueprints, strict=False)
                values |= {f"alpha/{self._slot(i)}": alpha for i, (alpha, blueprint) in enumerate(seeds) if blueprint}
                return self._of_env(event, values)
            case Worth():
                return self._of_env(event, {f"{name}/{event.slot}": getattr(event, name) for name in WORTH_FIELDS})
            case Gradient():
                gauges = ("norm", "ratio", "health")
                return self._of_env(event, {f"gradient_{name}/{event.slot}": getattr(event, name) for name in gauges})
            case Update():
                self._updates += 1
                values = {name: getattr(event, name) for name in Update.__struct_fields__ if name not in HEAD_FIELDS}
                for name in HEAD_FIELDS:
                    values |= {f"{name}/{head}": value for head, value in getattr(event, name).items()}
                return self._updates, {f"update/{name}": value for name, value in values.items()}
            case Episode():
                self._episodes += 1
                return self._episodes, {f"episode/{name}": getattr(event, name) for name in EPISODE_FIELDS}
        return 0, {}

    def _of_env(self, event: Step | Worth | Gradient, values: dict[str, Number]) -> tuple[int, dict[str, Number]]:
        step = self._axis(event.env, event.episode, event.step)
        return step, {f"env{event.env}/{name}": value for name, value in values.items()}

    def _slot(self, index: int) -> str:
        return self._slots[index] if index < len(self._slots) else str(index)

    def _axis(self, env: int, episode: int, step: int) -> int:
        """Return the environment's steps over all its episodes. Late events of earlier episodes do not reduce it."""
        now, furthest, before = self._progress.get(env, (episode, 0, 0))
        if episode > now:
            now, furthest, before = episode, 0, before + furthest
        furthest = max(furthest, step) if episode == now else furthest
        self._progress[env] = now, furthest, before
        return before + furthest
