"""The distribution over choices: one function for the rollout and for the update, so that both mean the same.

Every head is a masked softmax over one padded tensor, mixed with a little of the uniform over what is legal: each
legal choice keeps a chance ≥ ε/n, and, unlike under a floor, keeps its gradient.

Legend: W options of the widest head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_distribution(logits: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    """log((1 − ε)·softmax + ε·uniform) over the legal options [*, W]; −inf elsewhere. At least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    masked = torch.where(mask, logits, -torch.inf)
    if not epsilon:
        return torch.log_softmax(masked, dim=-1)
    share = epsilon / mask.sum(-1, keepdim=True)  # of everything, so that there is no log of 0
    mixed = torch.add(share, torch.softmax(masked, dim=-1), alpha=1 - epsilon)
    return torch.where(mask, mixed.log(), -torch.inf)


def entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """[*] entropy over the largest possible: 1 is undecided, 0 decided or without a choice."""
    safe = torch.where(mask, log_probs, 0.0)
    h = -(safe.exp() * safe).sum(-1)  # what is not legal counts 1·0
    count = mask.sum(-1)
    return torch.where(count > 1, h / count.clamp(min=2).log(), 0.0)


def pick(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """[*] the option that a number in [0, 1) falls on, [*]; an option of chance 0 is never picked."""
    cdf = log_probs.exp().cumsum(-1, dtype=torch.float64)
    return (cdf <= (uniform * cdf[..., -1])[..., None]).sum(-1)


def likeliest(log_probs: Tensor) -> Tensor:
    return log_probs.argmax(-1)
