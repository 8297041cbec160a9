"""What the tests of the C++ row functions share: random rows, and errors held against torch's and the float64 oracle.

A result's error may be that of the same computation by torch in float32, plus a margin: one rounding of z (torch's own
sample of that may happen to be small), and `STATISTICS_MARGIN` in units of 1 + |value| (rounding the result itself
takes 6e-8), `GRADIENT_MARGIN` relative to the terms of each gradient entry (`gradient_scale`).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vocabulary import log_sum_of_all

from fastrl.backends.contract import Statistics, Transform
from fastrl.backends.cpp import backend as cpp_backend
from fastrl.backends.torch import rows as reference
from fastrl.objectives.rows import RowInputs, RowObjective

needs_cpp = pytest.mark.skipif(
    cpp_backend.why_unavailable() is not None, reason=f"no C++ backend: {cpp_backend.why_unavailable()}"
)

STATISTICS_MARGIN = 3e-7
GRADIENT_MARGIN = 5e-7
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit, and some
TINY = {torch.float32: 1e-35, torch.bfloat16: 1e-35, torch.float16: 2.0**-25}  # flushed, or below the last place
PLAIN = Transform()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# 1: no other entry; 31: one ragged vector; 1000: below one segment; 32003: ragged in segment, pair and vector;
# 151936: a real vocabulary, many segments
VOCABULARIES = [1, 31, 1000, 32003, 151936]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_rows(n: int, vocab: int, dtype: torch.dtype, seed: int = 0, spread: float = 3.0) -> tuple[Tensor, ...]:
    """Logits (1, n, vocab), targets, c and h."""
    g = generator(seed)
    logits = (torch.randn(1, n, vocab, generator=g) * spread).to(dtype)
    targets = torch.randint(0, vocab, (n,), generator=g)
    return logits, targets, torch.randn(n, generator=g), torch.randn(n, generator=g)


def relative_error(found: Tensor, exact: Tensor, scale: Tensor) -> float:
    """The largest error in units of scale; NaN and infinities must stand in the same places."""
    torch.testing.assert_close(found.isnan(), exact.isnan(), msg="NaN elsewhere than in the oracle")
    same = found.double() == exact
    return ((found.double() - exact).abs() / scale).where(~same & ~exact.isnan(), 0.0).max().item()


def rounding_of_z(logits: Tensor, transform: Transform) -> Tensor:
    """Half a unit in the last place of the largest z that matters, (N, 1): what forming z in float32 may cost."""
    z, _ = reference.transformed(logits.double().flatten(0, 1), transform64(transform))
    matters = z > z.amax(-1, keepdim=True) - 90
    return 2.0**-24 * z.abs().where(matters, 0.0).amax(-1, keepdim=True)


def check_statistics(found: Statistics, exact: Statistics, torch32: Statistics, z_rounding: Tensor) -> None:
    margin = STATISTICS_MARGIN + z_rounding.max().item()
    found, exact, torch32 = map(log_sum_of_all, (found, exact, torch32))
    for name, ours, oracle, theirs in zip(Statistics._fields, found, exact, torch32, strict=True):
        scale = 1 + oracle.abs()
        allowed = relative_error(theirs, oracle, scale) + margin
        assert relative_error(ours, oracle, scale) <= allowed, name


def gradient_scale(
    logits: Tensor, targets: Tensor, transform: Transform, exact: Statistics, c: Tensor, h: Tensor | None
) -> Tensor:
    """What an entry's error is relative to: the sizes of the terms that make it up, where p_j itself carries a relative
    error that grows with log p_j, as that is rounded, and a softcap's slope, 4 e^(-2 |v|) far out, one that grows with
    v."""
    z, slope = reference.transformed(logits.double().flatten(0, 1), transform64(transform))
    log_p = (z - exact.maximum[:, None] - exact.log_sum[:, None]).clamp_min(-1e4)
    h = torch.zeros_like(c) if h is None else h
    size = c.abs()[:, None] + h.abs()[:, None] * (log_p.abs() + exact.entropy[:, None])
    slope = slope.abs() + 1e-9 * slope.abs().max()  # the oracle's 1 - tanh^2 is good to 1e-16 of the largest
    scale = slope * log_p.exp() * (1 + log_p.abs()) * size
    if transform.softcap:
        v = logits.double().flatten(0, 1) * (transform.logit_scale / transform.softcap)
        scale *= 1 + 2 * v.abs().where(v.isfinite(), 0.0)
    at_target = torch.zeros_like(scale).scatter(-1, targets[:, None].clamp(0, z.shape[-1] - 1), 1)
    scale += at_target * (slope * (c.abs() * torch.expm1(exact.logprobs).abs())[:, None])
    return (scale.nan_to_num(1.0) + 1e-30).view(logits.shape)


def check_gradient(found: Tensor, exact: Tensor, torch32: Tensor, scale: Tensor, z_rounding: Tensor) -> None:
    """Entry by entry."""
    allowed = relative_error(torch32, exact, scale) + GRADIENT_MARGIN + z_rounding.view(*exact.shape[:2], 1)
    error = (found.double() - exact).abs()
    bound = allowed * scale + ROUNDING[found.dtype] * exact.abs() + TINY[found.dtype]
    torch.testing.assert_close(found.isnan(), exact.isnan(), msg="NaN elsewhere than in the oracle")
    worst = (error - bound).where(~exact.isnan() & (found.double() != exact), -1.0).max().item()
    assert worst <= 0, f"over the bound by {worst}"


def transform64(transform: Transform) -> Transform:
    return transform._replace(temperatures=None if transform.temperatures is None else transform.temperatures.double())


def statistics_of(backend: object, logits: Tensor, *arguments: object) -> Statistics:
    return backend.row_statistics(logits, *arguments)  # type: ignore[attr-defined]


def check(
    logits: Tensor,
    targets: Tensor,
    c: Tensor,
    h: Tensor | None,
    mask: Tensor | None = None,
    transform: Transform = PLAIN,
    *,
    in_place: bool = False,
) -> None:
    """Statistics and gradient against the oracle, with the same statistics for both gradients."""
    exact = reference.row_statistics(logits.double(), targets, mask, transform64(transform))
    torch32 = reference.row_statistics(logits.float(), targets, mask, transform)
    found = cpp_backend.row_statistics(logits, targets, mask, transform)
    check_statistics(found, exact, torch32, rounding_of_z(logits, transform))

    h64 = None if h is None else h.double()
    gradient64 = torch.empty(logits.shape, dtype=torch.float64)
    reference.row_gradient(logits.double(), targets, mask, transform64(transform), exact, c.double(), h64, gradient64)
    gradient32 = torch.empty(logits.shape)
    reference.row_gradient(logits.float(), targets, mask, transform, torch32, c, h, gradient32)
    before = logits.clone()
    out = logits if in_place else torch.full_like(logits, 7.0)
    cpp_backend.row_gradient(logits, targets, mask, transform, found, c, h, out)
    assert in_place or same_bits(logits, before)
    scale = gradient_scale(before, targets, transform, exact, c, h)
    check_gradient(out, gradient64, gradient32, scale, rounding_of_z(before, transform))


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


# --- forward-gradient ---

OBJECTIVE = RowObjective("clip", (0.2, 0.28, 3.0, 1e30), "k3", "truncate", 0.1, 2.0, 20.0)
PARAMETERS = {
    "surrogate": (0.0, 0.0, 0.0, 0.0),
    "reinforce": (0.0, 0.0, 0.0, 0.0),
    "clip": (0.2, 0.28, 1.5, 1.4),
    "soft": (1.0, 1.05, 0.0, 0.0),
    "stop-gradient-clip": (1.2, 0.8, 0.0, 0.0),
    "gamma": (2.0, 3.0, 3.0, 2.0),
}
OPTIONAL = ("old", "ref", "rollout", "kl_weights", "entropy_weights", "entropy_threshold")


def random_inputs(logprobs: Tensor, present: tuple[str, ...], seed: int) -> RowInputs:
    g, n = generator(seed), len(logprobs)

    def near(spread: float) -> Tensor:
        return logprobs + spread * torch.randn(n, generator=g)

    inputs = {
        "old": near(0.3),
        "ref": near(0.5),
        "rollout": near(0.7),
        "kl_weights": torch.rand(n, generator=g),
        "entropy_weights": torch.randn(n, generator=g),
        "entropy_threshold": torch.tensor(1.4),
    }
    for name in ("old", "ref", "rollout"):  # some beyond the clamp
        inputs[name][0], inputs[name][1] = logprobs[0] + 5, logprobs[1] - 5
    advantages = torch.randn(n, generator=g)
    advantages[2] = 0.0
    weights = torch.rand(n, generator=g)
    weights[3] = 0.0
    return RowInputs(advantages, weights, **{name: inputs[name] for name in present})


def check_forward_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
) -> None:
    def double(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.double()

    # The oracle's objective starts from our float32 statistics: a clip's edge may lie between those and the exact ones.
    statistics = cpp_backend.row_statistics(logits, targets, mask, transform)
    *_, c, h = reference.row_terms(statistics.logprobs, statistics.entropy, mask, objective, inputs)
    exact, c64, h64 = reference.row_terms(
        statistics.logprobs.double(), statistics.entropy.double(), mask, objective, RowInputs(*map(double, inputs))
    )
    torch32, _, _ = reference.row_terms(statistics.logprobs, statistics.entropy, mask, objective, inputs)
    exact_statistics = reference.row_statistics(logits.double(), targets, mask, transform64(transform))
    gradient64, gradient32 = torch.empty(logits.shape, dtype=torch.float64), torch.empty(logits.shape)
    reference.row_gradient(
        logits.double(), targets, mask, transform64(transform), exact_statistics, c64, h64, gradient64
    )
    torch_statistics = reference.row_statistics(logits.float(), targets, mask, transform)
    reference.row_gradient(logits.float(), targets, mask, transform, torch_statistics, c, h, gradient32)

    overwritten = logits.clone()
    found = cpp_backend.row_forward_gradient(overwritten, targets, mask, transform, objective, inputs)
    assert same_bits(found.logprobs, statistics.logprobs)
    assert same_bits(found.entropy, statistics.entropy)
    scale = 1 + exact.abs()
    assert relative_error(found.terms, exact, scale) <= relative_error(torch32, exact, scale) + 1e-7
    scale = gradient_scale(logits, targets, transform, exact_statistics, c, h)
    check_gradient(overwritten, gradient64, gradient32, scale, rounding_of_z(logits, transform))
