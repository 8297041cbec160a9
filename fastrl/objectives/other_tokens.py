"""What one token's loss takes from other tokens: FIPO's weights, and the choice of tokens by covariance.

Both read the tokens of all ranks where responses lie over a group, in float64: each rank computes the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.base.responses import discounted_sum
from fastrl.objectives import formulas as f
from fastrl.objectives.batch import Batch
from fastrl.objectives.objective import CovarianceClip, CovarianceKL, FutureKL

#: The bounds of a token's weight with A < 0 and a ratio beyond FutureKL.safe_ratio.
_SAFE = (0.8, 1.0)


def future_weights(rule: FutureKL, batch: Batch, log_ratio: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Detached weights (N,), and 1 where the sum was clamped to +-bound; log_ratio (N,) is each token's, clamped."""
    log, responses = log_ratio.detach().double(), batch.responses
    own = log.shape[0]
    counted = log.where(batch.mask, 0.0)
    if rule.max_ratio is not None:
        counted = counted.where(counted.exp() <= rule.max_ratio, 0.0)
    # A response's valid tokens come first, then its masked ones: equal keys become adjacent, in the order of time.
    key = 2 * responses.owners(log.device) + ~batch.mask
    if batch.positions is None:
        ordered, order = torch.sort(key, stable=True)
        total = counted[order]
    else:
        rows = torch.stack([counted, key.double(), batch.positions.double()])
        everywhere, keys, positions = responses.all_tokens(rows, 2.0 * responses.count)  # a key of no token
        by_position = positions.argsort(stable=True)
        ordered, order = torch.sort(keys[by_position], stable=True)
        order = by_position[order]
        total = everywhere[order]
    total = torch.empty_like(total).scatter_(0, order, discounted_sum(total, ordered, rule.decay))
    future = total if batch.positions is None else responses.own_of_all(total, own)
    future = future.where(batch.mask, 0.0)
    clamped = f.clamp(future, bound)
    weights = clamped.exp().clamp(rule.low, rule.high)
    if rule.safe_ratio is not None:
        unsafe = (batch.advantages < 0) & (log.exp() > rule.safe_ratio)
        weights = torch.where(unsafe, weights.clamp(*_SAFE), weights)
    return weights.to(log_ratio.dtype), (1 - f.within(future, clamped)).to(log_ratio.dtype)


def drawn(rule: CovarianceClip, batch: Batch) -> Tensor:
    """(M,) float64: a new random number for each token, in the order of `all_tokens`."""
    count, device = batch.responses.number_of_all(batch.mask.shape[0]), batch.mask.device
    if rule.generator is None:
        return torch.rand(count, dtype=torch.float64, device=device)
    if torch.compiler.is_compiling():  # the break itself would not say why; a decorator would import triton
        torch._dynamo.graph_break("the generator of a CovarianceClip cannot be part of a graph; the default one can")
    source = rule.generator.device
    return torch.rand(count, generator=rule.generator, dtype=torch.float64, device=source).to(device)


def chosen_by_covariance(rule: CovarianceClip | CovarianceKL, batch: Batch, logp: Tensor, side: Tensor) -> Tensor:
    """(N,) bool: the tokens that the rule chooses; side (N,) is not 0 where the gate clips."""
    responses, own = batch.responses, batch.mask.shape[0]
    rows = torch.stack([batch.advantages.double(), logp.detach().double(), batch.mask.double(), side.double()])
    advantages, logp, valid, side = responses.all_tokens(rows, 0.0)
    # A token of probability 0 would make the mean, and with it every product, infinite.
    candidates = (valid > 0) & logp.isfinite()
    count = candidates.sum().clamp_min(1)
    a, b = (x - x.where(candidates, 0.0).sum() / count for x in (advantages, logp))
    covariance = a * b
    if isinstance(rule, CovarianceClip):
        assert batch.draws is not None
        candidates = candidates & (side == 0) & (covariance > rule.low) & (covariance < rule.high)
        key = batch.draws
    else:
        key = -covariance
    order = key.where(candidates, torch.inf).argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    number = (rule.fraction * batch.tokens.double()).floor().clamp_min(1)
    return responses.own_of_all(candidates & (place < number), own)
