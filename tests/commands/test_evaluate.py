"""`esper eval`: the source of its settings, its opponents, and what it refuses before the first episode."""

from __future__ import annotations

import io
import itertools
import json
import re

import msgspec
import numpy as np
import pytest
from rich.console import Console

from esper.commands import evaluate
from esper.commands.evaluate import ControllerComparison, config_of, figures, results_tables
from esper.kasmina.blueprints import blueprint_index
from esper.leyline.checksums import seal_json
from esper.leyline.errors import ConfigError, UnknownNameError
from esper.leyline.events import spelled
from esper.simic.evaluation.comparison import Played
from esper.simic.evaluation.plan_search import Plan, PlanTable, impairment_and_block
from esper.simic.rewards import RewardConfig
from esper.simic.training.checkpointer import new_network, with_policy_network
from esper.simic.training.config import as_tree, load_config
from esper.tamiyo.network import NetworkConfig
from esper.tolaria.tasks import get_task


def test_settings_come_from_the_first_run_at_any_position(tmp_path):
    config = load_config(more={"task": "digits", "epochs": 7})
    manifest = {"status": "finished", "config": as_tree(config)}
    (tmp_path / "manifest.json").write_bytes(seal_json(json.dumps(spelled(manifest)).encode()))
    for names in ([str(tmp_path), "random"], ["random", str(tmp_path)]):
        config = config_of(names, None, simulated=False)
        assert (config.task, config.epochs) == ("digits", 7)
    assert config_of(["random"], "quick", simulated=False).task == "quick"


def test_policy_of_a_simulated_run_is_compared_on_the_given_task(tmp_path):
    manifest = {"status": "finished", "config": as_tree(load_config(preset="sim"))}
    (tmp_path / "manifest.json").write_bytes(seal_json(json.dumps(spelled(manifest)).encode()))
    assert config_of([str(tmp_path)], None, simulated=False).simulated
    config = config_of([str(tmp_path)], "digits", simulated=False)
    assert (config.simulated, config.task) == (False, "digits")
    with pytest.raises(ConfigError, match="Use one of them"):
        config_of([str(tmp_path)], "digits", simulated=True)


@pytest.mark.parametrize("names", [["none", "randm"], ["none", "wider"], ["wider", "none"], ["none", "no/such/run"]])
def test_unknown_controller_is_refused_before_any_episode(names, monkeypatch):
    comparison = ControllerComparison(load_config(more={"simulated": True}))
    monkeypatch.setattr(ControllerComparison, "play_one", lambda *_: pytest.fail("somebody played"))
    with pytest.raises((ConfigError, UnknownNameError)):
        comparison.play_all(names, range(2), Console(quiet=True))


def test_best_schedule_is_fitted_to_the_evaluated_episodes():
    comparison = ControllerComparison(load_config(more={"simulated": True, "epochs": 12}))
    best, nothing = comparison.play_all(["best-schedule", "none"], range(40_000, 40_020), Console(quiet=True))
    assert best.utility.mean() > nothing.utility.mean()


def test_best_schedule_is_fitted_in_worlds_of_the_fit_task(monkeypatch):
    fitted = []

    def fit(backend, worlds, *_args):
        fitted.append((backend.slots, worlds))
        return Plan()

    monkeypatch.setattr(evaluate, "fit_plan", fit)
    config = load_config(more={"task": "mend_digits", "epochs": 2})
    comparison = ControllerComparison(config, fit_task="sight_digits")
    best, nothing = comparison.play_all(["best-schedule", "none"], [10_000], Console(quiet=True))
    assert fitted == [(comparison.fitting.slots, range(256))]
    assert comparison.fitting.tasks.family.name == "sight_digits"
    ControllerComparison(config, fit_task="digits").play_all(["best-schedule"], [10_000], Console(quiet=True))
    assert fitted[1] == (get_task("digits").slots, range(64))  # a task has fewer training worlds than a family
    assert best.name == "best schedule of sight_digits (no growth)"
    np.testing.assert_array_equal(best.quality, nothing.quality)
    with pytest.raises(ConfigError, match="real hosts"):
        ControllerComparison(load_config(more={"simulated": True}), fit_task="sight_digits")


@pytest.fixture
def small_family(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(
        'host = "mlp"\ndatasets = ["digits"]\nwidths = [8]\nblocks = [2, 3]\nepochs = [4]\nbatches_per_epoch = 4\n'
        "val_size = 100\nsamples = [100]\nbatch = [8]\n"
    )
    return str(file)


def table_of(task, plans, worlds=(0, 1, 2, 3)):
    """Return a table in which the last plan is the best."""
    utility = [[0.1 * number] * len(worlds) for number in range(len(plans))]
    return PlanTable(task=task, episodes=9, worlds=list(worlds), plans=plans, utility=utility)


def test_plans_of_a_table_replace_the_search(small_family, monkeypatch):
    for search in ("fit_plan", "fit_plans_by_kind"):
        monkeypatch.setattr(evaluate, search, lambda *_: pytest.fail("a search"))
    plan = Plan(blueprint_index("norm"), 1, first=-1)
    plans = table_of(small_family, [Plan(), plan])
    comparison = ControllerComparison(load_config(more={"task": small_family}), plans=plans)
    names = ["none", "best-schedule", "best-per-kind", "best-per-impairment", "from-start"]
    waiting, *fitted, static = comparison.play_all(names, [10_000, 10_001], Console(quiet=True))
    last = [[comparison.backend.host(world).slots[-1]] for world in (10_000, 10_001)]
    for played in fitted:
        assert [list(structure) for structure in played.structures] == last
    assert fitted[0].name == f"best schedule ({plan})"
    rows = figures([waiting, *fitted, static], "small")["rows"]
    assert rows[0]["equal_test"] is None
    assert rows[4]["equal_test"] is None  # a static host spends a compute of its own
    for row, played in zip(rows[1:4], fitted, strict=True):
        assert row["equal_test"]["worlds"] == played.equal_test.tolist()
        assert row["equal_test_lead"]["mean"] == pytest.approx(np.mean(waiting.test - played.equal_test))


def test_plans_per_impairment_use_what_is_impaired(tmp_path):
    file = tmp_path / "impaired.toml"
    file.write_text(
        'host = "mlp"\ndatasets = ["digits"]\nwidths = [8]\nblocks = [3]\nimpairments = ["none", "width"]\n'
        "epochs = [4]\nbatches_per_epoch = 2\nval_size = 50\nsamples = [100]\nbatch = [8]\n"
    )
    config = load_config(more={"task": str(file)})

    def kind(world):
        return impairment_and_block(config.family().draw(world))

    plan = Plan(blueprint_index("norm"), 1)
    utility = [[0.0] * 40, [0.1 if kind(world) == "width 0" else -0.1 for world in range(40)]]
    table = PlanTable(task=str(file), episodes=9, worlds=list(range(40)), plans=[Plan(), plan], utility=utility)
    kinds = ("none", "width 0", "width 1", "width 2")
    worlds = [next(w for w in itertools.count(10_000) if kind(w) == each) for each in kinds]
    played = ControllerComparison(config, plans=table).play_one("best-per-impairment", worlds, [])
    assert [bool(structure) for structure in played.structures] == [each == "width 0" for each in kinds]
    assert played.name == "best schedule per impairment and block, both known"


def test_unusable_plans_are_refused_before_any_episode(small_family, tmp_path, monkeypatch):
    monkeypatch.setattr(ControllerComparison, "play_one", lambda *_: pytest.fail("somebody played"))

    def refused(message, table, name="best-schedule", **more):
        with pytest.raises(ConfigError, match=message):
            ControllerComparison(load_config(more={"task": small_family} | more), plans=table).play_all(
                ["none", name], [10_000], Console(quiet=True)
            )

    norm = Plan(blueprint_index("norm"), 1)
    dear = msgspec.structs.replace(table_of(small_family, [norm]), reward=RewardConfig(rent_macs=0.05))
    refused(r"for another utility: reward\.rent_macs 0\.05 instead of 0\.005\.", dear)
    refused("--plans needs real hosts", table_of(small_family, [norm]), simulated=True)
    refused("--plans .*'nosuch'.*no task named", table_of("nosuch", [norm]))
    refused("--plans .*there is no family file", table_of(str(tmp_path / "other.toml"), [norm]))
    refused("world 10000; worlds from 10000 on are held out", table_of(small_family, [norm], [0, 10_000]))
    for name in ("best-per-kind", "best-per-impairment"):
        refused("plans of one, not of 'digits'", table_of("digits", [norm]), name)
    conv = Plan(blueprint_index("conv_light"), 1)
    refused("plants conv_light, which no slot", table_of("digits", [norm, conv]))
    for name in ("best-schedule", "best-per-kind", "best-per-impairment"):
        refused("plants conv_light, which no slot", table_of(small_family, [norm, conv]), name)


def test_tables_of_real_hosts_fit_into_80_columns():
    rng = np.random.default_rng(0)
    names = ["learned (20261115-230455-fashion-3f2a)", "same structure from step 0", "none"]
    played = [
        Played(name, [0, 1, 2], *(size * (1 + rng.random(3)) for size in (0.4, 0.4, 1e6, 1e9, 0.1, 1e12)))
        for name in names
    ]
    out = io.StringIO()
    Console(file=out, width=80).print(results_tables(figures(played, "digits"), simulated=False))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for p in played:
        assert f"{p.test.mean():.1%} ± {100 * p.test.std(ddof=1):.1f}" in text
        assert f"{p.utility.mean():+.4f}" in text
        assert f"{p.params.mean():,.0f}" in text
        assert f"{p.macs.mean():,.0f}" in text


def test_initial_policy_keeps_its_own_shape():
    shipped = load_config(more={"start_from": "tamiyo"})
    assert new_network(shipped).config == with_policy_network(shipped).network
    other = load_config(sets=["network.width=32"], more={"start_from": "tamiyo"})
    with pytest.raises(ConfigError, match=r"other network settings .*Use --set network\.width=64 ") as error:
        with_policy_network(other)
    advice = re.findall(r"--set (\S+?)(?=,? )", str(error.value))
    followed = load_config(sets=advice, more={"start_from": "tamiyo"})
    assert with_policy_network(followed).network == new_network(shipped).config
    assert with_policy_network(load_config()).network == NetworkConfig()


@pytest.mark.parametrize("name", ["scale", "rent_params", "worst_quality", "rollback_penalty"])
def test_non_finite_reward_settings_are_refused(name):
    for value in ("inf", "nan"):
        with pytest.raises(ConfigError, match=rf"reward\.{name} must be"):
            load_config(sets=[f"reward.{name}={value}"])
    assert np.isfinite(load_config().reward.scale)
