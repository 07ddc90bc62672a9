"""The rollout buffer: stored rows are read back, padding is never read, a pass visits every step once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.errors import ConfigError, DataError
from esper.simic.agent import TamiyoRolloutBuffer
from esper.simic.agent.advantages import gae_rows, gae_scan

T, E, F, M = 11, 5, 3, 7
FIELDS = (
    "obs", "masks", "actions", "log_probs", "values", "rewards", "done", "truncated", "bootstrap", "forced",
)  # fmt: skip
IN_MINIBATCHES = ("obs", "masks", "actions", "log_probs", "values", "advantages", "returns", "forced")


def empty_buffer(steps=T, envs=E):
    return TamiyoRolloutBuffer(steps=steps, envs=envs, features=F, masks=M)


def random_row(rng, envs=E):
    flag = lambda *shape: rng.random((envs, *shape)) < 0.2  # noqa: E731
    number = lambda *shape: rng.normal(size=(envs, *shape)).astype(np.float32)  # noqa: E731
    return {
        "obs": number(F), "masks": flag(M), "actions": rng.integers(0, 5, (envs, 8)), "log_probs": number(8),
        "values": number(), "rewards": number(), "done": flag(), "truncated": flag(), "bootstrap": number(),
        "forced": flag(),
    }  # fmt: skip


def filled(counts, seed=0, steps=T):
    """Return a buffer whose columns have these numbers of valid steps, and the rows that were written."""
    rng, counts = np.random.default_rng(seed), np.asarray(counts)
    buffer, rows = empty_buffer(steps, len(counts)), []
    for t in range(steps):
        rows.append(random_row(rng, len(counts)))
        buffer.add(**rows[-1], alive=t < counts)
    return buffer, rows


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_everything_written_is_read_back(kind):
    rng, buffer = np.random.default_rng(0), empty_buffer()
    rows = [random_row(rng) for _ in range(T)]
    for row in rows:
        buffer.add(**{name: kind(x) for name, x in row.items()})
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(buffer, name).numpy(), np.stack([row[name] for row in rows]))
    assert buffer.step_counts.tolist() == [T] * E
    assert buffer.valid.all()


def test_row_is_copied_without_ties_to_the_callers_arrays_or_graph():
    buffer, row = empty_buffer(), random_row(np.random.default_rng(0))
    before = {name: x.copy() for name, x in row.items()}
    values = torch.from_numpy(row["values"].copy()).requires_grad_()
    buffer.add(**{**row, "values": values * 1.0})
    for x in row.values():
        x[...] = 1
    for name in FIELDS:
        stored = getattr(buffer, name)
        assert not stored.requires_grad
        np.testing.assert_array_equal(stored[0].numpy(), before[name])


def test_read_only_arrays_are_accepted(recwarn):
    row = random_row(np.random.default_rng(0))
    row["masks"].setflags(write=False)
    buffer = empty_buffer()
    buffer.add(**row)
    np.testing.assert_array_equal(buffer.masks[0].numpy(), row["masks"])
    assert not recwarn.list


def test_omitted_fields_are_zero_even_where_an_older_round_wrote():
    buffer, _ = filled([T] * E)
    buffer.reset()
    row = random_row(np.random.default_rng(5))
    del row["bootstrap"], row["forced"]
    buffer.add(**row)
    assert not buffer.bootstrap[0].any()
    assert not buffer.forced[0].any()


def test_counts_follow_the_alive_mask():
    counts = [0, 3, T, 1, 7]
    buffer, _ = filled(counts)
    assert buffer.step_counts.dtype == torch.int64
    assert buffer.step_counts.tolist() == counts
    assert buffer.valid.sum(0).tolist() == counts
    assert buffer.valid[:3, 1].all()


def test_finished_environment_cannot_become_alive_again():
    buffer, row = empty_buffer(), random_row(np.random.default_rng(0))
    for alive in (True, False, True):
        buffer.add(**row, alive=np.array([True, alive, True, True, True]))
    with pytest.raises(DataError, match="alive again"):
        buffer.finish()
    buffer.reset()
    buffer.add(**row)
    assert buffer.finish() is buffer


def test_reset_buffer_equals_a_new_one():
    used, _ = filled([T] * E, seed=1)
    used.compute_advantages_and_returns(0.9, 0.9)
    used.reset()
    assert not used.valid.any()
    fresh = empty_buffer()
    rng = np.random.default_rng(2)
    for _ in range(4):  # fewer steps than before: the rest still holds the old round
        row = random_row(rng)
        used.add(**row)
        fresh.add(**row)
    for tensor, expected in zip(
        used.compute_advantages_and_returns(0.9, 0.9), fresh.compute_advantages_and_returns(0.9, 0.9), strict=True
    ):
        assert torch.equal(tensor, expected)
    batches = [list(b.minibatches(2, torch.Generator().manual_seed(0))) for b in (used, fresh)]
    for a, b in zip(*batches, strict=True):
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in a.__slots__)


@given(seed=st.integers(0, 2**32 - 1), counts=st.lists(st.integers(0, T), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_advantages_of_stored_rows_are_equal_by_both_methods(seed, counts):
    buffer, rows = filled(counts, seed)
    advantages, returns = buffer.finish().compute_advantages_and_returns(0.97, 0.9)
    assert advantages is buffer.advantages
    assert returns is buffer.returns
    fields = [np.stack([row[n] for row in rows]) for n in ("rewards", "values", "done", "truncated", "bootstrap")]
    expected = gae_rows(*fields, np.asarray(counts), 0.97, 0.9)
    scanned = gae_scan(*map(torch.from_numpy, fields), torch.tensor(counts), 0.97, 0.9)
    for tensor, e, s in zip((advantages, returns), expected, scanned, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), e)
        torch.testing.assert_close(tensor, s, rtol=1e-5, atol=1e-5)


def test_buffer_on_another_device_gives_the_same_numbers_by_scan():
    here, _ = filled([0, 3, 6, 1, 7], seed=1, steps=8)
    there, _ = filled([0, 3, 6, 1, 7], seed=1, steps=8)
    there.device = torch.device("cuda")  # the tensors stay: only the choice of method is tested
    for tensor, expected in zip(
        there.compute_advantages_and_returns(0.9, 0.8), here.compute_advantages_and_returns(0.9, 0.8), strict=True
    ):
        assert tensor.any()
        torch.testing.assert_close(tensor, expected)


def test_last_values_apply_only_to_columns_without_an_end():
    buffer, row = empty_buffer(), random_row(np.random.default_rng(0))
    row["done"], row["truncated"] = np.arange(E) == 1, np.arange(E) == 2
    nothing = np.zeros(E, bool)
    buffer.add(**{**row, "done": nothing, "truncated": nothing})
    buffer.add(**row, alive=np.arange(E) != 4)
    before = buffer.bootstrap.clone()
    buffer.finish(np.arange(10.0, 10.0 + E))
    assert buffer.bootstrap[1, [0, 3]].tolist() == [10.0, 13.0]
    assert buffer.bootstrap[0, 4] == 14.0  # its last step was the first
    assert torch.equal(buffer.bootstrap[1, [1, 2, 4]], before[1, [1, 2, 4]])
    assert torch.equal(buffer.bootstrap[0, :4], before[0, :4])


def test_empty_buffer_has_no_advantages_and_no_minibatch():
    buffer = empty_buffer()
    advantages, _ = buffer.finish(np.ones(E)).compute_advantages_and_returns(0.9, 0.9)
    assert not advantages.any()
    assert not list(buffer.minibatches(2, torch.Generator()))


columns = {
    "seed": st.integers(0, 2**32 - 1),
    "counts": st.lists(st.integers(0, T), min_size=1, max_size=6),
    "count": st.integers(1, 6 * T + 3),
}


@given(**columns)
@settings(max_examples=200, deadline=None)
def test_pass_visits_every_valid_step_once_as_stored(seed, counts, count):
    buffer, _ = filled(counts, seed)
    buffer.compute_advantages_and_returns(0.9, 0.9)
    visits: list[tuple[int, int]] = []
    for batch in buffer.minibatches(count, torch.Generator().manual_seed(seed)):
        visits += zip(batch.steps.tolist(), batch.envs.tolist(), strict=True)
        for name in IN_MINIBATCHES:
            assert torch.equal(getattr(batch, name), getattr(buffer, name)[batch.steps, batch.envs]), name
    assert sorted(visits) == [(t, e) for t in range(T) for e in range(len(counts)) if t < counts[e]]


@given(**columns)
@settings(max_examples=100, deadline=None)
def test_minibatches_differ_in_size_by_at_most_one_step(seed, counts, count):
    buffer, _ = filled(counts, seed)
    buffer.compute_advantages_and_returns(0.9, 0.9)
    sizes = [len(batch.steps) for batch in buffer.minibatches(count, torch.Generator().manual_seed(seed))]
    assert len(sizes) == min(count, sum(counts))
    assert not sizes or 1 <= min(sizes) >= max(sizes) - 1


def test_garbage_in_padding_changes_nothing():
    counts = [0, 3, T, 1, 7]
    runs = []
    for garbage in (False, True):
        buffer, _ = filled(counts)
        if garbage:
            padding = ~buffer.valid
            for name in FIELDS:
                field = getattr(buffer, name)
                field[padding] = float("nan") if field.is_floating_point() else True
        buffer.finish(np.ones(E)).compute_advantages_and_returns(0.99, 0.95)
        runs.append((buffer, list(buffer.minibatches(2, torch.Generator().manual_seed(3)))))
    (clean, batches), (with_garbage, others) = runs
    assert torch.equal(clean.advantages, with_garbage.advantages)
    assert torch.equal(clean.returns, with_garbage.returns)
    for a, b in zip(batches, others, strict=True):
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in a.__slots__)


def test_generator_alone_decides_the_minibatches():
    buffer, _ = filled([T] * E)
    buffer.compute_advantages_and_returns(0.9, 0.9)
    generator = torch.Generator().manual_seed(0)

    def visits(generator):
        return [(b.steps.tolist(), b.envs.tolist()) for b in buffer.minibatches(2, generator)]

    passes = [visits(generator) for _ in range(4)]
    assert visits(torch.Generator().manual_seed(0)) == passes[0]
    assert all(each != passes[0] for each in passes[1:])


def test_minibatches_mix_steps_of_all_environments_and_times():
    buffer, _ = filled([T] * E)
    buffer.compute_advantages_and_returns(0.9, 0.9)
    for batch in buffer.minibatches(2, torch.Generator().manual_seed(0)):
        assert batch.envs.unique().tolist() == list(range(E))
        assert len(batch.steps.unique()) > T / 2
        order = batch.steps * E + batch.envs
        assert not torch.equal(order, order.sort().values)


def test_invalid_input_is_refused_with_a_remedy():
    buffer, row = empty_buffer(steps=1), random_row(np.random.default_rng(0))
    with pytest.raises(DataError, match=r"obs of one step has shape \(5, 3\)"):
        buffer.add(**{**row, "obs": row["obs"][0]})  # would broadcast
    with pytest.raises(DataError, match="alive"):
        buffer.add(**row, alive=np.array([True]))
    buffer.reset()
    buffer.add(**row)
    with pytest.raises(DataError, match="reset"):
        buffer.add(**row)
    with pytest.raises(DataError, match="compute_advantages_and_returns"):
        next(buffer.minibatches(1, torch.Generator()))
    buffer.compute_advantages_and_returns(0.9, 0.9)
    with pytest.raises(ConfigError, match="at least one minibatch, got 0"):
        next(buffer.minibatches(0, torch.Generator()))
    with pytest.raises(ConfigError, match="at least one"):
        empty_buffer(steps=0)
