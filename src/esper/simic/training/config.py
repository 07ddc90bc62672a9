"""One tree of settings. Defaults < preset < TOML file < `--set a.b=c`; whatever is wrong is said with its path.

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

from esper.kasmina.lifecycle import Rules
from esper.leyline.actions import HEAD_OPTIONS, Head, Op
from esper.leyline.errors import ConfigError, UnknownNameError, unknown_name
from esper.leyline.events import level
from esper.leyline.files import read_regular
from esper.leyline.text import cut
from esper.simic.agent.ppo import PPOConfig
from esper.simic.rewards import RewardConfig
from esper.simic.simulated_worlds import SimConfig
from esper.tamiyo.network import NetworkConfig
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.tasks import get_task

TRAIN_WORLDS = 64
HELD_OUT_FROM = 10_000
"""Worlds for training are 0 … 63; those that only an evaluation sees begin here."""
MOST_THREADS = 1024
MOST_BYTES = 1 << 20
"""Of a config file."""

FIXED = {"tempo": "STANDARD", "alpha_speed": "MEDIUM", "alpha_curve": "LINEAR"}


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides how a policy is trained."""

    task: str = "rescue"
    """What its hosts learn; `esper tasks` lists them."""
    simulated: bool = False
    """Train on simulated hosts (`sim`) instead of real ones: thousands of steps per second."""
    seed: int = 0
    """The root of all randomness of the run."""
    rounds: int = 40
    """Rounds: E episodes side by side, then one update."""
    envs: int = 16
    """Environments side by side."""
    epochs: int | None = None
    """Steps of an episode; the task's own by default."""
    worlds: int = TRAIN_WORLDS
    """Worlds to train in, each with one no-growth twin."""
    start_from: str | None = None
    """A run or policy file whose policy to begin with, instead of a new one."""
    fixed: dict[str, str] = msgspec.field(default_factory=lambda: dict(FIXED))
    """Heads that are not the policy's to choose, and what they say. A table given here replaces this one: `{}` leaves
    every head to the policy."""
    telemetry: str = "normal"
    """What is recorded: off, minimal, normal or debug. Never what is learnt."""
    threads: int = 1
    """CPU threads; small hosts gain nothing from more."""
    keep: int = 3
    """Checkpoints to keep: the last so many, and the best."""
    checkpoint_share: float = 0.01
    """Of the time that checkpoints may cost. Rounds longer than a few seconds all get one; with 1, every round does."""
    engine: EngineConfig = EngineConfig()
    rules: Rules = Rules()
    reward: RewardConfig = RewardConfig()
    network: NetworkConfig = NetworkConfig()
    ppo: PPOConfig = PPOConfig()
    sim: SimConfig = SimConfig()

    def __post_init__(self) -> None:
        for name in ("rounds", "envs", "worlds", "threads", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be ≥ 1, got {getattr(self, name)}")
        if not 0 < self.checkpoint_share <= 1:
            raise ConfigError(f"checkpoint_share must be above 0 and at most 1, got {self.checkpoint_share}")
        if self.threads > MOST_THREADS:
            raise ConfigError(f"threads must be at most {MOST_THREADS}, got {self.threads}")
        if self.worlds > HELD_OUT_FROM:
            raise ConfigError(f"worlds from {HELD_OUT_FROM} on are held out for evaluation, got worlds = {self.worlds}")
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs must be ≥ 1, got {self.epochs}")
        if self.reward.mode == "shaped" and self.reward.gamma != self.ppo.gamma:
            raise ConfigError(
                f"reward.mode = shaped needs reward.gamma = ppo.gamma, or its potential pays for going in circles; "
                f"got {self.reward.gamma} and {self.ppo.gamma}"
            )
        get_task(self.task)
        level(self.telemetry)
        self.fixed_heads()

    def fixed_heads(self) -> dict[Head, int]:
        """`fixed` in numbers."""
        found: dict[Head, int] = {}
        choosable = {h.name.lower(): h for h in Head if HEAD_OPTIONS[h] is not None}
        for name, option in self.fixed.items():
            if name.lower() not in choosable:
                raise unknown_name("head to fix", name, choosable)
            head = choosable[name.lower()]
            options = HEAD_OPTIONS[head] or ()
            same = [i for i, o in enumerate(options) if o.lower() == str(option).lower()]
            if not same:
                raise unknown_name(f"option of fixed.{name}", str(option), options)
            found[head] = same[0]
        if found.get(Head.OP) == Op.WAIT:
            raise ConfigError("fixed.op = WAIT leaves nothing to decide, so nothing to learn. Fix another op, or none")
        return found


PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"task": "rescue", "rounds": 4, "envs": 4, "epochs": 20, "worlds": 4, "ppo": {"groups": 2}},
    "standard": {},
    "sim": {
        "simulated": True, "rounds": 120, "envs": 128, "worlds": 4096,
        "ppo": {
            "lr": 2e-3, "gamma": 1.0, "gae_lambda": 0.98, "epochs": 6, "entropy_coef": 0.03, "entropy_final": 0.005,
        },
    },
}  # fmt: skip
"""Beginnings: `quick` shows all in about two minutes, `standard` learns, `sim` learns in minutes on the simulator."""


def load_config(
    *,
    preset: str | None = None,
    file: Path | None = None,
    sets: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """The effective settings: defaults < preset < file < `sets` < `more`."""
    tree: dict[str, Any] = {}
    if preset is not None:
        if preset not in PRESETS:
            raise unknown_name("preset", preset, PRESETS)
        tree = merged(tree, PRESETS[preset])
    if file is not None:
        told = read_toml(file)
        for field in msgspec.structs.fields(TrainConfig):  # now: a later setting of a group would hide it
            if isinstance(field.default, msgspec.Struct) and not isinstance(told.get(field.name, {}), Mapping):
                raise ConfigError(f"{field.name} is a group of settings, got {told[field.name]!r} in {file}")
        tree = merged(tree, told)
    for text in sets:
        tree = merged(tree, parse_set(text))
    tree = merged(tree, {k: v for k, v in (more or {}).items() if v is not None})
    return built(TrainConfig, tree)


def read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(file, MOST_BYTES, follow=True).decode())
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {file}") from None
    except OSError as error:
        raise ConfigError(f"cannot read config file {file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read config file {file}: {error}") from None
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise ConfigError(f"{file} is not TOML: {error}") from None


def parse_set(text: str) -> dict[str, Any]:
    """`a.b=c` as a tree; c is read as TOML, and as a word if it is none.

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
    """`tree` with what `over` says instead, key by key; an empty table empties."""
    out = dict(tree)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) and value else value
    return out


def built(kind: type[msgspec.Struct], tree: Mapping[str, Any], path: str = "") -> Any:
    """The settings that a tree describes; its errors name the path, and of a wrong key the nearest right one."""
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
            values[key] = built(kind_of, merged(defaults(fields[key]), value), where)
            continue
        values[key] = _value(where, value, kind_of)
    try:
        return kind(**values)
    except (ConfigError, UnknownNameError) as error:
        text = str(error)
        raise type(error)(f"{path}: {text}" if path and not text.startswith(path) else text) from None


def _value(where: str, value: Any, kind: Any) -> Any:
    """A setting of this type; TOML has no word for None, so `none` stands for it where None is allowed."""
    kinds = get_args(kind)
    if type(None) in kinds and value in ("none", "None"):
        return None
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if get_origin(kind) is Literal:
            asked = f"one of {', '.join(map(repr, kinds))}"
        else:
            found = re.match("Expected `(.+?)`", str(error))
            asked = found[1].replace(" | null", " or none") if found else str(error)
        raise ConfigError(f"{where} must be {asked}, got {cut(repr(value), 100)}") from None


def defaults(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    """A group's default as a tree, so that naming one setting keeps the others."""
    return {} if field.default is msgspec.NODEFAULT else _tree(field.default)


def _tree(group: msgspec.Struct) -> dict[str, Any]:
    values = {f.name: getattr(group, f.name) for f in msgspec.structs.fields(group)}
    return {name: _tree(v) if isinstance(v, msgspec.Struct) else v for name, v in values.items()}


def as_tree(config: msgspec.Struct) -> dict[str, Any]:
    """Settings as plain data, for printing and for a manifest."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    return tree
