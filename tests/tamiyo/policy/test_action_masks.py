"""Test action masks: equal to the reference, never empty, and conditioned on the chosen op and slot."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.actions import HEAD_OPTIONS, NUM_HEADS, RELEVANCE, Head, Op
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import is_legal, legal
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage
from esper.tamiyo.policy.action_masks import (
    CANONICAL,
    DEFAULT_FIXED,
    MaskLayout,
    blueprint_given_slot,
    compute_batch_masks,
    conditioned,
    forced,
    slot_given_op,
)
from tests.reference.observations import reports, slow_masks
from tests.support.random_tables import LIVELY, random_table

FIXES = (
    {},
    DEFAULT_FIXED,
    {Head.BLUEPRINT: 3},
    {Head.SLOT: 0, Head.STYLE: 3},
    {Head.OP: int(Op.GERMINATE), Head.BLUEPRINT: 1},
    {Head.OP: int(Op.PRUNE), Head.SLOT: 0},
    {Head.OP: int(Op.WAIT)},
)


def layout_of(table):
    return MaskLayout(slots=table.num_slots, blueprints=table.takes.shape[1])


@cache
def varied_table(envs, slots, seed, blueprints=13, **kwargs):
    """Return a random table with disabled slots and different blueprints per slot. Do not modify (cached)."""
    life = random_table(envs, slots, seed=seed, **kwargs)
    rng = np.random.default_rng(seed)
    arrays = life.arrays()
    arrays["takes"] = rng.random((slots, blueprints)) < 0.4
    arrays["enabled"] = rng.random((envs, slots)) < 0.85
    return SlotTable(**arrays)


def slow_conditioned(row, layout, op, slot):
    """Return the mask of every head of one environment as nested lists [8, W], in plain Python."""
    slots, blueprints = layout.slots, layout.blueprints
    row = row.tolist()
    by_op, by_slot = row[6 : 6 + 6 * slots], row[6 + 6 * slots : 6 + 6 * slots + slots * blueprints]
    rest = row[6 + 6 * slots + slots * blueprints :]
    options = {
        Head.OP: row[:6],
        Head.SLOT: by_op[op * slots : (op + 1) * slots],
        Head.BLUEPRINT: by_slot[slot * blueprints : (slot + 1) * blueprints],
        Head.STYLE: rest[:4],
        Head.TEMPO: rest[4:7],
        Head.ALPHA_TARGET: rest[7:10],
        Head.ALPHA_SPEED: rest[10:14],
        Head.ALPHA_CURVE: rest[14:19],
    }
    masks = []
    for head in Head:
        reads = head is Head.OP or RELEVANCE[op, head]
        open_options = options[head] if reads else [i == CANONICAL[head] for i in range(len(options[head]))]
        masks.append(open_options + [False] * (layout.widest - len(open_options)))
    return masks


# --- packed masks


@pytest.mark.parametrize("fixed", FIXES, ids=str)
@pytest.mark.parametrize(("envs", "slots"), [(300, 3), (60, 1), (40, 9), (20, 25)])
def test_masks_match_the_reference_on_random_tables(envs, slots, fixed):
    table = varied_table(envs, slots, seed=slots)
    ops = legal(table, LIVELY)
    masks = compute_batch_masks(table, ops, fixed=fixed)
    assert masks.dtype == np.bool_
    assert masks.shape == (envs, layout_of(table).size)
    assert np.array_equal(masks, slow_masks(reports(table, ops), table.takes, fixed).numpy())


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6), envs=st.integers(1, 10), slots=st.integers(1, 6), blueprints=st.integers(13, 17),
    fixed=st.sampled_from(FIXES), epochs=st.integers(0, 30),
)  # fmt: skip
def test_masks_match_the_reference_for_any_table_shape(seed, envs, slots, blueprints, fixed, epochs):
    table = varied_table(envs, slots, seed, blueprints, epochs=epochs)
    ops = legal(table, LIVELY)
    assert np.array_equal(
        compute_batch_masks(table, ops, fixed=fixed), slow_masks(reports(table, ops), table.takes, fixed).numpy()
    )


def test_masks_match_the_reference_at_stage_ramp_and_age_boundaries():
    cases = [(s, ramp, age) for s in SeedStage for ramp in ((0, 0), (3, 2), (3, 3)) for age in (0, 4, 5, 6, 50)]
    table = SlotTable.empty(len(cases), 2)
    for e, (stage, (length, place), age) in enumerate(cases):
        table.stage[e, 0], table.ramp_len[e, 0], table.ramp_pos[e, 0], table.age[e, 0] = stage, length, place, age
        table.dwell[e, 0], table.alpha[e, 0], table.alpha_to[e, 0], table.grad_health[e, 0] = age, 1.0, 1.0, 1.0
        table.contribution[e, 0], table.contribution_se[e, 0], table.contribution_age[e, 0] = 0.1, 0.01, 0
    ops = legal(table, LIVELY)
    assert all(ops[:, op, 0].any() for op in Op)
    for fixed in FIXES:
        assert np.array_equal(
            compute_batch_masks(table, ops, fixed=fixed), slow_masks(reports(table, ops), table.takes, fixed).numpy()
        )


def test_mask_layout_is_contiguous():
    layout = MaskLayout(slots=3, blueprints=13)
    parts = [layout.op, layout.slot_by_op, layout.blueprint_by_slot, *layout.tail.values()]
    assert [p.start for p in parts] == [0] + [p.stop for p in parts[:-1]]
    assert parts[-1].stop == layout.size == 6 + 6 * 3 + 3 * 13 + 4 + 3 + 3 + 4 + 5
    for head, where in layout.tail.items():
        assert where.stop - where.start == len(HEAD_OPTIONS[head]) == layout.head_sizes[head]


def test_compute_batch_masks_does_not_modify_its_inputs():
    table = varied_table(6, 3, seed=1)
    ops = legal(table, LIVELY)
    before, legal_before = table.clone(), ops.copy()
    masks = compute_batch_masks(table, ops, fixed={Head.OP: 1, Head.BLUEPRINT: 3, Head.SLOT: 1})
    masks[:] = False  # the returned array is not shared
    assert not table.diff(before)
    assert np.array_equal(ops, legal_before)
    assert compute_batch_masks(table, ops)[:, 0].all()


def test_fixed_option_out_of_range_is_rejected():
    table = SlotTable.empty(1, 2)
    with pytest.raises(ConfigError, match="TEMPO has 3 options, 0 to 2; it cannot be fixed at 3"):
        compute_batch_masks(table, legal(table, LIVELY), fixed={Head.TEMPO: 3})


def test_step_is_forced_where_only_wait_is_legal():
    table = random_table(200, 3, seed=0, epochs=40)
    ops = legal(table, LIVELY)
    ops[::3, 1:] = False
    masks, layout = compute_batch_masks(table, ops), layout_of(table)
    expected = ~ops[:, 1:].any(axis=(1, 2))
    assert np.array_equal(forced(masks, layout), expected)
    assert torch.equal(forced(torch.from_numpy(masks), layout), torch.from_numpy(expected))
    assert expected.any()
    assert not expected.all()


# --- conditioned masks


@pytest.mark.parametrize("fixed", FIXES, ids=str)
@pytest.mark.parametrize(("slots", "blueprints"), [(1, 13), (3, 13), (4, 16), (25, 13), (2, 30)])
def test_conditioned_masks_match_the_reference(slots, blueprints, fixed):
    table = varied_table(24, slots, slots, blueprints, epochs=20)
    layout = layout_of(table)
    masks = torch.from_numpy(compute_batch_masks(table, legal(table, LIVELY), fixed=fixed))
    rng = np.random.default_rng(0)
    op, slot = (torch.from_numpy(rng.integers(0, n, 24)) for n in (6, slots))  # reachable or not
    conditional = conditioned(masks, layout, op, slot)
    assert conditional.shape == (24, NUM_HEADS, max(slots, blueprints, 6))
    assert conditional.dtype == torch.bool
    for e in range(24):
        assert conditional[e].tolist() == slow_conditioned(masks[e], layout, int(op[e]), int(slot[e]))


def test_conditioned_supports_any_first_dimensions():
    table = varied_table(24, 3, seed=5)
    layout = layout_of(table)
    masks = torch.from_numpy(compute_batch_masks(table, legal(table, LIVELY)))
    op, slot = torch.arange(24) % 6, torch.arange(24) % 3
    flat = conditioned(masks, layout, op, slot)
    folded = conditioned(masks.reshape(2, 3, 4, -1), layout, op.reshape(2, 3, 4), slot.reshape(2, 3, 4))
    assert torch.equal(folded.reshape(flat.shape), flat)
    assert torch.equal(conditioned(masks[7], layout, op[7], slot[7]), flat[7])


def test_sequential_draws_are_never_empty_and_always_legal():
    """Draw op, slot and the other heads in order. No mask is empty and every action is legal."""
    rng = torch.Generator().manual_seed(0)

    def draw(options):
        assert options.any(-1).all()
        return torch.multinomial(options.float(), 1, generator=rng)[:, 0]

    for seed, fixed in enumerate(FIXES):
        table = varied_table(128, 1 + seed % 5, seed, epochs=25)
        layout, ops = layout_of(table), legal(table, LIVELY)
        masks = torch.from_numpy(compute_batch_masks(table, ops, fixed=fixed))
        op = draw(masks[:, layout.op])
        slot = draw(slot_given_op(masks, layout, op))
        heads = conditioned(masks, layout, op, slot)
        actions = torch.stack([draw(heads[:, head]) for head in Head], dim=1)
        actions[:, Head.OP], actions[:, Head.SLOT] = op, slot
        assert is_legal(table, actions.numpy(), LIVELY).all()
        for head, choice in fixed.items():
            is_relevant = RELEVANCE[op.numpy(), head] & (head is not Head.OP)
            assert (actions.numpy()[is_relevant, head] == choice).all()


def test_irrelevant_heads_have_one_canonical_choice():
    table = random_table(64, 3, seed=1)
    layout = layout_of(table)
    masks = torch.from_numpy(compute_batch_masks(table, legal(table, LIVELY)))
    for op in Op:
        heads = conditioned(masks, layout, torch.full((64,), int(op)), torch.zeros(64, dtype=torch.int64))
        for head in Head:
            if not RELEVANCE[op, head]:
                assert (heads[:, head].sum(-1) == 1).all()
                assert heads[:, head, CANONICAL[head]].all()


def test_blueprint_mask_matches_takes():
    table = varied_table(8, 4, seed=3)
    layout = layout_of(table)
    masks = torch.from_numpy(compute_batch_masks(table, legal(table, LIVELY)))
    for s in range(4):
        offered = blueprint_given_slot(masks, layout, torch.full((8,), s))
        assert (offered.numpy() == table.takes[s]).all()
