"""Reward modes of the earlier system, for comparison, with their known defects corrected.

    shaped      contributions of all seeds, progress through the stages, rent, a share of the final gain
    escrow      contributions as they are measured; at the end only those of fossils are kept
    basic       worth of fossils, progress, rent, a share of the final gain
    basic_plus  as basic, but most of a fossil's worth is paid out over the epochs after its commitment
    simplified  progress, a cost per action, and at the end the gain and a bonus per worthwhile fossil; no rent
    sparse      at the end only: quality with fossils only, minus their rent
    minimal     as sparse, minus a cost per pruned seed
    loss        change of the validation loss, progress, rent, a share of the final gain

Corrected in all of them:

- They read the whole environment. The earlier modes read the slot that was acted on, and slot 0 on WAIT.
- What is paid for a state is a difference of two values of states. A cycle of actions earns nothing, and an operation
  that was rejected pays nothing, because it leaves the state as it is.
- The stages form a potential, γΦ′ − Φ with Φ ≥ 0 and Φ = 0 at the end. The earlier one paid for epochs in a stage.
- Qualities come from the one shared validation split, and gains are relative to the no-growth baseline at the end of
  the episode; `basic` received the change of the last epoch instead. Sizes are relative to the host.
- A fossil is rewarded for the contribution measured before its commitment, not for what the host improved since its
  birth.
- `loss` weighs deteriorations like improvements. Halving them made a loss that goes up and down pay.
- `minimal` charges every pruned seed. The earlier charge was for an age at which pruning is illegal.
"""

from __future__ import annotations

import numpy as np

from esper.leyline.slot_table import Bools, Floats
from esper.leyline.stages import COOLING, GROWING, NUM_STAGES, SeedStage
from esper.simic.rewards.reward import Frame, RewardConfig, bounded, gain, rent, reward_mode

Stage = SeedStage
STAGE_POTENTIAL = np.zeros(NUM_STAGES)
STAGE_POTENTIAL[[Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED]] = (
    1.0,
    2.0,
    3.5,
    5.5,
    6.0,
)
_IN_FORWARD = np.isin(np.arange(NUM_STAGES), (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED))
_IS_GROWING = np.isin(np.arange(NUM_STAGES), GROWING)
_IS_COOLING = np.isin(np.arange(NUM_STAGES), COOLING)
WORTHWHILE = 0.01
"""Contribution from which a fossil counts as worthwhile, as a fraction of quality. Another one counts minus this."""
DRIP_SHARE = 0.7
"""Fraction of a fossil's worth that `basic_plus` pays after the commitment."""
FOSSIL_BONUS = 0.02
"""Final reward of `simplified` per worthwhile fossil."""
ACTION_COST = 0.0005
"""Cost of each operation other than WAIT in `simplified`."""
PRUNE_COST = 0.005
"""Cost of each pruned seed in `minimal`."""


@reward_mode("shaped", uses_potential=True)
def shaped(before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return the change of contributions minus rent, progress through the stages, and a share of the final gain."""
    earned = _worth(after, config) - _worth(before, config)
    return np.asarray(earned + _progress(before, after, config) + _final(after, config))


@reward_mode("escrow")
def escrow(before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return the change of contributions minus rent. At the end, the credit of seeds that are no fossils is taken back.

    Their rent is still owed.
    """
    kept = np.where(after.ended[:, None], after.stage == Stage.FOSSILIZED, _IN_FORWARD[after.stage])
    return np.asarray(_credit(after, kept, config) - _worth(before, config))


@reward_mode("basic", uses_potential=True)
def basic(before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return the change of fossils' worth minus rent, progress through the stages, and a share of the final gain."""
    earned = _committed(after, config, 0.0) - _committed(before, config, 0.0)
    return np.asarray(earned + _progress(before, after, config) + _final(after, config))


@reward_mode("basic_plus", uses_potential=True)
def basic_plus(before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return `basic` with part of a fossil's worth paid over the horizon after its commitment, and the rest at the
    end."""
    earned = _committed(after, config, DRIP_SHARE) - _committed(before, config, DRIP_SHARE)
    return np.asarray(earned + _progress(before, after, config) + _final(after, config))


@reward_mode("simplified", uses_potential=True)
def simplified(before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return progress through the stages minus a cost per action; at the end the gain and a bonus per good fossil."""
    good = (after.stage == Stage.FOSSILIZED) & (after.contribution >= WORTHWHILE)
    end = bounded(gain(after.quality, after, config) + FOSSIL_BONUS * good.sum(axis=1), after, config)
    final = np.where(after.ended, end, np.where(after.crashed, config.floor, 0.0))
    return np.asarray(_progress(before, after, config) - ACTION_COST * after.acted + final)


@reward_mode("sparse")
def sparse(_before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return 0 until the end of the episode, then the quality with only fossils on, minus the committed rent."""
    sound = np.isfinite(after.committed_quality) & ~after.crashed
    value = np.where(sound, after.committed_quality, 0.0)
    value = value - rent(after.committed_params, after.committed_macs, after, config)
    value = np.where(sound, np.clip(value, config.floor, 1.0), config.floor)
    return np.where(after.ended, value, 0.0)


@reward_mode("minimal")
def minimal(before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return `sparse` minus a cost for every seed pruned in this step. A crash costs as much as pruning all."""
    # a seed that is pruned at once is EMBARGOED, not PRUNED, at the end of its step
    pruned = (_IS_GROWING[before.stage] & _IS_COOLING[after.stage]).sum(axis=1)
    charged = np.where(after.crashed, before.stage.shape[1], pruned)
    return np.asarray(sparse(before, after, config) - PRUNE_COST * charged)


@reward_mode("loss", uses_potential=True)
def loss(before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return the decrease of the validation loss in losses of guessing, minus the change of rent, progress through the
    stages, and a share of the final gain."""
    earned = _negative_loss(after, config) - _negative_loss(before, config)
    return np.asarray(earned + _progress(before, after, config) + _final(after, config))


# -- values of a state, [E] each


def _worth(frame: Frame, config: RewardConfig) -> Floats:
    """Return the last measured contributions of seeds that are BLENDING, HOLDING or FOSSILIZED, minus all rent."""
    return _credit(frame, _IN_FORWARD[frame.stage], config)


def _credit(frame: Frame, kept: Bools, config: RewardConfig) -> Floats:
    """Return the last measured contributions of the `kept` [E, S] seeds, minus all rent."""
    worth = np.where(kept & np.isfinite(frame.contribution), frame.contribution, 0.0).sum(axis=1)
    return bounded(worth - rent(frame.params, frame.macs, frame, config), frame, config)


def _committed(frame: Frame, config: RewardConfig, drip: float) -> Floats:
    """Return the fossils' worth minus all rent. The share `drip` of it grows with the epochs since commitment."""
    each = np.where(frame.contribution >= WORTHWHILE, frame.contribution, -WORTHWHILE)
    released = np.where(frame.ended[:, None], 1.0, np.minimum(frame.dwell / frame.horizon, 1.0))
    paid = np.where(frame.stage == Stage.FOSSILIZED, each * (1.0 - drip + drip * released), 0.0).sum(axis=1)
    return bounded(paid - rent(frame.params, frame.macs, frame, config), frame, config)


def _negative_loss(frame: Frame, config: RewardConfig) -> Floats:
    """Return minus the validation loss in losses of guessing, minus all rent. Before the first epoch it is one loss."""
    units = np.where(frame.step == 0, 1.0, frame.val_loss / frame.chance_loss)
    units = np.where(np.isfinite(units), units, -config.floor)
    return bounded(-units - rent(frame.params, frame.macs, frame, config), frame, config)


# -- terms of a step, [E] each


def _progress(before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return γΦ′ − Φ of the potential Φ of all seeds' stages."""
    return np.asarray(config.gamma * _potential(after, config) - _potential(before, config))


def _potential(frame: Frame, config: RewardConfig) -> Floats:
    total = config.stage_bonus * STAGE_POTENTIAL[frame.stage].sum(axis=1)
    return np.where(frame.ended | frame.crashed, 0.0, total)


def _final(after: Frame, config: RewardConfig) -> Floats:
    """Return the share of the final gain, at the end of the episode only."""
    final = bounded(gain(after.quality, after, config), after, config)
    return np.where(after.ended, config.terminal_weight * final, 0.0)
