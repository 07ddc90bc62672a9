"""The settings tree: precedence, lossless round trips, and errors that name the path of the fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.actions import HEAD_OPTIONS, Head
from esper.leyline.errors import ConfigError, EsperError
from esper.simic.training.config import (
    HELD_OUT_FROM,
    PRESETS,
    TrainConfig,
    as_tree,
    built,
    config_of_run,
    load_config,
    merged,
    parse_set,
)
from esper.tamiyo.policy.action_masks import DEFAULT_FIXED
from esper.tolaria.families import FAMILIES
from esper.tolaria.tasks import TASKS


def toml(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    return file


# ---- precedence


def test_later_sources_override_earlier_ones(tmp_path: Path) -> None:
    file = toml(tmp_path, "envs = 5\n[ppo]\nminibatches = 1\nlr = 0.5\n")
    assert load_config().envs == 16
    assert load_config(preset="quick").envs == 4
    assert load_config(preset="quick", file=file).envs == 5
    assert load_config(preset="quick", file=file, sets=["envs=6", "envs=7"]).envs == 7
    last = load_config(preset="quick", file=file, sets=["envs=6"], more={"envs": 8, "rounds": None})
    assert (last.envs, last.rounds) == (8, PRESETS["quick"]["rounds"])


def test_setting_one_field_of_a_group_keeps_the_others(tmp_path: Path) -> None:
    file = toml(tmp_path, "[rules]\nmin_prune_age = 9\n[rules.thresholds]\nblend_dwell = 3\n")
    config = load_config(preset="quick", file=file, sets=["rules.thresholds.z=1", "rules.max_seeds=2", "ppo.lr=0.1"])
    plain = TrainConfig().rules
    thresholds = msgspec.structs.replace(plain.thresholds, blend_dwell=3, z=1.0)
    assert config.rules == msgspec.structs.replace(plain, min_prune_age=9, max_seeds=2, thresholds=thresholds)
    assert (config.ppo.lr, config.ppo.minibatches, config.ppo.epochs) == (0.1, 2, TrainConfig().ppo.epochs)


def leaves(tree: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        where = f"{path}.{key}" if path else key
        inner = isinstance(value, dict) and value and key != "fixed"
        pairs += leaves(value, where) if inner else [(where, value)]
    return pairs


EVERY_SETTING = leaves(as_tree(TrainConfig()))


@pytest.mark.parametrize(("path", "value"), EVERY_SETTING, ids=[path for path, _ in EVERY_SETTING])
def test_every_setting_can_be_set_alone(path: str, value: Any) -> None:
    """Set each to its default by name: its siblings stay unchanged."""
    tree: Any = value
    for part in reversed(path.split(".")):
        tree = {part: tree}
    assert built(TrainConfig, tree) == TrainConfig()
    if isinstance(value, (int, float, str)):
        text = str(value).lower() if isinstance(value, bool) else str(value)
        assert load_config(sets=[f"{path}={text}"]) == TrainConfig()
    if value is None:
        assert load_config(sets=[f"{path}=none"]) == TrainConfig()


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_config_survives_a_round_trip_as_plain_data(preset: str | None) -> None:
    config = load_config(preset=preset, sets=["rules.thresholds.fossil_contribution=-inf", "fixed.style=LINEAR_ADD"])
    assert built(TrainConfig, as_tree(config)) == config


def test_presets_name_existing_tasks_and_no_held_out_worlds() -> None:
    for name in PRESETS:
        config = load_config(preset=name)
        assert config.task in (*TASKS, *FAMILIES)
        assert config.pool <= HELD_OUT_FROM


trees = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
).filter(lambda t: isinstance(t, dict))


@given(trees, trees)
def test_merge_keeps_what_is_not_overridden(tree: dict[str, Any], over: dict[str, Any]) -> None:
    before = repr(tree), repr(over)
    out = merged(tree, over)
    assert (repr(tree), repr(over)) == before
    assert merged(out, over) == out
    assert out.keys() == tree.keys() | over.keys()
    message = {path for path, _ in leaves(over)}
    for path, value in leaves(tree):
        if not any(path == s or path.startswith(f"{s}.") or s.startswith(f"{path}.") for s in message):
            assert (path, value) in leaves(out)


# ---- values


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("ppo.lr=3e-4", {"ppo": {"lr": 3e-4}}),
        (" ppo.lr = 1 ", {"ppo": {"lr": 1}}),
        ("simulated=true", {"simulated": True}),
        ("task=quick", {"task": "quick"}),
        ("task='quick'", {"task": "quick"}),
        ("start_from=runs/a=b/c.safetensors", {"start_from": "runs/a=b/c.safetensors"}),
        ("fixed={}", {"fixed": {}}),
        ("a.b.c=-inf", {"a": {"b": {"c": float("-inf")}}}),
        ("x=[1, 2]", {"x": [1, 2]}),
    ],
)
def test_set_value_is_parsed_as_toml_or_else_as_a_string(text: str, tree: dict[str, Any]) -> None:
    assert parse_set(text) == tree


@pytest.mark.parametrize("text", ["ppo.lr", "=3", "a..b=1", ".a=1", "a b=1", ""])
def test_malformed_set_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a\.b=c"):
        load_config(sets=[text])


# ---- fixed heads


def test_default_fixed_heads_are_those_of_the_masks() -> None:
    assert TrainConfig().fixed_heads() == DEFAULT_FIXED
    assert load_config(sets=["fixed={}"]).fixed_heads() == {}


def test_empty_table_frees_the_heads_a_file_fixed(tmp_path: Path) -> None:
    file = toml(tmp_path, "[fixed]\ntempo = 'FAST'\n")
    assert load_config(file=file).fixed_heads() == {Head.TEMPO: 0}
    assert load_config(file=file, sets=["fixed={}"]).fixed_heads() == {}


@pytest.mark.parametrize("head", [h for h in Head if HEAD_OPTIONS[h] is not None])
def test_any_head_can_be_fixed_at_any_option_except_op_at_wait(head: Head) -> None:
    for number, option in enumerate(HEAD_OPTIONS[head] or ()):
        if option == "WAIT":
            continue
        for word in (option, option.lower()):
            assert load_config(sets=[f"fixed.{head.name.lower()}={word}"]).fixed_heads() == {head: number}


# ---- errors that name the fault


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ppo.lrr=1", ["'ppo.lrr'", "'lr'"]),
        ("pppo.lr=1", ["'pppo'", "'ppo'"]),
        ("rules.thresholds.blend_dwel=1", ["'rules.thresholds.blend_dwel'", "'blend_dwell'"]),
        ("ppo=3", ["ppo", "group", "3"]),
        ("rules.thresholds=strict", ["rules.thresholds", "group"]),
        ("ppo.lr=abc", ["ppo.lr", "float", "'abc'"]),
        ("envs=1.5", ["envs", "int", "1.5"]),
        ("seed=true", ["seed", "int", "True"]),
        ("epochs=soon", ["epochs", "int or none", "'soon'"]),
        ("envs=none", ["envs", "int", "'none'"]),
        ("network.width=0", ["network.width", "8192"]),
        ("ppo.lr=-1", ["ppo.lr", "-1"]),
        ("ppo.lr=nan", ["ppo.lr", "nan"]),
        ("envs=0", ["envs", "0"]),
        ("envs=1000000000", ["envs", "65536"]),
        ("rounds=0", ["rounds", "0"]),
        ("epochs=0", ["epochs", "0"]),
        ("ppo.minibatches=0", ["ppo.minibatches", "1"]),
        ("fixed.op=wait", ["fixed.op", "WAIT"]),
        ("rules.thresholds.z=-1", ["rules.thresholds", "z", "-1"]),
        ("rules.max_seeds=-1", ["rules", "max_seeds", "-1"]),
        ("sim.horizon=0", ["sim", "horizon", "0"]),
        ("engine.incubation=warm", ["engine.incubation", "'shadow'", "'warm'"]),
        ("reward.mode=utilty", ["reward", "'utilty'", "'utility'"]),
        ("reward.gamma=2", ["reward.gamma", "2"]),
        ("telemetry=noraml", ["telemetry", "'noraml'", "'normal'"]),
        ("fixed.tempo=FASTT", ["fixed.tempo", "'FASTT'", "'FAST'"]),
        ("fixed.tempoo=FAST", ["'tempoo'", "'tempo'"]),
        ("fixed.slot=1", ["'slot'"]),
        ("fixed.tempo=1", ["fixed", "str", "1"]),
    ],
)
def test_error_names_the_path_the_value_and_the_nearest_valid_name(text: str, words: list[str]) -> None:
    with pytest.raises(EsperError) as error:
        load_config(sets=[text])
    for word in words:
        assert word in str(error.value)


def test_settings_of_a_run_of_another_version_are_refused_as_such() -> None:
    run = Path("runs/old")
    tree = as_tree(TrainConfig(seed=3))
    assert config_of_run(tree, run, {"rounds": 7}) == TrainConfig(seed=3, rounds=7)
    old = merged(tree, {"network": {"core": "gru"}})
    with pytest.raises(ConfigError, match=r"runs/old was trained with other settings .*'network.core'.*Train it again"):
        config_of_run(old, run)


def test_unknown_presets_and_unreadable_files_are_reported(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"preset": "quik"}, "Did you mean 'quick'"),
        ({"file": tmp_path / "none.toml"}, "there is no config file"),
        ({"file": tmp_path}, "cannot read"),
        ({"file": toml(tmp_path, "[ppo\nlr=3")}, "is not TOML"),
    ]
    for arguments, words in cases:
        with pytest.raises(EsperError, match=words):
            load_config(**arguments)


def test_wrong_key_in_a_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rules\.thresholds\.blendwell.*blend_dwell"):
        load_config(file=toml(tmp_path, "[rules.thresholds]\nblendwell = 3"))
