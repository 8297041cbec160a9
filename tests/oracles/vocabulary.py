"""Float64 answers from torch's own functions, and the tolerance that they allow."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.contract import Statistics


class Truth(NamedTuple):
    """Log-probabilities and entropies of targets, and d(sum a logp + b H)/dlogits."""

    logprobs: Tensor
    entropy: Tensor
    gradient: Tensor


def transformed(
    logits: Tensor, temperature: float | Tensor = 1.0, logit_scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Logits as the losses read them: scaled, capped and divided by the temperature, in their own dtype."""
    z = logit_scale * logits
    if softcap is not None:
        z = torch.where(logits == -torch.inf, -torch.inf, softcap * torch.tanh(z / softcap))
    return z / (temperature.to(logits.dtype)[..., None] if isinstance(temperature, Tensor) else temperature)


def target_stats(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities (those of entry 0 for negative targets) and entropies by log_softmax; z may be -inf."""
    log_p = torch.log_softmax(z, -1)
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    return log_p.gather(-1, targets.clamp_min(0)[..., None])[..., 0], -(log_p.exp() * finite).sum(-1)


def token_stats(
    logits: Tensor,
    targets: Tensor,
    upstream: tuple[Tensor, Tensor],
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Truth:
    """By log_softmax and autograd in `dtype`, on the whole (..., V) tensor."""
    x = logits.detach().to(dtype).requires_grad_()
    valid = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.bool()
    logp, entropy = (s.where(valid, 0.0) for s in target_stats(transformed(x, **options), targets))
    a, b = (u.to(dtype).where(valid, 0.0) for u in upstream)
    (gradient,) = torch.autograd.grad((a * logp + b * entropy).sum(), x)
    return Truth(logp.detach(), entropy.detach(), gradient)


def assert_as_good_as_torch(actual: Tensor, truth: Tensor, same_dtype: Tensor, margin: float, what: str) -> None:
    """Error against float64 at most that of torch's own computation in the same dtype, plus a margin.

    The margin is absolute, relative to max(1, |truth|); both errors are maxima over the tensor.
    """
    scale = truth.abs().clamp_min(1.0)
    ours = ((actual.double() - truth) / scale).abs()
    theirs = ((same_dtype.double() - truth) / scale).abs()
    assert not ours.isnan().any(), f"{what}: NaN"
    allowed = theirs.max().item() + margin if theirs.numel() else margin
    worst = ours.max().item() if ours.numel() else 0.0
    assert worst <= allowed, f"{what}: error {worst:.3g} > torch's {allowed - margin:.3g} + {margin:.3g}"


def log_sum_of_all(statistics: Statistics) -> Statistics:
    """With log sum exp z in place of log_sum, which is relative to a maximum that is itself rounded."""
    return statistics._replace(log_sum=statistics.maximum.double() + statistics.log_sum.double())
