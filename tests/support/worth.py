"""Reports of worth with chosen contents."""

from __future__ import annotations

import numpy as np
import torch

from esper.simic.attribution import CounterfactualEngine, Worth
from esper.tolaria.coalitions import Coalitions

NAN = float("nan")


def complete_worth(n: int = 3, fossils: tuple[str, ...] = (), seed: int = 0, samples: int = 40) -> Worth:
    """Return a complete table of n players named a, b, c… and a prospect."""
    configs = [(*(bool(m >> i & 1) for i in range(n)), False) for m in range(2**n)] + [(*(True,) * n, True)]
    scores = torch.randn(len(configs), samples, generator=torch.Generator().manual_seed(seed))
    scores += torch.tensor([float(sum(c)) for c in configs])[:, None]
    return CounterfactualEngine.worth(Coalitions((*"abcdefgh"[:n], "learner"), n, configs, scores), fossils)


def unmeasured_worth(n: int = 2) -> Worth:
    """Return the report of a body of which only the quality was measured."""
    none, pairs = np.full(n, NAN), np.full((n, n), NAN)
    return Worth(
        slots=tuple("ab"[:n]), fossils=(False,) * n, quality=0.5, quality_se=NAN, committed=NAN, contribution=none,
        contribution_se=none, solo=none, solo_se=none, shapley=none, shapley_se=none, shapley_design_se=none,
        interaction=pairs, interaction_se=pairs, evaluations=1, prospect={"learner": (0.1, NAN)},
    )  # fmt: skip
