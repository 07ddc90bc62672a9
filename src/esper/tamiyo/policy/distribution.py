"""Action distributions, shared by rollouts and updates so that both compute the same probabilities.

Every head is a masked softmax over one padded tensor, mixed with a small share of the uniform distribution over the
legal options. Every legal option has a probability of at least ε/n and, unlike with a hard floor, a gradient.

Legend: W options of the widest head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_distribution(logits: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    """Return log((1 − ε)·softmax + ε·uniform) over the legal options [*, W]; −inf elsewhere. At least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    masked = torch.where(mask, logits, -torch.inf)
    if not epsilon:
        return torch.log_softmax(masked, dim=-1)
    share = epsilon / mask.sum(-1, keepdim=True)  # added everywhere, which avoids log(0)
    mixed = torch.add(share, torch.softmax(masked, dim=-1), alpha=1 - epsilon)
    return torch.where(mask, mixed.log(), -torch.inf)


def entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the entropy [*] as a fraction of its maximum; 0 where only one option is legal."""
    safe = torch.where(mask, log_probs, 0.0)
    h = -(safe.exp() * safe).sum(-1)  # illegal options contribute 1·0
    count = mask.sum(-1)
    return torch.where(count > 1, h / count.clamp(min=2).log(), 0.0)


def pick(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the options [*] that the numbers `uniform` [*] in [0, 1) select.

    Options of probability 0 are never picked.
    """
    cdf = log_probs.exp().cumsum(-1, dtype=torch.float64)
    return (cdf <= (uniform * cdf[..., -1])[..., None]).sum(-1)


def likeliest(log_probs: Tensor) -> Tensor:
    """Return the options [*] of the highest probability."""
    return log_probs.argmax(-1)
