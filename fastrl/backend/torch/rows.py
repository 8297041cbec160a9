"""The three row functions of `fastrl.backend.contract` in plain torch: the oracle, and the torch backend.

Here the logits may also be float64; all results are then float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.backend.contract import LossTerms, Statistics, Transform
from fastrl.objectives.formulas import token_terms
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS
from fastrl.objectives.rows import RowInputs, RowObjective

#: Rows are processed in blocks of at most this many entries, so that temporaries stay small.
BLOCK_ENTRIES = 1 << 17
#: Entries of a row from which torch adds it up by several threads if there is no other.
_LONG = 1 << 15


def wide(x: Tensor) -> torch.dtype:
    """The dtype of the results for x: float64's own, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def transformed(x: Tensor, transform: Transform, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """z and dz/dx of logits x (n, V), in float32, or in float64 for float64 logits."""
    x = x.to(wide(x))
    temperature = x.new_full((), transform.temperature)
    if transform.temperatures is not None:
        temperature = transform.temperatures[rows].to(x.dtype)[:, None]
    if not transform.softcap:
        return x * (transform.logit_scale / temperature), transform.logit_scale / temperature
    y = x * (transform.logit_scale / transform.softcap)
    tanh, decay = torch.tanh(y), torch.exp(-2 * y.abs())
    z = torch.where(x == -torch.inf, x, tanh * (transform.softcap / temperature))
    # 1 - tanh^2 as 4 e^-2|y| / (1 + e^-2|y|)^2, which does not cancel when tanh saturates
    return z, 4 * decay / (1 + decay) ** 2 * (transform.logit_scale / temperature)


def row_blocks(logits: Tensor) -> list[tuple[Tensor, slice]]:
    """Views (n, V) of logits (A, B, V) with the rows that they cover, small enough to work on at once."""
    a, b, v = logits.shape
    # torch adds up a long row in parts if it is alone, and else as a whole: its bits must not depend on the others.
    step = max(1, BLOCK_ENTRIES // max(v, 1)) if v < _LONG else 1
    return [
        (logits[i, j : j + step], slice(i * b + j, i * b + min(j + step, b)))
        for i in range(a)
        for j in range(0, b, step)
    ]


def _block_statistics(z: Tensor, targets: Tensor, valid: Tensor) -> Statistics:
    """Statistics of z (n, V); rows whose target is not `valid` get NaN log-probabilities."""
    y = targets.where(valid, 0)[:, None]
    maximum = z.amax(-1)
    shifted = (z - maximum[:, None]).clamp_min(-1e4)  # -inf would make 0 * inf in the entropy
    exponentials = shifted.exp()
    others = exponentials.scatter(-1, y, 0.0).sum(-1)
    u = z.gather(-1, y)[:, 0] - maximum
    # If the target is the maximum, log1p(others) keeps the digits that a rounded 1 + others would lose.
    log_sum = torch.where(u == 0, torch.log1p(others), torch.log(others + u.exp()))
    entropy = log_sum - (shifted * exponentials).sum(-1) / (others + u.exp())
    logprobs = u - log_sum
    return Statistics(logprobs.where(valid, torch.nan), entropy, maximum, log_sum)


def row_statistics(logits: Tensor, targets: Tensor, mask: Tensor | None, transform: Transform) -> Statistics:
    """See `fastrl.backend.contract`."""
    out = torch.zeros(4, targets.numel(), dtype=wide(logits), device=logits.device)
    for block, rows in row_blocks(logits):
        z, _ = transformed(block, transform, rows)
        y = targets[rows]
        statistics = torch.stack(_block_statistics(z, y, (y >= 0) & (y < logits.shape[-1])))
        out[:, rows] = statistics if mask is None else statistics.where(mask[rows], 0.0)
    return Statistics(*out)


def row_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    out: Tensor,
) -> None:
    """Write dL/dlogits into `out` (A, B, V), given c = dL/dlogp and h = dL/dH, each (N,); `out` may be `logits`."""
    vocab = logits.shape[-1]
    for (block, rows), (out_block, _) in zip(row_blocks(logits), row_blocks(out), strict=True):
        z, slope = transformed(block, transform, rows)
        logp, entropy, maximum, log_sum = (s[rows, None] for s in statistics)
        log_p = ((z - maximum) - log_sum).clamp_min(-1e4)
        p = log_p.exp()
        y = targets[rows]
        valid = (y >= 0) & (y < vocab)
        y = y.where(valid, 0)[:, None]
        # 1 - p_y is computed from the log-probability: p_y rounded to 1 would lose a confident token's gradient.
        at_target = torch.where(valid[:, None], -torch.expm1(logp), -p.gather(-1, y))
        not_p = (-p).scatter(-1, y, at_target)
        gradient = c[rows, None] * not_p
        if h is not None:
            gradient = gradient - h[rows, None] * p * (log_p + entropy)
        gradient = gradient * slope
        gradient = gradient.where(logp == logp, torch.nan)
        if mask is not None:
            gradient = gradient.where(mask[rows, None], 0.0)
        out_block.copy_(gradient)


def row_terms(
    logprobs: Tensor, entropy: Tensor, mask: Tensor | None, objective: RowObjective, inputs: RowInputs
) -> tuple[Tensor, Tensor, Tensor]:
    """The objective of rows with known statistics: terms (len(TERMS), N), c (N,) and h (N,)."""
    old = logprobs if inputs.old is None else inputs.old
    zeros = torch.zeros_like(logprobs)
    absent = (None, None, logprobs, logprobs, old, zeros, zeros, -1e30)
    *terms, c, h = token_terms(
        *GATE_FORMULAS[objective.gate],
        *KL_FORMULAS[objective.kl],
        logprobs,
        entropy,
        [otherwise if given is None else given for given, otherwise in zip(inputs, absent, strict=True)],
        objective.numbers,
    )
    stacked = torch.stack([*terms, c, h])
    if mask is not None:
        stacked = stacked.where(mask, 0.0)
    return stacked[:-2], stacked[-2], stacked[-1]


def row_forward_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
    out: Tensor | None = None,
) -> LossTerms:
    """Statistics, objective and gradient of each row; the gradient overwrites the logits if `out` is None."""
    statistics = row_statistics(logits, targets, mask, transform)
    terms, c, h = row_terms(statistics.logprobs, statistics.entropy, mask, objective, inputs)
    on_entropy = None if inputs.entropy_weights is None else h
    row_gradient(logits, targets, mask, transform, statistics, c, on_entropy, logits if out is None else out)
    return LossTerms(statistics.logprobs, statistics.entropy, terms)
