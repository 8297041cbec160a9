from __future__ import annotations

import kernel_cases as cases
import pytest
import torch
from torch import Tensor

from fastrl.backends.contract import Statistics, Transform
from fastrl.backends.torch import rows as reference

backend = pytest.importorskip("fastrl.backends.triton.backend")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
IDENTITY = Transform()


def _oracle(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    c: Tensor,
    h: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    x = logits.to(dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    statistics = reference.row_statistics(x, targets, mask, transform)
    weights = c.to(dtype), None if h is None else h.to(dtype)
    reference.row_gradient(x, targets, mask, transform, statistics, *weights, out)
    return out


def _gradient(
    logits: Tensor, targets: Tensor, mask: Tensor | None, transform: Transform, c: Tensor, h: Tensor | None, out: Tensor
) -> Tensor:
    statistics = backend.row_statistics(logits, targets, mask, transform)
    backend.row_gradient(logits, targets, mask, transform, statistics, c, h, out)
    return out


def _weights(device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(cases.N).to(device), torch.randn(cases.N).to(device)


def _assert_gradient(actual: Tensor, truth: Tensor, float32: Tensor, allowed: float, dtype: torch.dtype) -> None:
    """Entry by entry for the output's rounding, row by row for the arithmetic."""
    interpreted = actual.device.type == "cpu"
    arithmetic = cases.gradient_error(float32, truth) + allowed
    size = truth.abs().amax(-1, keepdim=True)
    tiny = 2.0**-24 if dtype is torch.float16 else 1e-30
    bound = cases.rounding(dtype, interpreted) * truth.abs() + arithmetic * size + tiny
    error = (actual.double() - truth).abs()
    assert (error <= bound).all(), (
        f"worst {(error / size.clamp_min(1e-30)).max().item():.3e}, arithmetic {arithmetic:.3e}"
    )


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("name", ["identity", "scaled", "softcap"])
@pytest.mark.parametrize("vocab", [v for v in cases.VOCABULARIES if v > 1])
def test_against_float64(vocab: int, name: str, entropy: bool, device: str) -> None:
    logits, targets = cases.random_rows(vocab, torch.float32, device)
    transform = cases.transform(name, device)
    c, h = _weights(device)
    weights = (c, h if entropy else None)
    out = _gradient(logits, targets, None, transform, *weights, torch.full_like(logits, torch.nan))
    truth, float32 = (_oracle(logits, targets, None, transform, *weights, d) for d in (torch.float64, torch.float32))
    _assert_gradient(out, truth, float32, cases.margin(transform), torch.float32)


@pytest.mark.parametrize("out_dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1000, 4097])
def test_dtypes(vocab: int, dtype: torch.dtype, out_dtype: torch.dtype, device: str) -> None:
    logits, targets = cases.random_rows(vocab, dtype, device)
    c, h = _weights(device)
    out = _gradient(logits, targets, None, IDENTITY, c, h, torch.empty_like(logits, dtype=out_dtype))
    truth, float32 = (_oracle(logits, targets, None, IDENTITY, c, h, d) for d in (torch.float64, torch.float32))
    _assert_gradient(out, truth, float32, 1e-6, out_dtype)


@pytest.mark.parametrize("gap", [10.0, 26.0, 80.0])
def test_confident_tokens_keep_their_gradient(gap: float, device: str) -> None:
    logits = torch.zeros(1, 1, 1000, device=device)
    logits[0, 0, 17] = gap
    targets = torch.tensor([17], device=device)
    c, h = torch.ones(1, device=device), torch.ones(1, device=device)
    for weights in ((c, None), (c, h)):
        out = _gradient(logits, targets, None, IDENTITY, *weights, torch.empty_like(logits))
        truth = _oracle(logits, targets, None, IDENTITY, *weights, torch.float64)
        # Every entry, the target's 1 - p among them, to the relative accuracy that float32 has of e**-80.
        torch.testing.assert_close(out.double(), truth, rtol=2e-5, atol=0)


def test_the_rounding_of_the_maximum_is_in_no_probability(device: str) -> None:
    """Of z = 143.3 half a unit in the last place is 7.6e-6, which all p_j would be off by together.

    It shows where an fma rounds once: on a GPU, and in the interpreter since Triton 3.9.
    """
    logits = torch.tensor([10.1, 33.7, 100.3, 999.9], device=device).view(2, 2, 1).repeat(1, 1, 1000)
    targets = torch.tensor([0, 17, 500, 999], device=device)
    logits.view(4, 1000)[torch.arange(4), targets] -= 3.0
    transform = Transform(0.7, None, 1.0, 0.0)
    c, h = torch.ones(4, device=device), torch.ones(4, device=device)
    for weights in ((c, None), (c, h)):
        out = _gradient(logits, targets, None, transform, *weights, torch.empty_like(logits))
        truth, float32 = (
            _oracle(logits, targets, None, transform, *weights, d) for d in (torch.float64, torch.float32)
        )
        # The others' entries alone: the target's is another formula's.
        others = torch.ones_like(logits, dtype=torch.bool).view(4, 1000)
        others[torch.arange(4), targets] = False
        picked = (x.view(4, 1000)[others].view(4, 999) for x in (out, truth, float32))
        _assert_gradient(*picked, 1e-6, torch.float32)


def test_minus_infinity_and_lowest(device: str) -> None:
    logits = torch.randn(1, 4, 9000, device=device)
    logits[0, 0, :5000] = -torch.inf
    logits[0, 1, 1:] = -torch.inf
    logits[0, 2, 5] = -torch.inf
    logits[0, 3] = torch.finfo(torch.float32).min
    targets = torch.tensor([8000, 0, 5, 2], device=device)
    for softcap in (0.0, 30.0):
        transform = Transform(1.0, None, 1.0, softcap)
        c, h = _weights(device)
        for weights in ((c, None), (c, h)):
            out = _gradient(logits, targets, None, transform, *weights, torch.empty_like(logits))
            truth, float32 = (
                _oracle(logits, targets, None, transform, *weights, d) for d in (torch.float64, torch.float32)
            )
            assert out.isfinite().all()
            _assert_gradient(out, truth, float32, cases.margin(transform), torch.float32)


@pytest.mark.parametrize("vocab", [1000, 1001, 40001])
def test_in_place_and_strided_outputs_are_bitwise_the_same(vocab: int, device: str) -> None:
    logits, targets = cases.random_rows(vocab, torch.float32, device)
    c, h = _weights(device)
    fresh = _gradient(logits, targets, None, IDENTITY, c, h, torch.empty_like(logits))
    gapped = torch.full((2, 3, vocab + 3), 7.0, device=device)
    _gradient(logits, targets, None, IDENTITY, c, h, gapped[:, :-1, 1:-2])
    assert torch.equal(gapped[:, :-1, 1:-2], fresh)
    gapped[:, :-1, 1:-2] = 7.0
    assert (gapped == 7.0).all()  # nothing else was written
    in_place = logits.clone()
    assert torch.equal(_gradient(in_place, targets, None, IDENTITY, c, h, in_place), fresh)


def test_masked_idle_invalid_and_nan_rows(device: str) -> None:
    logits, targets = cases.random_rows(1001, torch.float32, device)
    c, h = _weights(device)
    statistics = backend.row_statistics(logits, targets, None, IDENTITY)
    c[0], h[0] = 0.0, 0.0  # idle
    c[1], h[1] = 0.0, 0.0  # no weight, but the row has a NaN
    logits[0, 1, 5] = torch.nan
    statistics = Statistics(*(s.clone() for s in statistics))
    for s in statistics:
        s[1] = torch.nan
    targets[2] = 1001  # outside, of which row_statistics tells by a NaN log-probability
    statistics.logprobs[2] = torch.nan
    mask = torch.tensor([True, True, True, False], device=device)
    logits[1, 1] = torch.nan  # masked: not read
    targets[3] = -100
    for weights in ((c, None), (c, h)):
        out = torch.full_like(logits, 7.0)
        backend.row_gradient(logits, targets, mask, IDENTITY, statistics, *weights, out)
        assert (out[0, 0] == 0).all()
        assert out[0, 1].isnan().all()
        assert out[1, 0].isnan().all()
        assert (out[1, 1] == 0).all()


@pytest.mark.parametrize("cut", [8, 640, 1000])  # within a vector's reach of the start, in the middle, at a ragged end
def test_slices_of_a_vocabulary_have_the_gradient_of_the_whole(cut: int, device: str) -> None:
    """Two slices with the whole row's statistics: the target is in one, and no column takes its place in the other."""
    logits, targets = cases.random_rows(1001, torch.float32, device)
    c, h = _weights(device)
    statistics = backend.row_statistics(logits, targets, None, IDENTITY)
    whole = torch.empty_like(logits)
    backend.row_gradient(logits, targets, None, IDENTITY, statistics, c, h, whole)
    parts = [torch.empty_like(x) for x in (logits[..., :cut], logits[..., cut:])]
    for out, x, first in zip(parts, (logits[..., :cut], logits[..., cut:]), (0, cut), strict=True):
        backend.row_gradient(x.contiguous(), targets - first, None, IDENTITY, statistics, c, h, out)
    assert torch.equal(torch.cat(parts, -1), whole)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1000, 20000])
def test_a_row_is_bitwise_the_same_at_any_address(vocab: int, dtype: torch.dtype, device: str) -> None:
    logits, targets = cases.random_rows(vocab, dtype, device)
    c, h = _weights(device)
    aligned = _gradient(logits, targets, None, IDENTITY, c, h, torch.empty_like(logits))
    shifted = torch.empty(2, 2, vocab + 1, dtype=dtype, device=device)[:, :, 1:]
    shifted.copy_(logits)
    assert torch.equal(_gradient(shifted, targets, None, IDENTITY, c, h, shifted), aligned)
