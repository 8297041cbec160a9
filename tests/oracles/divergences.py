"""Divergences between two rows of logits by log_softmax, for autograd to differentiate."""

from __future__ import annotations

import torch
from torch import Tensor

_NOTHING = -1e4  # in place of -inf, of which autograd makes NaN: e^z is 0, and 0 * z is


def divergences(z: Tensor, teacher_z: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """(D, the student's KL) of transformed logits (n, V); the logarithm of a probability of 0 counts as -1e4."""
    log_p, log_q = (torch.log_softmax(x.clamp_min(_NOTHING), -1) for x in (z, teacher_z))
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        total = (q * (log_q - log_p)).sum(-1)
        return total, torch.zeros_like(total)
    if kind == "reverse_kl":
        total = (p * (log_p - log_q)).sum(-1)
        return total, total
    log_m = (beta * q + (1 - beta) * p).clamp_min(torch.finfo(p.dtype).tiny).log()
    teacher, student = (q * (log_q - log_m)).sum(-1), (p * (log_p - log_m)).sum(-1)
    return beta * teacher + (1 - beta) * student, student
