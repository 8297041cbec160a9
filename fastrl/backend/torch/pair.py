"""The functions over pairs of logits of `fastrl.backend.contract` in plain torch: the oracle, and the torch backend.

Here both logits may also be float64; all results are then float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.backend.contract import Pair, PairStatistics
from fastrl.backend.torch.rows import row_blocks, transformed, wide


def _product(p: Tensor, log_ratio: Tensor) -> Tensor:
    """p times a log ratio that is infinite or NaN only where p is 0 or the row has a NaN: there 0."""
    return torch.where(p == 0, 0.0, p * log_ratio)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p||q) of rows (n, V), given the logarithms."""
    p, q = log_p.exp(), log_q.exp()
    # The linear terms sum to 0; with them, no term is below 0, and errors of the normalisers do not count.
    return (_product(p, log_p - log_q) - p + q).sum(-1).clamp_min(0.0)


def _log_ratios_to_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p / m) and log(q / m), m = beta q + (1 - beta) p; anything where p and q are 0."""
    d = torch.where(log_p == log_q, 0.0, log_q - log_p)  # where both are -inf, too
    weight = torch.where(d < 0, beta, 1 - beta)  # of the smaller one
    log_m = torch.log1p(weight * torch.expm1(-d.abs()))  # relative to the larger one
    return -d.clamp_min(0.0) - log_m, d.clamp_max(0.0) - log_m


def _log_softmax(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The logarithms of the probabilities (n, V), and the maximum and the log sum (n,) that give them."""
    maximum = z.amax(-1, keepdim=True)
    log_sum = (z - maximum).exp().sum(-1, keepdim=True).log()
    return (z - maximum) - log_sum, maximum[:, 0], log_sum[:, 0]


def pair_statistics(pair: Pair) -> PairStatistics:
    """See `fastrl.backend.contract`."""
    logits, teacher_logits, transform, teacher_transform, divergence = pair
    out = torch.zeros(6, logits.shape[0], dtype=wide(logits), device=logits.device)
    for x, rows in row_blocks(logits[None]):
        teacher_x = teacher_logits[rows]
        log_p, maximum, log_sum = _log_softmax(transformed(x, transform, rows)[0])
        log_q, teacher_maximum, teacher_log_sum = _log_softmax(transformed(teacher_x, teacher_transform, rows)[0])
        if divergence.kind == "forward_kl":
            total = _kl(log_q, log_p)
            student_kl = torch.zeros_like(total)
        elif divergence.kind == "reverse_kl":
            total = student_kl = _kl(log_p, log_q)
        else:
            beta = divergence.beta
            from_p, from_q = _log_ratios_to_mixture(log_p, log_q, beta)
            student_kl = _product(log_p.exp(), from_p).sum(-1)
            teacher_kl = _product(log_q.exp(), from_q).sum(-1)
            total = (beta * teacher_kl + (1 - beta) * student_kl).clamp_min(0.0)
        total = torch.where(log_sum + teacher_log_sum == log_sum + teacher_log_sum, total, torch.nan)
        out[:, rows] = torch.stack([total, student_kl, maximum, log_sum, teacher_maximum, teacher_log_sum])
    return PairStatistics(*out)


def pair_gradient(pair: Pair, statistics: PairStatistics, c: Tensor, out: Tensor) -> None:
    """See `fastrl.backend.contract`."""
    logits, teacher_logits, transform, teacher_transform, divergence = pair
    for x, rows in row_blocks(logits[None]):
        z, slope = transformed(x, transform, rows)
        teacher_z, _ = transformed(teacher_logits[rows], teacher_transform, rows)
        total, student_kl, maximum, log_sum, teacher_maximum, teacher_log_sum = (s[rows, None] for s in statistics)
        log_p, log_q = (z - maximum) - log_sum, (teacher_z - teacher_maximum) - teacher_log_sum
        p = log_p.exp()
        if divergence.kind == "forward_kl":
            gradient = p - log_q.exp()
        elif divergence.kind == "reverse_kl":
            gradient = _product(p, log_p - log_q - student_kl).where(student_kl < torch.inf, torch.nan)
        else:
            from_p, _ = _log_ratios_to_mixture(log_p, log_q, divergence.beta)
            gradient = (1 - divergence.beta) * _product(p, from_p - student_kl)
        factor = c[rows, None]
        gradient = (factor * slope * gradient).where(total == total, torch.nan)
        out[rows] = gradient.where(factor != 0, 0.0).to(out.dtype)


def pair_forward_gradient(pair: Pair, c: Tensor, out: Tensor | None = None) -> PairStatistics:
    """See `fastrl.backend.contract`."""
    statistics = pair_statistics(pair)
    pair_gradient(pair, statistics, c, pair.logits if out is None else out)
    return statistics
