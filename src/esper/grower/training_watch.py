"""Warn if the seeds of a grower cannot learn in the loop that trains it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from esper.kasmina.slot import Slot
from esper.leyline.stages import SeedStage
from esper.tolaria.growing_network import GrowingNetwork


class TrainingWatch:
    """Compare, at each growth step, what the loop has done with what the seeds need."""

    def __init__(self, network: GrowingNetwork) -> None:
        self.network = network
        self._batches = 0
        self._warned: set[str] = set()
        self.note_weights()

    def note_weights(self) -> None:
        """Take the present weights as those of the last growth step, as after loading."""
        self._versions = self._host_versions()

    def must_have_gradients(self) -> None:
        """Warn if nothing requires a gradient: the loop fails in its first backward pass."""
        body = self.network.body
        if not any(p.requires_grad for p in body.parameters()):
            self._warn_once(
                "no parameter of the model requires a gradient and no seed is planted, so the first backward pass "
                "will fail. Plant a seed before it: grower.germinate(slot, blueprint)."
            )

    def at_growth_step(self, batches: int, shadow_passes: int) -> None:
        """Warn about seeds that do not learn, given the optimiser steps and shadow passes so far."""
        body = self.network.body
        if body.training_slots and body.incubation == "shadow" and not shadow_passes and batches:
            warnings.warn(
                "a seed is TRAINING with incubation='shadow', but grower.shadow(closure) was not called: it learns "
                "nothing. Call it after backward(), or use incubation='straight_through'.",
                stacklevel=3,
            )
        learners = list(self._learners())
        if learners and batches == self._batches and self._versions != self._host_versions():
            self._warn_once(
                "the model's weights have changed since the last growth step, but not by the grower's optimiser, so "
                f"the seed in {learners[0].name!r} learns nothing. Train with the optimiser that the grower was given, "
                "or build a grower on the new one."
            )
        idle = [slot.name for slot in learners if slot.name in self.network.unsampled]
        if idle:
            self._warn_once(
                f"the seed in {idle[0]!r} gets no gradient, so it learns nothing: the model is in eval mode, or its "
                "module does not run in training. Call body.train() before you train."
            )
        self._batches = batches
        self.note_weights()

    def _learners(self) -> Iterator[Slot]:
        """Yield the slots whose seed should get a gradient in the loop's own backward pass."""
        for slot in self.network.body.slots.values():
            is_shadowed = slot.stage == SeedStage.TRAINING and self.network.body.incubation == "shadow"
            is_live = SeedStage.TRAINING <= slot.stage <= SeedStage.HOLDING
            if is_live and not is_shadowed and any(p.requires_grad for p in slot.parameters()):
                yield slot

    def _host_versions(self) -> int:
        """Return a number that changes whenever a weight of the host is written."""
        return sum(p._version for p in self.network.body.model.parameters() if not p.is_inference())

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=4)
