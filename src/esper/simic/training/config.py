"""Training settings. Precedence: defaults < preset < TOML file < `--set a.b=c`. Errors name the setting's path.

config = load_config(preset="quick", file=Path("my.toml"), sets=["ppo.lr=3e-4"])
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from esper.leyline.actions import HEAD_OPTIONS, Head, Op
from esper.leyline.atomic_io import read_regular
from esper.leyline.errors import ConfigError, UnknownNameError, unknown_name
from esper.leyline.events import level
from esper.leyline.lifecycle import Rules
from esper.leyline.text import cut
from esper.simic.agent.ppo import PPOConfig
from esper.simic.rewards import WITH_POTENTIAL, RewardConfig
from esper.simic.simulated_worlds import SimConfig
from esper.tamiyo.network import NetworkConfig
from esper.tamiyo.policy.action_masks import FIXED_OPTIONS
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.families import FAMILIES, Family, get_family
from esper.tolaria.tasks import TASKS

TRAIN_WORLDS = 64
FAMILY_WORLDS = 256
HELD_OUT_FROM = 10_000
"""By default, training uses worlds 0 to 63, or 0 to 255 of a task family. Worlds from 10,000 on are reserved for
evaluation."""
MOST_THREADS = 1024
MOST_ENVS = 1 << 16
MOST_BYTES = 1 << 20
"""Maximum size of a config file in bytes."""


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a training run."""

    task: str = "rescue"
    """The hosts are trained on this task or task family: a name that `esper tasks` lists, or the path of a family
    file."""
    simulated: bool = False
    """If true, the policy is trained on simulated hosts (see `sim`), at thousands of steps per second, instead of real
    ones."""
    seed: int = 0
    """All random generators of the run are derived from this random seed, any integer."""
    rounds: int = 40
    """The run has this many rounds, ≥ 1. A round is one episode in each of `envs` environments, then one policy
    update."""
    envs: int = 16
    """This many environments run in parallel, 1 to 65,536."""
    epochs: int | None = None
    """An episode has this many steps, ≥ 1; None uses the task's own number. A step trains the host for one epoch."""
    worlds: int | None = None
    """The policy is trained in this many worlds, 1 to 10,000, each with its own no-growth baseline; None uses 64, of a
    family 256."""
    imitation: int = 0
    """The policy imitates a teacher in this many first rounds, ≥ 0: on simulated hosts a planner that reads the world's
    parameters, on real ones `plans`."""
    plans: dict[str, dict[str, str]] = {}
    """The teacher on real hosts grows what this table says, from world to slots and their blueprints. Rounds of
    imitation use these worlds only."""
    start_from: str | None = None
    """Training starts with the policy of this run directory or policy file; None starts with a new policy."""
    fixed: dict[str, str] = msgspec.field(
        default_factory=lambda: {head.name.lower(): name for head, name in FIXED_OPTIONS.items()}
    )
    """The policy does not choose the heads of this table, from head to option. A given table replaces the default one:
    `{}` leaves every head to the policy."""
    telemetry: str = "normal"
    """Events are recorded at this level: off, minimal, normal or debug. It has no effect on training results."""
    threads: int = 1
    """Each process uses this many CPU threads of torch, 1 to 1024. More than 1 does not speed up small hosts."""
    keep: int = 3
    """This many most recent checkpoints are kept, ≥ 1, and the best one in addition."""
    checkpoint_share: float = 0.01
    """Checkpoints take at most this fraction of the run's time, above 0 and at most 1. At the default, a round of more
    than a few seconds always gets one; at 1, every round does."""
    engine: EngineConfig = EngineConfig()
    """These settings determine how hosts are trained."""
    rules: Rules = Rules()
    """These settings determine the lifecycle of seeds."""
    reward: RewardConfig = RewardConfig()
    """These settings determine the reward."""
    network: NetworkConfig = NetworkConfig()
    """These settings determine the size and the shape of the policy network."""
    ppo: PPOConfig = PPOConfig()
    """These settings determine the policy updates."""
    sim: SimConfig = SimConfig()
    """These settings determine the simulated hosts if `simulated` is true."""

    def __post_init__(self) -> None:
        for name in ("rounds", "envs", "worlds", "threads", "keep"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be ≥ 1, got {getattr(self, name)}")
        if not 0 < self.checkpoint_share <= 1:
            raise ConfigError(f"checkpoint_share must be above 0 and at most 1, got {self.checkpoint_share}")
        if self.envs > MOST_ENVS:
            raise ConfigError(f"envs must be at most {MOST_ENVS}, got {self.envs}")
        if self.threads > MOST_THREADS:
            raise ConfigError(f"threads must be at most {MOST_THREADS}, got {self.threads}")
        self._check_imitation()
        if self.worlds is not None and self.worlds > HELD_OUT_FROM:
            raise ConfigError(f"worlds from {HELD_OUT_FROM} on are held out for evaluation, got worlds = {self.worlds}")
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs must be ≥ 1, got {self.epochs}")
        if self.reward.mode in WITH_POTENTIAL and self.reward.gamma != self.ppo.gamma:
            raise ConfigError(
                f"reward.mode = {self.reward.mode} needs reward.gamma = ppo.gamma, or its potential rewards cycles "
                f"of actions; got {self.reward.gamma} and {self.ppo.gamma}"
            )
        if self.family() is not None and self.engine.strategy != "loop" and not self.simulated:
            raise ConfigError(
                f"engine.strategy = {self.engine.strategy} trains equal hosts as one batch, and those of the family "
                f"{self.task!r} differ. Use engine.strategy = loop"
            )
        level(self.telemetry)
        self.fixed_heads()

    def _check_imitation(self) -> None:
        if self.imitation < 0:
            raise ConfigError(f"imitation must be ≥ 0, got {self.imitation}")
        if self.imitation and not self.simulated and not self.plans:
            raise ConfigError(
                "imitation on real hosts needs `plans`, what to grow in each world. `esper plans` writes a config file "
                "with them; or set imitation = 0"
            )
        for world in self.plans:
            if not world.isdecimal() or str(int(world)) != world or int(world) >= HELD_OUT_FROM:
                raise ConfigError(f"plans are for training worlds, 0 to {HELD_OUT_FROM - 1}; got {world!r}")

    @property
    def task_label(self) -> str:
        """Name of the task in files and tables: "sim" for simulated hosts, the family's name for a family file."""
        family = self.family()
        return "sim" if self.simulated else self.task if family is None else family.name

    @property
    def pool(self) -> int:
        """Number of worlds to train in."""
        if self.worlds is not None:
            return self.worlds
        return TRAIN_WORLDS if self.simulated or self.family() is None else FAMILY_WORLDS

    def family(self) -> Family | None:
        """Return the task family to train on, with episodes of `epochs` steps; None for a single task."""
        if self.task in TASKS:
            return None
        family = get_family(self.task)
        if family is None:
            raise unknown_name("task", self.task, [*TASKS, *FAMILIES])
        return family if self.epochs is None else family.lasting(self.epochs)

    def fixed_heads(self) -> dict[Head, int]:
        """Return `fixed` as head and option indices. Raise if a head or an option does not exist."""
        fixed: dict[Head, int] = {}
        choosable = {h.name.lower(): h for h in Head if HEAD_OPTIONS[h] is not None}
        for name, option in self.fixed.items():
            if name.lower() not in choosable:
                raise unknown_name("head to fix", name, choosable)
            head = choosable[name.lower()]
            options = HEAD_OPTIONS[head] or ()
            matches = [i for i, o in enumerate(options) if o.lower() == str(option).lower()]
            if not matches:
                raise unknown_name(f"option of fixed.{name}", str(option), options)
            fixed[head] = matches[0]
        if fixed.get(Head.OP) == Op.WAIT:
            raise ConfigError("fixed.op = WAIT leaves nothing to decide, so nothing to learn. Fix another op, or none")
        return fixed


FEW_CHOICES = {"tempo": "STANDARD", "alpha_target": "FULL", "alpha_speed": "INSTANT", "alpha_curve": "LINEAR"}
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"task": "rescue", "rounds": 4, "envs": 4, "epochs": 20, "worlds": 4, "ppo": {"minibatches": 2}},
    "standard": {},
    "sim": {
        "simulated": True, "rounds": 68, "envs": 512, "worlds": 8192, "imitation": 10,
        "fixed": FEW_CHOICES, "network": {"standardise": True},
        "ppo": {
            "lr": 4e-3, "lr_final": 0.1, "gamma": 1.0, "gae_lambda": 0.95, "target_kl": 0.04, "entropy_final": 0.002,
        },
    },
    "family": {
        "task": "mend_mlp", "rounds": 22, "envs": 32, "fixed": FEW_CHOICES,
        "network": {"standardise": True, "epsilon": 0.002},
        "ppo": {
            "lr": 2e-3, "lr_final": 0.1, "gamma": 1.0, "epochs": 8, "entropy_coef": 0.003, "entropy_final": 0.001,
        },
    },
}  # fmt: skip
"""Named settings: `quick` runs every part in about two minutes, `standard` learns on real hosts, `sim` learns in
minutes on simulated ones, `family` learns on the hosts of a task family, which differ."""


def load_config(
    *,
    preset: str | None = None,
    file: Path | None = None,
    sets: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Return the effective settings: defaults < preset < file < `sets` < `more`."""
    tree: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    if preset is not None:
        if preset not in PRESETS:
            raise unknown_name("preset", preset, PRESETS)
        tree = merged(tree, PRESETS[preset])
    if file is not None:
        settings = read_toml(file)
        for field in msgspec.structs.fields(TrainConfig):  # before merging: a later setting of the group would hide it
            if isinstance(field.default, msgspec.Struct) and not isinstance(settings.get(field.name, {}), Mapping):
                raise ConfigError(f"{field.name} is a group of settings, got {settings[field.name]!r} in {file}")
        tree = merged(tree, settings)
    for text in sets:
        tree = merged(tree, parse_set(text))
    tree = merged(tree, {k: v for k, v in (more or {}).items() if v is not None})
    config: TrainConfig = built(TrainConfig, tree)
    is_taught_by_plans = config.imitation > 0 and not config.simulated
    if is_taught_by_plans and "plans" in settings and settings.get("task", config.task) != config.task:
        raise ConfigError(
            f"the plans in {file} are for the task {settings['task']!r}, not {config.task!r}. Find plans for it with "
            "`esper plans`, or set imitation = 0"
        )
    return config


def config_of_run(tree: Mapping[str, Any], run: Path, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the settings that a run has recorded, with some changed. Raise ConfigError if they no longer exist."""
    recorded: TrainConfig
    try:
        recorded = built(TrainConfig, tree)
    except (ConfigError, UnknownNameError) as error:
        raise ConfigError(
            f"{run} was trained with other settings than this version of Esper has: {error}. Train it again, or use "
            "the version that trained it"
        ) from error
    return built(TrainConfig, as_tree(recorded) | dict(changes)) if changes else recorded


def read_toml(file: Path) -> dict[str, Any]:
    """Return the contents of a TOML file. Raise ConfigError if it cannot be read or parsed."""
    try:
        return tomllib.loads(read_regular(file, MOST_BYTES, follow=True).decode())
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {file}") from None
    except OSError as error:
        raise ConfigError(f"cannot read config file {file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read config file {file}: {error}") from None
    except (ValueError, RecursionError) as error:  # ValueError: also raised for integers of thousands of digits
        raise ConfigError(f"{file} is not TOML: {error}") from None


def parse_set(text: str) -> dict[str, Any]:
    """Return `a.b=c` as a nested dict. The value is parsed as TOML, or kept as a string if it is not valid TOML.

    >>> parse_set("ppo.lr=3e-4")
    {'ppo': {'lr': 0.0003}}
    >>> parse_set("task=quick")
    {'task': 'quick'}
    """
    path, equals, value = text.partition("=")
    if not equals or not all(re.fullmatch(r"\w+", part) for part in path.strip().split(".")):
        raise ConfigError(f"--set takes a.b=c, got {text!r}")
    try:
        parsed: Any = tomllib.loads(f"x = {value.strip()}")["x"]
    except (ValueError, RecursionError):
        parsed = value.strip()
    for part in reversed(path.strip().split(".")):
        parsed = {part: parsed}
    return parsed


def merged(tree: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tree` recursively updated with `over`. An empty table in `over` replaces the old one."""
    out = dict(tree)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) and value else value
    return out


def built(kind: type[msgspec.Struct], tree: Mapping[str, Any], path: str = "") -> Any:
    """Return a settings object from a nested dict. Errors name the setting's path and suggest the nearest valid key."""
    fields = {f.name: f for f in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else key
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"there is no setting {where!r}.{hint} There are: {', '.join(sorted(fields))}")
        kind_of = fields[key].type
        if isinstance(kind_of, type) and issubclass(kind_of, msgspec.Struct):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where} is a group of settings, got {value!r}; set {where}.… instead")
            values[key] = built(kind_of, merged(as_tree(fields[key].default), value), where)  # keeps the other fields
            continue
        values[key] = _value(where, value, kind_of)
    try:
        return kind(**values)
    except (ConfigError, UnknownNameError) as error:
        text = str(error)
        raise type(error)(f"{path}: {text}" if path and not text.startswith(path) else text) from None


def _value(where: str, value: Any, kind: Any) -> Any:
    """Return `value` converted to the setting's type. TOML has no null: "none" means None where None is allowed."""
    kinds = get_args(kind)
    if type(None) in kinds and value in ("none", "None"):
        return None
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if get_origin(kind) is Literal:
            expected = f"one of {', '.join(map(repr, kinds))}"
        else:
            match = re.match("Expected `(.+?)`", str(error))
            expected = match[1].replace(" | null", " or none") if match else str(error)
        raise ConfigError(f"{where} must be {expected}, got {cut(repr(value), 100)}") from None


def as_tree(config: msgspec.Struct) -> dict[str, Any]:
    """Return settings as plain data, for printing and for a manifest."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    return tree
