"""Log-probabilities, entropies and their gradients of dense float64 logits (N, V), and how far rounding may move them.

Everything is formed whole and in the plainest way that keeps float64's digits. The errors are first-order bounds: of
each logit (what its own arithmetic in float32, or a product in 16 bits, may cost), and from there of all that follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SMALLEST = 2.0**-126  # float32's normal numbers; what is below may be 0
EPS = 2.0**-24  # half a unit in the last place of 1 in float32
UNIT = {torch.float32: EPS, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}


@dataclass
class Settings:
    """What turns logits into a distribution; `support` is bool (N, V) or None, `temperature` (N,)."""

    temperature: Tensor
    logit_scale: float = 1.0
    softcap: float | None = None
    support: Tensor | None = None

    @property
    def identity(self) -> bool:
        return self.softcap is None and self.logit_scale == 1 and bool((self.temperature == 1).all())


@dataclass
class Rows:
    """The statistics of N rows and the errors that are allowed; masked rows are 0."""

    z: Tensor
    log_p: Tensor  # (N, V)
    logp: Tensor
    entropy: Tensor
    slope: Tensor  # dz/dx (N, V)
    z_error: Tensor
    logp_error: Tensor
    entropy_error: Tensor
    target: Tensor  # bool (N, V)


def tempered(x: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """z, with -inf outside the support, and dz/dx."""
    scaled, slope = settings.logit_scale * x, torch.full_like(x, settings.logit_scale)
    if settings.softcap is not None:
        tanh = torch.tanh(scaled / settings.softcap)
        scaled = torch.where(x == -math.inf, x, settings.softcap * tanh)
        slope = slope * torch.cosh((x * settings.logit_scale / settings.softcap).clamp(-300, 300)) ** -2
    z, slope = scaled / settings.temperature[:, None], slope / settings.temperature[:, None]
    if settings.support is not None:
        z = torch.where(settings.support, z, -math.inf)
    return z, slope


def statistics(x: Tensor, x_error: Tensor, targets: Tensor, mask: Tensor, settings: Settings) -> Rows:
    """x: (N, V) float64 and the error that each entry carries already; targets (N,), not read where the mask is 0."""
    n, vocab = x.shape
    x = torch.where(mask[:, None], x, 0.0)
    z, slope = tempered(x, settings)
    z = torch.where(mask[:, None], z, 0.0)  # whatever a masked row's support is
    y = torch.where(mask, targets, 0)
    target = torch.zeros(n, vocab, dtype=torch.bool)
    target[torch.arange(n), y] = True
    z_y = z.gather(1, y[:, None])
    logp = -torch.log1p((z - z_y).exp().masked_fill(target, 0.0).sum(1))
    top, place = z.max(1, keepdim=True)
    largest = torch.zeros_like(target).scatter(1, place, True)
    log_p = (z - top) - torch.log1p((z - top).exp().masked_fill(largest, 0.0).sum(1, keepdim=True))
    p = log_p.exp()
    surprise = torch.where(p > 0, -log_p, 0.0)
    entropy = (p * surprise).sum(1)

    finite = torch.where(p > 0, z, top)
    z_error = 4 * EPS * (finite - top).abs() + slope * x_error
    if not settings.identity:
        z_error = z_error + 8 * EPS * finite.abs()
    if settings.softcap is not None:  # where tanh is nearly 1 its own rounding is all that is left
        z_error = z_error + 4 * EPS * settings.softcap / settings.temperature[:, None]
    z_error = torch.where(p > 0, z_error, 0.0)
    error_y = z_error.gather(1, y[:, None])[:, 0]
    others = torch.where(target, 0.0, p)
    missing = -torch.expm1(logp)
    logp_error = (others * z_error).sum(1) + missing * error_y + 16 * EPS * logp.abs() + 2 * EPS * missing
    logp_error = logp_error + vocab * SMALLEST  # what each of the others may lose
    entropy_error = (p * (surprise - entropy[:, None]).abs() * z_error).sum(1)
    entropy_error = entropy_error + 8 * EPS * (1 + math.log(vocab) + (p * (finite - top).abs()).sum(1))
    keep = mask.double()
    return Rows(
        z,
        log_p,
        torch.where(mask, logp, 0.0),
        entropy * keep,
        slope,
        z_error,
        logp_error.nan_to_num(0) * keep,
        entropy_error * keep,
        target,
    )


@dataclass
class Gradient:
    """dL/dx (N, V), its allowed error, the sum of its parts' absolute values, and the largest |c| or |h| of all."""

    value: Tensor
    error: Tensor
    parts: Tensor
    largest: float

    def times(self, factor: float) -> Gradient:
        size = abs(factor)
        return Gradient(factor * self.value, size * self.error, size * self.parts, size * self.largest)


def gradient(rows: Rows, c: Tensor, h: Tensor, c_error: Tensor, h_error: Tensor, mask: Tensor) -> Gradient:
    """`dz/dx (c (1[j = y] - p_j) - h p_j (log p_j + H_t))` from each token's c and h and their errors."""
    p = rows.log_p.exp()
    rest = torch.where(rows.target, -torch.expm1(rows.logp)[:, None], -p)
    log_p = torch.where(p > 0, rows.log_p, 0.0)
    spread = p * (log_p + rows.entropy[:, None])
    c, h, c_error, h_error = (t[:, None] for t in (c, h, c_error, h_error))
    value = c * rest - h * spread
    doubt = torch.expm1(2 * rows.z_error.amax(1, keepdim=True) + 16 * EPS)
    size = p * (log_p.abs() + rows.entropy[:, None])
    error = c_error * rest.abs() + h_error * spread.abs() + doubt * (c.abs() * rest.abs() + h.abs() * size)
    error = error + h.abs() * p * (rows.entropy_error[:, None] + rows.logp_error[:, None] + 2 * rows.z_error)
    error = error + 1e-36 * (c.abs() + h.abs())  # probabilities below float32's range are 0
    parts = c.abs() * rest.abs() + h.abs() * spread.abs()
    slope_error = 8 * EPS * rows.slope
    if rows.slope.numel():  # 1 - tanh^2 of a saturated entry is a difference
        slope_error = slope_error + 8 * EPS * rows.slope.amax(1, keepdim=True)
    error = rows.slope * error + slope_error * parts
    keep = mask[:, None]
    zero = torch.zeros_like(value)
    largest = max((float(t[keep].abs().max()) for t in (c, h) if keep.any()), default=0.0)
    return Gradient(*(torch.where(keep, t, zero) for t in (rows.slope * value, error, rows.slope * parts)), largest)


def rounded(given: Gradient, dtype: torch.dtype, times: int = 2) -> Gradient:
    """The same where each entry is rounded to dtype that many times; below float16's range absolute."""
    if dtype == torch.float32:
        return replace(given, error=given.error + 4 * EPS * given.parts + 8 * SMALLEST)
    floor = 2.0**-24 if dtype == torch.float16 else 8 * SMALLEST
    error = given.error + times * UNIT[dtype] * given.value.abs() + times * floor
    return replace(given, error=error)


@dataclass
class Head:
    """A product's operands in float64: hidden (N, H), weight (V, H), bias (V,) or None."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    exact: bool  # every logit is a number of the dtype, and so is every partial sum
    unrounded: bool = False  # whether logits are float32 whatever the dtype

    def logits(self) -> tuple[Tensor, Tensor]:
        """The logits and the error of each: of float32 sums, and of their rounding to 16 bits where not exact."""
        product = self.hidden @ self.weight.T
        x = product if self.bias is None else product + self.bias
        if self.exact:
            return x, torch.zeros_like(x)
        size = self.hidden.abs() @ self.weight.abs().T
        error = (4 + math.sqrt(self.hidden.shape[1])) * EPS * (size + product.abs())
        if self.dtype != torch.float32 and not self.unrounded:
            error = error + 1.01 * UNIT[self.dtype] * (product.abs() + x.nan_to_num(neginf=0).abs())
            error = error + (2.0**-24 if self.dtype == torch.float16 else 0.0)
        return x, torch.where(x == -math.inf, 0.0, error)

    def gradients(self, g: Gradient) -> dict[str, tuple[Tensor, Tensor]]:
        """Value and allowed error of dL/dhidden, dL/dweight and dL/dbias."""
        unit = 4 * UNIT[self.dtype] + 16 * EPS
        error = g.error + unit * g.parts
        if self.dtype == torch.float16:  # each c and h is scaled by the power of two that makes the largest of them 1
            error = error + 2.0**-24 * g.largest
        hidden, weight = self.hidden, self.weight
        found = {
            "hidden": (g.value @ weight, error @ weight.abs()),
            "weight": (g.value.T @ hidden, error.T @ hidden.abs()),
            "bias": (g.value.sum(0), error.sum(0)),
        }
        floor = 2.0**-23 if self.dtype == torch.float16 else 1e-37
        return {name: (v, e + 2 * UNIT[self.dtype] * v.abs() + floor) for name, (v, e) in found.items()}
