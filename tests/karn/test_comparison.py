"""Comparing runs: differences pair the same worlds, decisions are counted, and what does not pair is named."""

import pytest
import torch
from torch import nn

import esper
from esper.karn import held_out
from esper.karn.comparison import compare_runs
from esper.leyline.errors import ConfigError, DataError
from tests.support.compared_runs import decided, evaluation, write_evaluation, write_run


def measures(pair):
    return {measure.metric: measure for measure in pair.measures}


def test_differences_pair_worlds_and_not_environments(tmp_path):
    a = write_run(
        tmp_path / "a", [{"world": 7, "quality": 0.5, "utility": 0.1}, {"world": 3, "quality": 0.9, "utility": 0.2}]
    )
    b = write_run(
        tmp_path / "b",
        [{"world": 3, "quality": 0.8, "utility": 0.4, "params": 120, "macs": 2000},
         {"world": 7, "quality": 0.7, "utility": 0.1}, {"world": 9, "quality": 0.0}],
    )  # fmt: skip
    (pair,) = compare_runs([a, b]).pairs
    assert (pair.first, pair.other, pair.scope, pair.worlds) == ("a", "b", "episodes", [3, 7])
    by_metric = measures(pair)
    assert list(by_metric) == ["quality", "utility", "params", "train_macs"]
    quality = by_metric["quality"]
    assert (quality.first, quality.other, quality.worlds) == (pytest.approx(0.7), pytest.approx(0.75), 2)
    assert quality.lead.mean == pytest.approx(0.05)
    assert (quality.lead.low, quality.lead.high) == (pytest.approx(-0.1), pytest.approx(0.2))
    assert (quality.lead.wins, quality.lead.ties, quality.lead.losses) == (1, 0, 1)
    assert by_metric["utility"].lead.mean == pytest.approx(0.1)
    assert by_metric["params"].lead.mean == 10
    assert by_metric["train_macs"].lead.mean == 500


def test_last_finished_episode_of_a_world_counts(tmp_path):
    earlier = {"env": 0, "world": 4, "quality": 0.1, "decisions": [decided(1)]}
    a = write_run(tmp_path / "a", [earlier, {"env": 1, "world": 4, "episode": 2, "quality": 0.6}, earlier | {"env": 2}])
    b = write_run(tmp_path / "b", [{"world": 4, "quality": 0.7}])
    (pair,) = compare_runs([a, b]).pairs
    assert measures(pair)["quality"].first == 0.6
    assert pair.choices.operations == {}


def test_decisions_are_counted_and_the_first_difference_is_named(tmp_path):
    shared = decided(2)
    a = write_run(
        tmp_path / "a",
        [{"decisions": [shared, decided(5, "PRUNE", blueprint="")], "structure": {"r0c0": "norm"}},
         {"decisions": [shared]}, {"decisions": [shared, decided(4, "WAIT"), decided(5, happened=False)]}],
    )  # fmt: skip
    b = write_run(
        tmp_path / "b",
        [{"decisions": [shared, decided(4, blueprint="lora", style="ADD")],
          "structure": {"r0c0": "lora", "r1c0": "lora"}},
         {"decisions": [decided(2, blueprint="lora")]}, {"decisions": [shared]}],
    )  # fmt: skip
    (pair,) = compare_runs([a, b]).pairs
    choices = pair.choices
    assert choices.operations == {"GERMINATE": (3, 4), "PRUNE": (1, 0)}
    assert choices.blueprints == {"norm": (3, 2), "lora": (0, 2)}
    assert pair.structures == {"lora": (0, 2), "norm": (1, 0)}
    assert choices.same_worlds == 1
    texts = [(d.world, d.step, d.first, d.other) for d in choices.first_differences]
    assert texts == [
        (0, 4, "WAIT", "GERMINATE r0c0 (lora, ADD)"),
        (1, 2, "GERMINATE r0c0 (norm)", "GERMINATE r0c0 (lora)"),
    ]


def test_runs_without_recorded_decisions_have_no_choices(tmp_path):
    a, b = (write_run(tmp_path / name, [{}, {}], steps=False) for name in "ab")
    (pair,) = compare_runs([a, b]).pairs
    assert pair.choices is None
    assert "train_macs" not in measures(pair)


def test_runs_of_grow_that_differ_in_their_world_are_one_arm(tmp_path):
    hosts = ("grown", "no growth")
    paths = []
    for birth in ("isolated", "open"):
        for world in (0, 1):
            outcomes = [{"world": world, "quality": 0.6 + 0.1 * (birth == "open")}, {"world": world, "quality": 0.2}]
            config = {"rules": {"birth": birth}, "seed": world}
            paths.append(
                write_run(tmp_path / f"{birth}-{world}", outcomes, command="grow", config=config, env_names=hosts)
            )
    comparison = compare_runs(paths)
    assert [arm.name for arm in comparison.arms] == ["isolated-0 (2 runs)", "open-0 (2 runs)"]
    assert [arm.settings for arm in comparison.arms] == [{"rules.birth": "isolated"}, {"rules.birth": "open"}]
    (pair,) = comparison.pairs
    assert pair.worlds == [0, 1]
    assert measures(pair)["quality"].lead.mean == pytest.approx(0.1)


def test_single_run_of_grow_compares_its_hosts(tmp_path):
    outcomes = [{"world": 5, "quality": 0.6}, {"world": 5, "quality": 0.4}]
    path = write_run(tmp_path / "run", outcomes, command="grow", env_names=("grown", "no growth"))
    (pair,) = compare_runs([path]).pairs
    assert (pair.first, pair.other) == ("grown", "no growth")
    lead = measures(pair)["quality"].lead
    assert lead.mean == pytest.approx(-0.2)
    assert not lead.is_sure  # one world has no interval


def test_evaluations_compare_their_first_controllers_and_alone_all_of_them(tmp_path):
    a = write_evaluation(tmp_path / "a", ("learned", [0.5, 0.7]), ("none", [0.1, 0.3]))
    b = write_evaluation(tmp_path / "b", ("learned", [0.3]), ("random", [0.0]), worlds=(101,))
    (pair,) = compare_runs([a, b]).pairs
    assert (pair.first, pair.other, pair.worlds) == ("a: learned", "b: learned", [101])
    assert measures(pair)["utility"].lead.mean == pytest.approx(-0.4)
    assert pair.structures == {"norm": (0, 1)}
    (pair,) = compare_runs([a]).pairs
    assert (pair.first, pair.other, pair.scope) == ("learned", "none", "held_out")
    assert measures(pair)["quality"].lead.mean == pytest.approx(-0.4)


def test_training_runs_compare_held_out_worlds_as_well(tmp_path):
    runs = []
    for name, values in (("a", [0.1, 0.2]), ("b", [0.2, 0.4])):
        runs.append(write_run(tmp_path / name, [{}]))
        held_out.write(runs[-1], evaluation(("learned", values), ("none", [0.0, 0.0])), rounds=2)
    pairs = compare_runs(runs).pairs
    assert [(pair.scope, pair.worlds) for pair in pairs] == [("episodes", [0]), ("held_out", [100, 101])]
    assert measures(pairs[1])["utility"].lead.mean == pytest.approx(0.15)
    assert [pair.other for pair in compare_runs(runs[:1]).pairs] == ["none"]


def test_what_does_not_pair_is_named(tmp_path):
    a = write_run(tmp_path / "a", [{"world": 0}, {"world": 1}, {"world": 2}])
    b = write_run(tmp_path / "b", [{"world": 8}], config={"ppo": {"lr": 0.2}})
    with pytest.raises(DataError, match=r"b has training world 8, a has training worlds 0 to 2: no world in common"):
        compare_runs([a, b])
    other = write_run(tmp_path / "other", [{"world": 0}], task="digits")
    with pytest.raises(DataError, match="other is of task 'digits', a of task 'rescue'"):
        compare_runs([a, other])
    empty = write_run(tmp_path / "empty", [])
    with pytest.raises(DataError, match="empty has no finished episode: wait for it, or continue it with --resume"):
        compare_runs([a, empty])
    same = write_run(tmp_path / "same", [{"world": 0}])
    comparison = compare_runs([a, same, other])
    assert [pair.other for pair in comparison.pairs] == ["same"]
    assert comparison.notes == ["other is of task 'digits', a of task 'rescue': compare runs of one task."]


def test_wrong_arguments_state_a_remedy(tmp_path):
    a = write_run(tmp_path / "a", [{}])
    for paths, text in (([], "no run was given"), ([a], "nothing to compare with a"), ([a, a], "given twice")):
        with pytest.raises(ConfigError, match=text):
            compare_runs(paths)
    (a / held_out.HELD_OUT).write_bytes(b"{}")
    with pytest.raises(DataError, match="Remove the file"):
        compare_runs([a, write_run(tmp_path / "b", [{}])])
    broken = write_evaluation(tmp_path / "broken", ("x", [0.1, 0.2]))
    (broken / "eval.json").write_text('{"worlds": 3}')
    with pytest.raises(DataError, match="esper eval"):
        compare_runs([broken])


def test_names_from_files_contain_no_control_characters(tmp_path):
    hostile = "\x1b[2J\x9b"
    decision = decided(1, hostile, slot=hostile, blueprint=hostile)
    outcome = {"decisions": [decision], "structure": {"r0c0": hostile}}
    a = write_run(tmp_path / "a", [outcome], config={hostile: {"x": hostile}}, env_names=(hostile,))
    b = write_run(tmp_path / "b", [{}], config={hostile: {"x": "1"}})
    c = write_evaluation(tmp_path / "c", (hostile, [0.1, 0.2]), (hostile, [0.1, 0.2]))
    for comparison in (compare_runs([a, b]), compare_runs([c])):
        assert not {"\x1b", "\x9b"} & set(str(comparison))


def test_recorded_loops_compare_the_networks_at_their_ends(tmp_path):
    data = esper.load_data("digits")
    batch = (data.val.x[:50], data.val.y[:50])
    for name, controller in (("a", "none"), ("b", "schedule")):
        for world in (0, 1):
            torch.manual_seed(world)
            model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
            with esper.record("mine", out=tmp_path / f"{name}{world}") as run:
                body = esper.graft(model, at=["1"], probe=batch[0])
                optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
                grower = esper.Grower(body, optimizer, controller=controller, rng_seed=world, telemetry=run.hub)
                for _ in range(3):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(body(batch[0]), batch[1]).backward()
                    optimizer.step()
                    last = grower.step([batch])
    result = compare_runs([tmp_path / "a0", tmp_path / "a1", tmp_path / "b0", tmp_path / "b1"])
    assert [side.settings["controller"] for side in result.arms] == ["none", "schedule"]
    [pair] = result.pairs
    assert [len(side.paths) for side in result.arms] == [2, 2]
    assert pair.worlds == [0, 1]
    assert pair.structures == {"conv_light": (0, 2)}
    assert measures(pair)["quality"].worlds == 2
    [alone] = compare_runs([tmp_path / "a1", tmp_path / "b1"]).pairs
    assert measures(alone)["quality"].other == pytest.approx(last.quality)
    assert alone.choices is not None
    assert alone.choices.blueprints == {"conv_light": (0, 1)}
