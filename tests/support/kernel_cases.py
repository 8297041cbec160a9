"""What the tests of the row functions share: inputs, the forced backend's results, their errors against float64.

Rule (design.md): the error against float64 may be that of the same computation in float32 torch, plus a stated margin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vocabulary import log_sum_of_all

from fastrl.backend.choice import forced, row_functions
from fastrl.backend.contract import LossTerms, Statistics, Transform
from fastrl.backend.torch import rows as reference
from fastrl.objectives.rows import TERMS, Numbers, RowInputs, RowObjective

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = Transform()
N = 4
TEMPERATURES = torch.tensor([0.5, 1.5, 0.2, 3.0])  # of N rows
TRANSFORMS = {
    "identity": PLAIN,
    "scaled": Transform(1.0, TEMPERATURES, 0.7),
    "softcap": Transform(0.8, None, 1.3, 30.0),
    "temperature": Transform(0.7),
    "scale": Transform(logit_scale=0.1),
    "saturated": Transform(0.05, softcap=0.5),  # most entries
    "wide softcap": Transform(softcap=1000.0),  # all in tanh's small branch, where 1 - tanh^2 is nearly 1
    "temperatures, softcap": Transform(9.0, TEMPERATURES, softcap=20.0),
}


def transform(name: str, device: str) -> Transform:
    """One of TRANSFORMS."""
    found = TRANSFORMS[name]
    return found if found.temperatures is None else found._replace(temperatures=found.temperatures.to(device))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_rows(
    vocab: int,
    dtype: torch.dtype,
    device: str,
    shape: tuple[int, int] = (2, N // 2),
    seed: int = 0,
    spread: float = 4.0,
) -> tuple[Tensor, ...]:
    """Logits (*shape, V), targets, c and h."""
    g, n = generator(seed), shape[0] * shape[1]
    logits = (torch.randn(*shape, vocab, generator=g) * spread).to(dtype)
    targets = torch.randint(0, vocab, (n,), generator=g)
    return tuple(x.to(device) for x in (logits, targets, *torch.randn(2, n, generator=g)))


# --- the forced backend -----------------------------------------------------------------------------------------------


def row_statistics(logits: Tensor, *arguments: Any) -> Statistics:
    found: Statistics = row_functions(forced(), logits).row_statistics(logits, *arguments)
    return found


def row_gradient(logits: Tensor, *arguments: Any, out: Tensor) -> Tensor:
    """The gradient in `out`, given targets, mask, transform, statistics, c and h."""
    row_functions(forced(), logits).row_gradient(logits, *arguments, out)
    return out


def gradient(
    logits: Tensor,
    targets: Tensor,
    c: Tensor,
    h: Tensor | None,
    mask: Tensor | None = None,
    transform: Transform = PLAIN,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient after the statistics, in a new tensor that holds NaN before, unless `out` is given."""
    statistics = row_statistics(logits, targets, mask, transform)
    out = torch.full_like(logits, torch.nan) if out is None else out
    return row_gradient(logits, targets, mask, transform, statistics, c, h, out=out)


def row_forward_gradient(logits: Tensor, *arguments: Any) -> LossTerms:
    found: LossTerms = row_functions(forced(), logits).row_forward_gradient(logits, *arguments)
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


# --- tolerances -------------------------------------------------------------------------------------------------------


def margin(t: Transform) -> float:
    """1e-6, and what 3e-7 of absolute error in tanh is in z, at the lowest temperature."""
    return 1e-6 + 3e-7 * t.softcap / (t.temperature if t.temperatures is None else t.temperatures.min().item())


def rounding_of_z(logits: Tensor, t: Transform) -> Tensor:
    """Half a unit in the last place of the largest z that matters, (N, 1): what forming z in float32 may cost."""
    z, _ = reference.transformed(logits.double().flatten(0, 1), t)
    matters = z > z.amax(-1, keepdim=True) - 90
    return 2.0**-24 * z.abs().where(matters, 0.0).amax(-1, keepdim=True)


def gradient_margin(logits: Tensor, t: Transform) -> Tensor | float:
    """What a gradient's error may be more than torch's."""
    return 5e-7 + rounding_of_z(logits, t).view(*logits.shape[:2], 1) if forced() == "cpp" else margin(t)


def rounding(dtype: torch.dtype, interpreted: bool) -> float:
    """Half a unit in the last place; the interpreter truncates to bfloat16 where a GPU rounds: a whole unit there."""
    unit = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    return unit if interpreted and dtype is torch.bfloat16 else unit / 2


def assert_close(
    actual: Tensor, truth: Tensor, float32: Tensor, allowed: float, what: str, size: Tensor | None = None
) -> None:
    """NaN and infinities where the truth has them; elsewhere float32 torch's worst error and a margin.

    Errors are relative to max(1, size), size being |truth| unless given.
    """
    finite = truth.isfinite()
    assert torch.equal(actual.isnan(), truth.isnan()), f"{what}: NaN at {actual.isnan()}, expected {truth.isnan()}"
    infinite = truth.isinf()
    assert torch.equal(actual[infinite].double(), truth[infinite]), f"{what}: {actual[infinite]}"
    if not finite.any():
        return
    scale = (truth.abs() if size is None else size).clamp_min(1.0)
    ours = ((actual.double() - truth) / scale)[finite].abs().max().item()
    theirs = ((float32.double() - truth) / scale)[finite & float32.isfinite()].abs()
    bound = (theirs.max().item() if theirs.numel() else 0.0) + allowed
    assert ours <= bound, f"{what}: error {ours:.3e}, allowed {bound:.3e}"


def gradient_error(actual: Tensor, truth: Tensor, size: Tensor | None = None) -> float:
    """The worst row's largest error, relative to the row's largest entry of `size`, |truth| unless given.

    Rows that are NaN in both are left out.
    """
    assert torch.equal(actual.isnan(), truth.isnan())
    scale = (truth.abs() if size is None else size).amax(-1, keepdim=True).clamp_min(1e-30)
    return ((actual.double() - truth) / scale).abs().nan_to_num(0.0).max().item()


# --- statistics and gradient ------------------------------------------------------------------------------------------


def assert_statistics(
    actual: Statistics, logits: Tensor, targets: Tensor, mask: Tensor | None, t: Transform
) -> Statistics:
    """Compare with the oracle on the same logits; returns the oracle's."""
    truth = reference.row_statistics(logits.double(), targets, mask, t)
    float32 = reference.row_statistics(logits.float(), targets, mask, t)
    compared = tuple(map(log_sum_of_all, (actual, truth, float32)))
    # One rounding of z, of which torch's own sample may happen to be small, and one of the result.
    allowed = margin(t) if forced() != "cpp" else 3e-7 + rounding_of_z(logits, t).max().item()
    for name in Statistics._fields:
        assert_close(*(getattr(s, name) for s in compared), allowed, name)
    return truth


def gradient_scale(
    logits: Tensor, targets: Tensor, t: Transform, exact: Statistics, c: Tensor, h: Tensor | None
) -> Tensor:
    """What an entry's error is relative to: the sizes of the terms that make it up, where p_j itself carries a relative
    error that grows with log p_j, as that is rounded, and a softcap's slope, 4 e^(-2 |v|) far out, one that grows with
    v."""
    z, slope = reference.transformed(logits.double().flatten(0, 1), t)
    log_p = (z - exact.maximum[:, None] - exact.log_sum[:, None]).clamp_min(-1e4)
    h = torch.zeros_like(c) if h is None else h
    size = c.abs()[:, None] + h.abs()[:, None] * (log_p.abs() + exact.entropy[:, None])
    slope = slope.abs() + 1e-9 * slope.abs().max()  # the oracle's 1 - tanh^2 is good to 1e-16 of the largest
    scale = slope * log_p.exp() * (1 + log_p.abs()) * size
    if t.softcap:
        v = logits.double().flatten(0, 1) * (t.logit_scale / t.softcap)
        scale *= 1 + 2 * v.abs().where(v.isfinite(), 0.0)
    at_target = torch.zeros_like(scale).scatter(-1, targets[:, None].clamp(0, z.shape[-1] - 1), 1)
    scale += at_target * (slope * (c.abs() * torch.expm1(exact.logprobs).abs())[:, None])
    return (scale.nan_to_num(1.0) + 1e-30).view(logits.shape)


def assert_gradient(
    found: Tensor,
    exact: Tensor,
    float32: Tensor,
    scale: Tensor,
    size: Tensor,
    allowed: Tensor | float,
    interpreted: bool,
) -> None:
    """Up to the last rounding: C++ by entry relative to `scale`, others relative to the largest of the row's `size`."""
    torch.testing.assert_close(found.isnan(), exact.isnan(), msg="NaN elsewhere than in the oracle")
    unit, tiny = rounding(found.dtype, interpreted), 2.0**-24 if found.dtype is torch.float16 else 1e-30
    if forced() == "cpp":
        unit = 0.0 if found.dtype is torch.float32 else rounding(found.dtype, False)
        tiny = 2.0**-25 if found.dtype is torch.float16 else 1e-35  # below the last place, or flushed
        theirs = ((float32.double() - exact) / scale).abs().nan_to_num(0.0).max()
    else:
        theirs, scale = gradient_error(float32, exact, size), size.amax(-1, keepdim=True)
    bound = (theirs + allowed) * scale + unit * exact.abs() + tiny
    error = (found.double() - exact).abs()
    worst = ((error - bound) / scale).where(~exact.isnan() & (found.double() != exact), -1.0).max().item()
    assert worst <= 0, f"over the bound by {worst:.3e}"


def gradients(
    x: Tensor, targets: Tensor, mask: Tensor | None, t: Transform, weights: tuple[tuple[Tensor, Tensor | None], ...]
) -> tuple[Tensor, ...]:
    """The oracle's gradients for pairs of c and h, each in the dtype of c."""
    found = []
    for c, h in weights:
        y, out = x.to(c.dtype), torch.empty_like(x, dtype=c.dtype)
        reference.row_gradient(y, targets, mask, t, reference.row_statistics(y, targets, mask, t), c, h, out)
        found.append(out)
    return tuple(found)


def check(
    logits: Tensor,
    targets: Tensor,
    c: Tensor,
    h: Tensor | None,
    mask: Tensor | None = None,
    t: Transform = PLAIN,
    out: Tensor | None = None,
) -> Statistics:
    """Statistics, which it returns, and gradient against the oracle's; `out` may be the logits or of another dtype."""
    x = logits.clone()  # where they are overwritten
    found = row_statistics(logits, targets, mask, t)
    exact = assert_statistics(found, x, targets, mask, t)
    weights = (c.double(), None if h is None else h.double()), (c, h)
    gradient64, gradient32 = gradients(x, targets, mask, t, weights)
    out = torch.full_like(logits, torch.nan) if out is None else out
    row_gradient(logits, targets, mask, t, found, c, h, out=out)
    assert out is logits or same_bits(logits, x)
    scale = gradient_scale(x, targets, t, exact, c, h)
    interpreted = forced() != "cpp" and out.device.type == "cpu"
    assert_gradient(out, gradient64, gradient32, scale, gradient64.abs(), gradient_margin(x, t), interpreted)
    return found


# --- forward-gradient -------------------------------------------------------------------------------------------------

OBJECTIVE = RowObjective("clip", "k3", Numbers(0.2, 0.28, 3.0, 1e30, 0.1, 2.0, 0.0, 1e30))
PARAMETERS = {
    "surrogate": (0.0, 0.0, 0.0, 0.0),
    "reinforce": (0.0, 0.0, 0.0, 0.0),
    "clip": (0.2, 0.28, 1.5, 1.4),
    "soft": (1.0, 1.05, 0.0, 0.0),
    "stop-gradient-clip": (1.2, 0.8, 0.0, 0.0),
    "gamma": (2.0, 3.0, 3.0, 2.0),
    "ratio-mask": (0.6, 1.5, 0.0, 0.0),
    "tapered": (0.3, 1.2, 0.0, 0.0),
    "divergence-tv": (0.01, 0.02, 3.0, 0.0),
    "divergence-kl": (0.01, 0.02, 3.0, 0.0),
}
CORRECTIONS = {
    "none": Numbers()[4:8],
    "truncate": (0.6, 1.5, 0.0, 1e30),
    "mask": (0.0, 1e30, 0.6, 1.5),
    "truncate and reject": (0.6, 1.5, 0.4, 3.0),
}
OPTIONAL = RowInputs._fields[2:]
# Logs of ratios: inside every clip, outside on both sides, beyond dual and delta, and beyond the clamp at 20.
GAPS = torch.tensor([0.03, -0.05, 0.6, -0.7, 1.3, -1.4, 1.9, 5.0, -5.0, 24.0, -24.0, 0.3])


def random_inputs(logprobs: Tensor, present: tuple[str, ...] = OPTIONAL, seed: int = 0) -> RowInputs:
    """Log-ratios from GAPS and around; a row without an advantage, and one without a weight."""
    g, n = generator(seed), len(logprobs)

    def near(x: Tensor, spread: float) -> Tensor:
        gaps = GAPS[torch.randint(0, len(GAPS), (n,), generator=g)]
        return x + gaps.where(torch.rand(n, generator=g) < 0.5, spread * torch.randn(n, generator=g)).to(x.device)

    old = near(logprobs, 0.3)
    advantages, weights = torch.randn(n, generator=g), torch.rand(n, generator=g)
    advantages[2:3], weights[3:4] = 0.0, 0.0
    inputs = RowInputs(
        advantages,
        weights,
        old,
        near(logprobs, 0.5),
        near(old, 0.7),
        torch.rand(n, generator=g),
        torch.randn(n, generator=g),
        torch.tensor(1.4),
    )
    inputs = RowInputs(*(x.to(logprobs.device) for x in inputs))
    return inputs._replace(**{name: None for name in OPTIONAL if name not in present})


def sizes(
    statistics: tuple[Tensor, Tensor], mask: Tensor | None, objective: RowObjective, inputs: RowInputs
) -> list[Tensor]:
    """The loss, c and h of policy, KL and entropy, each alone, as absolute values added up: they may cancel."""
    weights = ("policy_weights", "kl_weights", "entropy_weights")
    sizes = [torch.zeros_like(inputs.advantages)] * 3
    for part in weights:
        alone = dict.fromkeys(set(weights) - {part}, torch.zeros_like(inputs.advantages))
        terms, c, h = reference.row_terms(*statistics, mask, objective, inputs._replace(**alone))
        sizes = [size + x.abs() for size, x in zip(sizes, (terms[0], c, h), strict=True)]
    return sizes


def check_forward_gradient(
    logits: Tensor, targets: Tensor, mask: Tensor | None, t: Transform, objective: RowObjective, inputs: RowInputs
) -> tuple[Tensor, LossTerms]:
    """Statistics are those of row_statistics, to the bit; terms and gradient are the oracle's; returns the last two."""
    statistics = row_statistics(logits, targets, mask, t)
    assert_statistics(statistics, logits, targets, mask, t)
    gradient = logits.clone()
    found = row_forward_gradient(gradient, targets, mask, t, objective, inputs)
    for ours, theirs in zip(found[:2], statistics, strict=False):
        assert same_bits(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    interpreted = forced() != "cpp" and logits.device.type == "cpu"
    assert_forward_gradient(logits, targets, mask, t, objective, inputs, gradient, found, interpreted)
    return gradient, found


def assert_forward_gradient(
    x: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    t: Transform,
    objective: RowObjective,
    inputs: RowInputs,
    gradient: Tensor,
    found: LossTerms,
    interpreted: bool,
) -> None:
    """Terms and gradient of logits x are the oracle's.

    The oracle's objective starts from our float32 statistics: a clip's edge may lie between those and the exact ones.
    """
    double = RowInputs(*(None if x is None else x.double() for x in inputs))
    exact = reference.row_statistics(x.double(), targets, mask, t)
    logprobs, entropy = found[:2]
    terms32, c, h = reference.row_terms(logprobs, entropy, mask, objective, inputs)
    terms64, c64, h64 = reference.row_terms(logprobs.double(), entropy.double(), mask, objective, double)
    # C++ computes the objective in float64. Triton does in float32: ratios amplify, and parts cancel.
    (loss, c_size, h_size), of_terms, more = (terms64[0].abs(), c64, h64), 1e-7, 0.0
    if forced() != "cpp":
        statistics64 = (logprobs.double(), entropy.double())
        (loss, c_size, h_size), of_terms, more = sizes(statistics64, mask, objective, double), 5e-6, 4e-6
    for name, actual, truth, float32 in zip(TERMS, found.terms, terms64, terms32, strict=True):
        assert_close(actual, truth, float32, of_terms, name, loss if name == "loss" else None)
    weights = (c64, h64), (c, h), (c_size, None), (0 * c64, h_size)
    gradient64, gradient32, of_c, of_h = gradients(x, targets, mask, t, weights)
    scale = gradient_scale(x, targets, t, exact, c_size, h_size)
    allowed = gradient_margin(x, t) + more
    assert_gradient(gradient, gradient64, gradient32, scale, of_c.abs() + of_h.abs(), allowed, interpreted)
