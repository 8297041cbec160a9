"""Statistics and gradient of rows of support entries, on every backend."""

from __future__ import annotations

import kernel_cases as cases
import pytest
import support_cases
import torch
from torch import Tensor

from fastrl.backend.choice import forced, row_functions
from fastrl.backend.contract import Statistics, Support, Transform

# Triton's interpreter is numpy, which warns where a GPU's arithmetic silently gives infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def device(backend_device: str) -> str:
    """Each backend in turn, and where its tensors live."""
    return backend_device


IDENTITY = Transform()
VOCAB = 1000
# A few entries, one, none, a block and one entry more, several blocks, and one row that does not count.
SIZES = (8, 1, 0, 257, 3, 700, 2)
VALID = torch.tensor([True, True, True, True, False, True, True])


def _transform(name: str, rows: int, device: str) -> Transform:
    if name == "identity":
        return IDENTITY
    temperatures = (torch.rand(rows) + 0.5).to(device)
    return Transform(1.0, temperatures, 0.7, 30.0 if name == "softcap" else 0.0)


def _z(x: Tensor, row: int, t: Transform) -> tuple[Tensor, Tensor]:
    """z and dz/dx."""
    temperature = t.temperature if t.temperatures is None else t.temperatures[row].to(x.dtype)
    y = t.logit_scale * x
    if not t.softcap:
        return y / temperature, torch.full_like(x, t.logit_scale) / temperature
    tanh = torch.tanh(y / t.softcap)
    slope = (1 - tanh) * (1 + tanh) * t.logit_scale / temperature
    return (t.softcap * tanh / temperature).where(x > -torch.inf, -torch.inf), slope


def _oracle(
    values: Tensor,
    targets: Tensor,
    support: Support,
    t: Transform,
    dtype: torch.dtype,
    c: Tensor | None = None,
    h: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Statistics (4, N) and, for c and h, the gradient (nnz,), row by row with torch."""
    statistics = torch.zeros(4, targets.numel(), dtype=dtype, device=values.device)
    gradient = torch.zeros(values.numel(), dtype=dtype, device=values.device)
    for row, span in support_cases.row_ranges(support):
        z, slope = _z(values[span].to(dtype), row, t)
        log_p = torch.log_softmax(z, -1)
        p = log_p.exp()
        entropy = -(p * log_p.clamp_min(-1e4)).sum()
        is_target = support.token_ids[span] == targets[row]
        logprob = log_p[is_target].sum() if is_target.any() else log_p.new_tensor(torch.nan)
        log_sum = (z - z.max()).exp().sum().log()
        statistics[:, row] = torch.stack([logprob, entropy, z.max(), log_sum])
        if c is not None:
            dz = c[row].to(dtype) * (is_target.to(dtype) - p).where(~is_target, -torch.expm1(log_p))
            if h is not None:
                dz -= h[row].to(dtype) * p * (log_p.clamp_min(-1e4) + entropy)
            gradient[span] = slope * dz if is_target.any() else torch.nan
    return statistics, gradient


def _case(device: str, sizes: tuple[int, ...] = SIZES, valid: Tensor | None = VALID) -> tuple[Tensor, Tensor, Support]:
    """Values, targets within the support, the support."""
    support = support_cases.random_support(sizes, VOCAB, device, valid)
    values = (torch.randn(support.token_ids.numel()) * 4).to(device)
    targets = torch.full((len(sizes),), -100, device=device)
    for row, span in support_cases.row_ranges(support):
        targets[row] = support.token_ids[span][torch.randint(span.stop - span.start, ())]
    return values, targets, support


def _statistics(values: Tensor, targets: Tensor, support: Support, t: Transform = IDENTITY) -> Statistics:
    return row_functions(forced(), values).support_statistics(values, targets, support, t)


def _gradient(
    values: Tensor,
    targets: Tensor,
    support: Support,
    t: Transform,
    c: Tensor,
    h: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.full_like(values, 7.0) if out is None else out
    found = _statistics(values, targets, support, t)
    row_functions(forced(), values).support_gradient(values, targets, support, t, found, c, h, out)
    return out


@pytest.mark.parametrize("name", ["identity", "scaled", "softcap"])
def test_statistics_against_float64(name: str, device: str) -> None:
    values, targets, support = _case(device)
    t = _transform(name, len(SIZES), device)
    actual = _statistics(values, targets, support, t)
    truth, float32 = (_oracle(values, targets, support, t, d)[0] for d in (torch.float64, torch.float32))
    for i, field in enumerate(Statistics._fields):
        cases.assert_close(actual[i], truth[i], float32[i], cases.margin(t), field)
        assert actual[i][[2, 4]].tolist() == [0.0, 0.0]  # no entries; does not count


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("name", ["identity", "scaled", "softcap"])
def test_gradient_against_float64(name: str, entropy: bool, device: str) -> None:
    values, targets, support = _case(device)
    t = _transform(name, len(SIZES), device)
    c, h = torch.randn(len(SIZES)).to(device), torch.randn(len(SIZES)).to(device) if entropy else None
    actual = _gradient(values, targets, support, t, c, h)
    truth, float32 = (_oracle(values, targets, support, t, d, c, h)[1] for d in (torch.float64, torch.float32))
    # Relative to the largest entry of the row.
    for row, span in support_cases.row_ranges(support):
        if span.stop - span.start > 1:
            mine, theirs = (cases.gradient_error(x[None, span], truth[None, span]) for x in (actual, float32))
            assert mine <= theirs + 2 * cases.margin(t), (row, mine, theirs)
    assert not actual[support.offsets[4] : support.offsets[5]].any()
    in_place = values.clone()
    assert torch.equal(_gradient(in_place, targets, support, t, c, h, in_place), actual)


def test_a_row_that_keeps_its_target_alone_is_certain(device: str) -> None:
    support = support_cases.random_support((1, 1, 1), VOCAB, device)
    values = torch.tensor([3.7, -1e30, 0.0], device=device)
    targets, c, h = support.token_ids.long(), torch.ones(3, device=device), torch.ones(3, device=device)
    for t in (IDENTITY, Transform(0.7, None, 1.3, 30.0)):
        actual = _statistics(values, targets, support, t)
        assert not actual.logprobs.any() and not actual.entropy.any()
        assert (actual.log_sum.abs() <= 1e-6).all()  # up to the maximum's own rounding
        for weights in ((c, None), (c, h)):
            assert not _gradient(values, targets, support, t, *weights).any()


@pytest.mark.parametrize("gap", [10.0, 26.0, 80.0])
def test_confident_tokens_keep_their_relative_accuracy(gap: float, device: str) -> None:
    support = support_cases.random_support((600,), VOCAB, device)
    values = torch.zeros(600, device=device)
    values[300] = gap
    targets, c = support.token_ids[300:301].long(), torch.ones(1, device=device)
    truth, gradient = _oracle(values, targets, support, IDENTITY, torch.float64, c)
    # log_softmax itself cannot see e**-80 next to 1: the sum over the others is formed by hand.
    exact = torch.tensor(-599.0, dtype=torch.float64).mul(torch.tensor(-gap, dtype=torch.float64).exp()).item()
    if gap < 30:
        assert truth[0].item() == pytest.approx(exact, rel=0.03)
    exact = -torch.tensor(-exact, dtype=torch.float64).log1p().item()
    # As in test_row_statistics: float32 rounds the exponent of e**-80 by 4e-6.
    assert _statistics(values, targets, support).logprobs.item() == pytest.approx(exact, rel=1e-5)
    actual = _gradient(values, targets, support, IDENTITY, c, None).double()
    assert actual[300].item() == pytest.approx(-torch.expm1(torch.tensor(exact, dtype=torch.float64)).item(), rel=2e-5)
    torch.testing.assert_close(actual[:300], gradient[:300], rtol=2e-5, atol=0)


def test_a_target_that_is_not_kept_makes_its_row_nan(device: str) -> None:
    values, targets, support = _case(device, (5, 5, 300, 5, 5), None)
    sane = _statistics(values, targets, support)
    token = support.token_ids.long()
    outside = next(v for v in range(VOCAB) if v not in token[:5].tolist())
    wrong = targets.clone()
    # One that is not support; -1; two whose low 32 bits are a support token's.
    wrong[:4] = torch.stack(
        [torch.tensor(outside, device=device), token[0] * 0 - 1, token[12] + 2**32, token[311] - 2**32]
    )
    actual = _statistics(values, wrong, support)
    assert actual.logprobs.isnan().tolist() == [True] * 4 + [False]
    truth = _oracle(values, wrong, support, IDENTITY, torch.float64)[0]
    for i in (1, 2, 3):
        torch.testing.assert_close(actual[i].double(), truth[i], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(actual[i], sane[i], rtol=2e-6, atol=2e-6)
    for weight in (0.0, 1.0):  # an idle row is NaN too: nothing invalid passes silently
        c = torch.full((5,), weight, device=device)
        gradient = _gradient(values, wrong, support, IDENTITY, c, None)
        assert gradient[:315].isnan().all() and not gradient[315:].isnan().any()


def test_rows_that_do_not_count_are_0_and_not_read(device: str) -> None:
    values, targets, support = _case(device)
    values[support.offsets[4] : support.offsets[5]] = torch.nan
    actual = _statistics(values, targets, support)
    ones = torch.ones(len(SIZES), device=device)
    assert not any(x[4] for x in actual)
    gradient = _gradient(values, targets, support, IDENTITY, ones, ones)
    assert not gradient[support.offsets[4] : support.offsets[5]].any() and not gradient.isnan().any()


def test_idle_rows_are_0(device: str) -> None:
    values, targets, support = _case(device)
    zeros = torch.zeros(len(SIZES), device=device)
    assert not _gradient(values, targets, support, IDENTITY, zeros, None).any()
    assert not _gradient(values, targets, support, IDENTITY, zeros, zeros).any()
    entropy_only = _gradient(values, targets, support, IDENTITY, zeros, zeros + 1)
    assert entropy_only[:8].any()


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_minus_infinity_is_a_probability_of_0(softcap: float, device: str) -> None:
    t = Transform(1.0, None, 1.0, softcap)
    values, targets, support = _case(device, (8, 300, 2, 2), None)
    values[[1, 2]] = -torch.inf
    values[8:270] = -torch.inf  # a whole block
    values[308] = -torch.inf  # all but the target
    values[311] = -torch.inf  # the target
    targets[:] = support.token_ids[[0, 300, 309, 311]]
    actual = _statistics(values, targets, support, t)
    c, h = torch.randn(4, device=device), torch.randn(4, device=device)
    assert actual.logprobs[3] == -torch.inf
    truth, float32 = (_oracle(values, targets, support, t, d)[0] for d in (torch.float64, torch.float32))
    for i, field in enumerate(Statistics._fields):
        cases.assert_close(actual[i], truth[i], float32[i], cases.margin(t), field)
    for entropy in (None, h):
        gradient = _gradient(values, targets, support, t, c, entropy)
        assert gradient.isfinite().all()
        assert not gradient[(values == -torch.inf) & (torch.arange(312, device=device) != 311)].any()


@pytest.mark.parametrize("kind", ["NaN", "NaN target", "all -inf"])
def test_only_the_row_with_the_nan_is_nan(kind: str, device: str) -> None:
    values, targets, support = _case(device, (5, 300, 4), None)
    ones = torch.ones(3, device=device)
    sane, sane_gradient = (
        _statistics(values, targets, support),
        _gradient(values, targets, support, IDENTITY, ones, ones),
    )
    target = 5 + (support.token_ids[5:305] == targets[1]).nonzero().item()
    if kind == "all -inf":
        values[5:305] = -torch.inf
    else:
        values[target if kind == "NaN target" else 5 + (target - 4) % 300] = torch.nan
    actual = _statistics(values, targets, support)
    gradient = _gradient(values, targets, support, IDENTITY, ones, ones)
    for field in ("logprobs", "entropy", "log_sum"):
        assert getattr(actual, field).isnan().tolist() == [False, True, False], field
    assert gradient[5:305].isnan().all()
    others = torch.cat([torch.arange(5), torch.arange(305, 309)]).to(device)
    assert torch.equal(gradient[others], sane_gradient[others])
    for a, b in zip(actual, sane, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


def test_a_row_is_bitwise_the_same_anywhere(device: str, backend: str) -> None:
    if backend == "torch" and device == "cuda":
        pytest.skip("torch's sums on a GPU depend on how many rows there are")
    values, targets, support = _case(device)
    t = Transform(0.8, None, 1.3, 30.0)
    ones = torch.ones(len(SIZES), device=device)
    actual, again = (_statistics(values, targets, support, t) for _ in range(2))
    gradient = _gradient(values, targets, support, t, ones, ones)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
    for row, span in support_cases.row_ranges(support):
        size = torch.tensor([0, span.stop - span.start], device=device)
        alone = Support(support.token_ids[span], size, support.valid[row : row + 1])
        x, target = values[span], targets[row : row + 1]
        found = _statistics(x, target, alone, t)
        assert all(torch.equal(a[row], b[0]) for a, b in zip(actual, found, strict=True))
        assert torch.equal(_gradient(x, target, alone, t, ones[:1], ones[:1]), gradient[span])


def test_no_rows_and_no_entries(device: str) -> None:
    for rows in (0, 3):
        support = (
            support_cases.random_support((0,) * rows, VOCAB, device)
            if rows
            else Support(
                torch.empty(0, dtype=torch.int32, device=device),
                torch.zeros(1, dtype=torch.int64, device=device),
                torch.empty(0, dtype=torch.bool, device=device),
            )
        )
        values, targets = torch.empty(0, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
        found = _statistics(values, targets, support)
        assert all(x.shape == (rows,) and not x.any() for x in found)
        assert _gradient(values, targets, support, IDENTITY, targets.float(), None).shape == (0,)
