"""Test coalition evaluation against a reference that sets alphas and statistics explicitly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.kasmina.body import Body
from esper.kasmina.forking import ForkPlan
from esper.kasmina.graft import graft
from esper.leyline.errors import ConfigError
from esper.leyline.stages import SeedStage
from esper.tolaria.coalitions import Coalitions, Config, evaluate, measure, statistics, step_configs
from tests.support.models import (
    ZOO,
    Case,
    LateMixer,
    call,
    causal,
    grow,
    grow_everywhere,
    images,
    main_output,
    tokens,
    vectors,
)

UNFORKABLE = {"sequence_first", "batch_mixer", "batch_statistics"}
CAUGHT_LATER = {"transposed_token_norm"}
"""Cases whose mixing of samples the graft probe misses and the first real chunk detects."""


def score(output: Any, _target: Any) -> Tensor:
    return main_output(output)


# -- reference: one configuration at a time, with alphas, hooks and buffers only


class Statistics:
    """Move each BatchNorm's statistics before every call by the documented formula, using hooks."""

    def __init__(self, body: Body) -> None:
        self.norms = [m for m in body.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.norms = [n for n in self.norms if n.running_mean is not None]
        self.statistics = {n: (n.running_mean.clone(), n.running_var.clone()) for n in self.norms}
        self.seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def run(self, forward: Callable[[], Any], act: Callable[[nn.Module, int, Tensor], None]) -> Any:
        count = dict.fromkeys(self.norms, 0)

        def before(norm: nn.Module, args: tuple[Tensor]) -> None:
            act(norm, count[norm], args[0])
            count[norm] += 1

        handles = [n.register_forward_pre_hook(before) for n in self.norms]
        try:
            return forward()
        finally:
            for handle in handles:
                handle.remove()
            for norm, (mean, var) in self.statistics.items():
                norm.running_mean.copy_(mean)
                norm.running_var.copy_(var)

    def of(self, forward: Callable[[], Any], main: dict[nn.Module, list[tuple[Tensor, Tensor]]] | None) -> Any:
        """Return means and variances of this configuration, under moved statistics if `main` is given."""
        moments: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {n: [] for n in self.norms}

        def act(norm: nn.Module, call: int, x: Tensor) -> None:
            dims = [d for d in range(x.ndim) if d != 1]
            moments[norm].append((x.mean(dims), x.var(dims, correction=0)))
            if main is not None:
                self.move(norm, moments[norm][call], main[norm][call])

        self.run(forward, act)
        return moments

    def move(self, norm: nn.Module, now: tuple[Tensor, Tensor], main: tuple[Tensor, Tensor]) -> None:
        mean, var = self.statistics[norm]
        ratio = (now[1] + norm.eps) / (main[1] + norm.eps)
        norm.running_mean.copy_(now[0] + ratio.sqrt() * (mean - main[0]))
        norm.running_var.copy_(ratio * var)


@torch.no_grad()
def brute_force(body: Body, inputs: Any, configs: Sequence[Config], calibration: Any = None) -> Tensor:
    """Return scores [K, N, Q] from one plain pass per configuration."""
    slots = [*body.players(), *body.training_slots]
    content = [(s, s.stage, s.amplitude) for s in slots]
    main = tuple(s.stage >= SeedStage.BLENDING for s in slots)
    calibration = inputs if calibration is None else calibration
    norms = Statistics(body)
    modes = [(m, m.training) for m in body.modules()]
    body.eval()

    def configure(config: Config) -> None:
        for (slot, stage, alpha), on in zip(content, config, strict=True):
            body.set_slot(slot, SeedStage.BLENDING, (alpha if stage >= SeedStage.BLENDING else 1.0) if on else 0.0)

    rows = []
    try:
        configure(main)
        of_main = norms.of(lambda: call(body, calibration), None)
        for config in configs:
            configure(config)
            now = norms.of(lambda: call(body, calibration), of_main)

            def act(norm: nn.Module, i: int, _x: Tensor, now: Any = now) -> None:
                norms.move(norm, now[norm][i], of_main[norm][i])

            rows.append(main_output(norms.run(lambda: call(body, inputs), act)))
    finally:
        for slot, stage, alpha in content:
            body.set_slot(slot, stage, alpha)
        for module, mode in modes:
            module.training = mode
    return torch.stack(rows)


def agree(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-4 * b.abs().max())


def quiet_evaluate(*args: Any, **kwargs: Any) -> Coalitions:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return evaluate(*args, **kwargs)


def all_configs(body: Body) -> list[Config]:
    return list(product((False, True), repeat=len(body.players()) + len(body.training_slots)))


@pytest.mark.parametrize("name", ZOO)
def test_scores_match_one_by_one_evaluation(name: str):
    case = ZOO[name]
    body, x = case.body(), case.batch(12)
    grow_everywhere(body)

    result = quiet_evaluate(body, [(x, torch.arange(12))], score, configs=all_configs(body))

    assert agree(result.scores, brute_force(body, x, result.configs))
    assert (result.scores[0] - result.row(result.main)).abs().max() > 1e-3  # the seeds have an effect


@pytest.mark.parametrize("name", ZOO)
def test_training_seed_gets_a_prospect_row_at_full_alpha(name: str):
    case = ZOO[name]
    body, x = case.body(), case.batch(12)
    *live, learner = body.slots
    grow_everywhere(body, {learner: SeedStage.TRAINING})

    result = quiet_evaluate(body, [(x, torch.arange(12))], score)

    assert result.slots == (*live, learner)
    assert result.players == len(live)
    assert result.configs == step_configs(len(live), 1)
    assert agree(result.scores, brute_force(body, x, result.configs))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(["residual", "mask", "early_exits", "cnn_channels_last", "two_inputs", "gpt2"]),
    chosen=st.lists(st.integers(0, 7), min_size=1, max_size=9),
    max_rows=st.integers(1, 100),
    learns=st.booleans(),
)
def test_any_configurations_and_chunk_sizes_are_exact(name: str, chosen: list[int], max_rows: int, learns: bool):
    case = ZOO[name]
    body, x = case.body(), case.batch(11)
    first = next(iter(body.slots))
    grow_everywhere(body, {first: SeedStage.TRAINING} if learns else None)
    configs = [all_configs(body)[i] for i in chosen]

    result = evaluate(body, [(x, torch.arange(11))], score, configs=configs, max_rows=max_rows)

    assert result.configs == list(dict.fromkeys(configs))
    assert agree(result.scores, brute_force(body, x, result.configs))
    assert not body.forking.failure


def test_evaluate_keeps_state_modes_and_rng_state():
    body = ZOO["residual"].body().train()
    body.model.stem[1].eval()
    grow_everywhere(body)
    before, modes = {k: v.clone() for k, v in body.state_dict().items()}, [m.training for m in body.modules()]
    dice = torch.get_rng_state()

    evaluate(body, [(images(8), torch.arange(8))], score)

    assert [m.training for m in body.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in body.state_dict().items())
    assert torch.equal(torch.get_rng_state(), dice)
    assert all("forward" not in vars(m) and not m._forward_pre_hooks for m in body.modules())


# -- amount of computation


class Counter:
    """Record the batch sizes of a module's calls."""

    def __init__(self, module: nn.Module) -> None:
        self.sizes: list[int] = []
        module.register_forward_hook(lambda _m, args, _out: self.sizes.append(args[0].shape[0]))


def proven(case: Case) -> Body:
    """Return a body whose forks are verified on a real batch, so that the guard adds no passes."""
    body = case.body()
    grow_everywhere(body)
    evaluate(body, [(case.batch(8), torch.arange(8))], score)
    return body


def test_layers_before_a_fork_are_computed_once():
    body = proven(ZOO["mlp_host"])
    counters = [Counter(m) for m in (body.model.layers[0], body.model.layers[1], body.model.layers[2], body.model.head)]
    seeds = [Counter(s.seed) for s in body.slots.values()]

    evaluate(body, [(vectors(10), torch.arange(10))], score)

    assert [c.sizes for c in counters] == [[10], [20], [40], [80]]
    assert [sum(c.sizes) for c in seeds] == [10, 20, 40]  # a seed runs only for rows in which it is on


def test_duplicate_configurations_are_evaluated_once():
    body = proven(ZOO["mlp_host"])
    head = Counter(body.model.head)

    result = evaluate(body, [(vectors(10), torch.arange(10))], score, configs=[(True,) * 3, (False,) * 3, (True,) * 3])

    assert result.configs == [(True,) * 3, (False,) * 3]
    assert head.sizes == [20]


def test_slot_in_a_residual_branch_forks_at_its_block():
    body = proven(ZOO["residual"])
    stem, first, second = (
        Counter(m) for m in (body.model.stem[0], body.model.stage1[0].conv1, body.model.stage2[0].conv1)
    )

    evaluate(body, [(images(6), torch.arange(6))], score, calibration=images(6))

    assert stem.sizes == [6, 6]  # calibration, then evaluation
    assert first.sizes == [12, 12]  # the block of the first slot runs for on and off
    assert second.sizes == [24, 24]


@pytest.mark.parametrize("limit", [8, 33, 64, 512])
def test_chunks_respect_max_rows_and_keep_results(limit: int):
    body = proven(ZOO["mlp_host"])
    x = vectors(50)
    whole = evaluate(body, [(x, torch.arange(50))], score, max_rows=10**6)
    head = Counter(body.model.head)

    result = evaluate(body, [(x, torch.arange(50))], score, max_rows=limit)

    assert max(head.sizes) <= limit
    assert sum(head.sizes) == 8 * 50
    assert agree(result.scores, whole.scores)


def test_batches_of_different_sizes_are_concatenated_in_order():
    body = proven(ZOO["transformer_host"])
    x = tokens(20)
    whole = evaluate(body, [(x, torch.arange(20))], score)

    parts = evaluate(body, [(x[:7], torch.arange(7)), (x[7:8], torch.arange(1)), (x[8:], torch.arange(12))], score)

    assert agree(parts.scores, whole.scores)


def test_unbatched_mask_of_batch_size_is_not_split():
    case = ZOO["causal_mask"]
    body = case.body()
    grow_everywhere(body)
    n = causal().shape[0]  # as many samples as tokens

    result = evaluate(body, [((tokens(n), causal()), torch.arange(n))], score, max_rows=2 * n)

    assert agree(result.scores, brute_force(body, (tokens(n), causal()), result.configs))
    assert not body.forking.failure


def test_tokenizer_output_is_accepted_as_a_batch():
    from transformers import BatchEncoding

    case = ZOO["bert"]
    body = graft(case.model(), list(case.at), probe=BatchEncoding(case.batch(4)))
    grow_everywhere(body)

    result = evaluate(body, [(BatchEncoding(case.batch(9)), torch.arange(9))], score, max_rows=20)

    assert agree(result.scores, brute_force(body, case.batch(9), result.configs))


# -- models that cannot fork


@pytest.mark.parametrize("name", sorted(UNFORKABLE))
def test_model_mixing_samples_is_detected_at_graft_and_warned_once(name: str):
    case = ZOO[name]
    body, x = case.body(), case.batch(12)
    assert None in body.forking.points.values()
    grow_everywhere(body)

    with pytest.warns(UserWarning, match="one by one"):
        first = evaluate(body, [(x, torch.arange(12))], score)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = evaluate(body, [(x, torch.arange(12))], score)

    assert torch.equal(first.scores, again.scores)


@pytest.mark.parametrize("case", [Case(LateMixer, vectors, ("layers.0", "layers.1")), ZOO["transposed_token_norm"]])
def test_mixing_missed_by_the_probe_is_detected_by_the_first_chunk(case: Case):
    body, x = case.body(), case.batch(12)
    assert None not in body.forking.points.values()
    grow_everywhere(body)

    with pytest.warns(UserWarning, match="influence each other"):
        result = evaluate(body, [(x, torch.arange(12))], score)

    assert agree(result.scores, brute_force(body, x, result.configs))


def test_zero_delta_does_not_verify_a_fork():
    case = Case(LateMixer, vectors, ("layers.0", "layers.1"))
    body, x = case.body(), case.batch(12)
    grow(body, "layers.1", scale=0.0)
    evaluate(body, [(x, torch.arange(12))], score)  # rows are equal: mixing cannot be detected
    assert not body.forking.proven

    grow(body, "layers.1")
    with pytest.warns(UserWarning, match="influence each other"):
        result = evaluate(body, [(x, torch.arange(12))], score)

    assert agree(result.scores, brute_force(body, x, result.configs))


def test_nan_host_is_not_reported_as_mixing():
    body = ZOO["cnn"].body()
    grow_everywhere(body)
    with torch.no_grad():
        body.model.head.bias[0] = float("nan")

    result = evaluate(body, [(images(6), torch.arange(6))], score)

    assert result.scores.isnan().any()
    assert not body.forking.failure


def test_nan_seed_affects_only_its_own_rows():
    case = ZOO["cnn_channels_last"]
    body, x = case.body(), case.batch(12)
    grow_everywhere(body, {"features.1": SeedStage.TRAINING})
    clean = evaluate(body, [(x, torch.arange(12))], score)
    with torch.no_grad():
        next(body.slots["features.1"].parameters()).fill_(float("inf"))

    result = evaluate(body, [(x, torch.arange(12))], score)

    assert agree(result.scores[:-1], clean.scores[:-1])
    assert not result.scores[-1].isfinite().all()


def test_each_fork_is_verified_at_first_use():
    class MixesEarly(LateMixer):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            x = x - x.mean(0) if x.shape[0] > 8 else x
            return self.head(self.layers[1](x))

    case = Case(MixesEarly, vectors, ("layers.0", "layers.1"))
    body, x = case.body(), case.batch(12)
    grow(body, "layers.1")
    evaluate(body, [(x, torch.arange(12))], score)  # after the mixing: exact
    assert not body.forking.failure

    grow(body, "layers.0")
    with pytest.warns(UserWarning, match="influence each other"):
        result = evaluate(body, [(x, torch.arange(12))], score)

    assert agree(result.scores, brute_force(body, x, result.configs))


# -- players


def test_fossils_are_on_and_germinated_seeds_off_in_every_row():
    case = ZOO["mlp_host"]
    body, x = case.body(), case.batch(9)
    grow(body, "layers.0", stage=SeedStage.FOSSILIZED, alpha=1.0)
    grow(body, "layers.1", stage=SeedStage.HOLDING, alpha=0.5)
    grow(body, "layers.2", stage=SeedStage.GERMINATED)

    result = evaluate(body, [(x, torch.arange(9))], score)

    assert result.slots == ("layers.1",)
    assert agree(result.row((True,)), main_output(body(x)))
    body.slots["layers.1"].remove_seed()
    assert agree(result.row((False,)), main_output(body(x)))


def test_body_without_seeds_has_one_configuration():
    case = ZOO["cnn"]
    body, x = case.body(), case.batch(9)

    result = evaluate(body, [(x, torch.arange(9))], score)

    assert result.configs == [()] == [result.main]
    assert torch.equal(result.scores[0], main_output(body(x)))


@pytest.mark.parametrize("players", range(8))
@pytest.mark.parametrize("prospects", range(3))
def test_step_configs_for_any_number_of_players(players: int, prospects: int):
    rows = step_configs(players, prospects)
    everyone, nobody = (True,) * players, (False,) * prospects

    assert len(set(rows)) == len(rows)
    assert everyone + nobody in rows
    assert (False,) * (players + prospects) in rows
    for i in range(players):
        assert tuple(j != i for j in range(players)) + nobody in rows
    for i in range(prospects):
        assert everyone + tuple(j == i for j in range(prospects)) in rows
    coalitions = 2**players if players <= 3 else players + 2
    assert len(rows) == coalitions + prospects


def test_plan_has_one_row_per_prefix_and_configuration():
    configs = [(False, False, True), (True, False, True), (True, True, False)]
    body = proven(ZOO["mlp_host"])

    plan = body.forking.plan(configs, list(body.slots), configs[2])

    assert [len(f.parents) for f in plan.forks] == [2, 3, 3]
    assert sorted(plan.order) == [0, 1, 2]


# -- statistics


def test_contributions_and_paired_errors_match_a_reference():
    rng = np.random.default_rng(0)
    configs = step_configs(2, 1)
    hard = rng.normal(size=40)  # per-sample difficulty shared by all configurations
    scores = {c: hard + 0.1 * rng.normal(size=40) + sum(c) for c in configs}
    result = Coalitions(("a", "b", "new"), 2, configs, torch.tensor(np.stack([scores[c] for c in configs])))

    measured = measure(result)

    def paired(one: Config, other: Config) -> tuple[float, float]:
        difference = [x - y for x, y in zip(scores[one], scores[other], strict=True)]
        mean = sum(difference) / 40
        return mean, (sum((d - mean) ** 2 for d in difference) / 39 / 40) ** 0.5

    main = (True, True, False)
    assert measured.quality == pytest.approx(scores[main].mean())
    assert measured.committed == pytest.approx(scores[False, False, False].mean())
    assert measured.contribution["a"] == pytest.approx(paired(main, (False, True, False)))
    assert measured.contribution["b"] == pytest.approx(paired(main, (True, False, False)))
    assert measured.prospect == {"new": pytest.approx(paired((True, True, True), main))}
    assert measured.contribution["a"][1] < scores[main].std() / 40**0.5 / 3  # pairing removes the shared difficulty


def test_one_sample_gives_a_nan_standard_error():
    result = Coalitions(("a",), 1, [(False,), (True,)], torch.tensor([[0.0], [1.0]]))

    assert measure(result).contribution["a"][0] == 1.0
    assert np.isnan(measure(result).contribution["a"][1])
    assert statistics(result).shape == (6,)


# -- BatchNorm


def test_statistics_are_moved_in_any_train_or_eval_mode():
    results = []
    for mode in ("body", "model", "neither"):
        body = ZOO["cnn"].body().train()
        grow_everywhere(body)
        if mode != "neither":
            (body if mode == "body" else body.model).eval()
        results.append(evaluate(body, [(images(12), torch.arange(12))], score).scores)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_frozen_norm_keeps_its_statistics():
    body = ZOO["cnn"].body().train()
    for norm in body.norms:
        norm.eval()
    grow_everywhere(body)
    x = images(12)

    result = evaluate(body, [(x, torch.arange(12))], score)

    body.eval()
    for slot in body.slots.values():
        slot.remove_seed()
    assert agree(result.row((False,) * 3), main_output(body(x)))


def test_main_configuration_keeps_its_statistics():
    case = ZOO["cnn_channels_last"]
    body, x = case.body(), case.batch(12)
    grow_everywhere(body)

    result = evaluate(body, [(x, torch.arange(12))], score, calibration=case.batch(5))

    assert agree(result.row(result.main), main_output(body(x)))


@pytest.mark.slow
@pytest.mark.parametrize("world", [0, 1])
def test_moved_statistics_are_accurate_where_stale_ones_are_not(world: int):
    """Compare with the network without the seed after updating its BatchNorm statistics on some batches."""
    from esper.tolaria.growing_network import WeightAverage
    from esper.tolaria.host_building import build_body
    from esper.tolaria.tasks import get_task, per_sample_correct

    task = get_task("fashion")
    data = task.load_data()
    body = build_body(task, data, world=world)
    slot = grow(body, "r0c0", "conv_heavy", stage=SeedStage.HOLDING, alpha=1.0, scale=0.0)
    optimizer = torch.optim.SGD(body.parameters(), lr=0.05, momentum=0.9)
    average = WeightAverage(body)
    body.train()
    for step in range(25):
        for x, y in task.minibatches(data, world, step):
            optimizer.zero_grad()
            nn.functional.cross_entropy(body(x), y).backward()
            nn.utils.clip_grad_norm_(body.parameters(), 1.0)
            optimizer.step()
            average.update()

    with average.applied():
        batch = [(data.val.x, data.val.y)]
        moved = measure(evaluate(body, batch, per_sample_correct, calibration=data.train.x[:128]))
        norms, body.norms = body.norms, []
        stale = measure(evaluate(body, batch, per_sample_correct))
        body.norms = norms
        body.set_slot(slot, SeedStage.HOLDING, 0.0)
        body.train()
        with torch.no_grad():
            for step in range(5):
                for x, _ in task.minibatches(data, world, step):
                    body(x)
            truth = per_sample_correct(body.eval()(data.val.x), data.val.y).mean().item()
    message = f"truth {truth:.3f}, moved {moved.committed:.3f}, stale {stale.committed:.3f}, with {moved.quality:.3f}"
    assert truth - stale.committed > 0.2, message
    assert abs(truth - moved.committed) < 0.06, message  # a few points, on any processor


# -- errors


def test_quality_that_is_not_per_sample_is_rejected():
    body = ZOO["mlp_host"].body()
    with pytest.raises(ConfigError, match="one score per sample"):
        evaluate(body, [(vectors(6), torch.arange(6))], lambda out, _y: out.mean())


def test_wrong_configuration_length_and_no_batches_are_rejected():
    body = proven(ZOO["mlp_host"])
    with pytest.raises(ConfigError, match="has 2 entries; expected one"):
        evaluate(body, [(vectors(6), torch.arange(6))], score, configs=[(True, False)])
    with pytest.raises(ConfigError, match="no validation batch"):
        evaluate(body, [], score)


def test_error_during_evaluation_removes_the_plan():
    body = proven(ZOO["mlp_host"])

    def fails(_output: Any, _target: Any) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        evaluate(body, [(vectors(6), torch.arange(6))], fails)
    assert all(s.fork is None for s in body.slots.values())
    assert isinstance(ForkPlan.single((True,), ["a"]), ForkPlan)


def test_full_table_is_evaluated_before_a_verdict():
    assert len(step_configs(5, 1)) == 1 + 5 + 1 + 1
    assert len(step_configs(5, 1, may_commit=True)) == 2**5 + 1
    assert len(step_configs(7, 0, may_commit=True)) == 1 + 7 + 1
    body = graft(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), at=[*"01234"], probe=torch.randn(3, 4))
    for slot in body.slots.values():
        body.plant(slot.name, "lora")
        body.set_slot(slot, SeedStage.BLENDING, 0.5)
    batch = [(torch.randn(8, 4), torch.zeros(8))]
    assert len(evaluate(body, batch, lambda out, _y: out[:, 0]).configs) == 7
    body.set_slot(body.slots["0"], SeedStage.HOLDING, 1.0)
    assert len(evaluate(body, batch, lambda out, _y: out[:, 0]).configs) == 32
