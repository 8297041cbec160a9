from __future__ import annotations

import kernel_cases as cases
import pytest
import torch
from torch import Tensor

from fastrl.backends.contract import Statistics, Transform
from fastrl.backends.torch import rows as reference

backend = pytest.importorskip("fastrl.backends.triton.backend")

from fastrl.kernels import row_statistics  # noqa: E402
from fastrl.kernels.configuration import configuration  # noqa: E402

# The interpreter is numpy, which warns where a GPU's arithmetic silently gives infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
IDENTITY = Transform()
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("name", ["identity", "scaled", "softcap"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("vocab", cases.VOCABULARIES)
def test_against_float64(vocab: int, dtype: torch.dtype, name: str, device: str) -> None:
    logits, targets = cases.random_rows(vocab, dtype, device)
    transform = cases.transform(name, device)
    actual = backend.row_statistics(logits, targets, None, transform)
    cases.assert_statistics(actual, logits, targets, None, transform)


@pytest.mark.parametrize("vocab", [1000, 40000])  # 40000: four segments, the target's not the first
@pytest.mark.parametrize("gap", [10.0, 26.0, 40.0, 80.0])
def test_confident_tokens_keep_their_relative_accuracy(gap: float, vocab: int, device: str) -> None:
    logits = torch.zeros(1, 2, vocab, device=device)
    logits[0, 1] = torch.randn(vocab).to(device)
    targets = torch.tensor([0, vocab - 3], device=device)
    top = logits.amax(-1) + gap
    logits[0, [0, 1], targets] = top[0]
    actual = backend.row_statistics(logits, targets, None, IDENTITY)
    truth = cases.assert_statistics(actual, logits, targets, None, IDENTITY)
    for name in ("logprobs", "entropy", "log_sum"):
        # e**-80 is 2**-115.4, whose exponent float32 rounds by 4e-6: that is the relative error allowed.
        torch.testing.assert_close(getattr(actual, name).double(), getattr(truth, name), rtol=1e-5, atol=0)


def test_an_example_by_hand(device: str) -> None:
    # docs/design.md: 151,936 equal entries 26 below the target give -7.8e-7, not 0. Here 1,000 of them.
    logits = torch.zeros(1, 1, 1001, device=device)
    logits[0, 0, 7] = 26.0
    actual = backend.row_statistics(logits, torch.tensor([7], device=device), None, IDENTITY)
    assert actual.logprobs.item() == pytest.approx(-1000 * 5.109089028e-12, rel=1e-5)


@pytest.mark.parametrize("offset", [-80.0, 80.0, 4096.0])
def test_an_offset_changes_nothing(offset: float, device: str) -> None:
    logits, targets = cases.random_rows(4097, torch.float32, device)
    logits = (logits * 64).round() / 64  # so that the sum with the offset is exact
    moved = backend.row_statistics(logits + offset, targets, None, IDENTITY)
    still = backend.row_statistics(logits, targets, None, IDENTITY)
    assert torch.equal(moved.entropy, still.entropy)
    assert torch.equal(moved.logprobs, still.logprobs)
    cases.assert_statistics(moved, logits + offset, targets, None, IDENTITY)


def _special(kind: str, vocab: int) -> tuple[Tensor, int]:
    row = torch.randn(vocab)
    if kind == "first block -inf":
        row[: min(vocab, 20000) - 1] = -torch.inf
    elif kind == "all but the target -inf":
        row[:-1] = -torch.inf
    elif kind == "all but another -inf":
        row[1:] = -torch.inf
    elif kind == "target -inf":
        row[-1] = -torch.inf
    elif kind == "all finfo.min":
        row[:] = LOWEST
    elif kind == "all finfo.min but one":
        row[:] = LOWEST
        row[3] = 1.0
    elif kind == "finfo.max and min":
        row[:] = LOWEST
        row[-1] = -LOWEST
    return row, vocab - 1


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize(
    "kind",
    [
        "first block -inf",
        "all but the target -inf",
        "all but another -inf",
        "target -inf",
        "all finfo.min",
        "all finfo.min but one",
        "finfo.max and min",
    ],
)
def test_extreme_rows(kind: str, softcap: float, device: str) -> None:
    row, target = _special(kind, 40000)
    logits = row.to(device)[None, None]
    targets = torch.tensor([target], device=device)
    transform = Transform(1.0, None, 1.0, softcap)
    actual = backend.row_statistics(logits, targets, None, transform)
    z, _ = reference.transformed(logits[0].double(), transform)
    logprob = torch.log_softmax(z, -1)[0, target]
    if kind == "all finfo.min but one" and not softcap:
        # 3.4e38 below the maximum: torch's own log_softmax is asked, for the oracle stops at -1e4.
        torch.testing.assert_close(actual.logprobs[0].double(), logprob, rtol=1e-6, atol=0)
        assert actual.entropy.item() == 0.0
        return
    truth = cases.assert_statistics(actual, logits, targets, None, transform)
    assert truth.logprobs.item() == pytest.approx(logprob.item(), abs=1e-9)
    assert not truth.entropy.isnan().any()


@pytest.mark.parametrize("kind", ["NaN", "NaN target", "+inf", "all -inf", "NaN and target -inf"])
def test_only_the_row_with_the_nan_is_nan(kind: str, device: str) -> None:
    logits, targets = cases.random_rows(5000, torch.float32, device)
    sane = backend.row_statistics(logits, targets, None, IDENTITY)
    row = logits[0, 1]
    if kind == "all -inf":
        row[:] = -torch.inf
    elif kind == "NaN target":
        row[targets[1]] = torch.nan
    else:
        row[(targets[1] + 1) % 5000] = torch.inf if kind == "+inf" else torch.nan
        if kind == "NaN and target -inf":
            row[targets[1]] = -torch.inf
    actual = backend.row_statistics(logits, targets, None, IDENTITY)
    for name in ("logprobs", "entropy", "log_sum"):
        assert getattr(actual, name)[1].isnan(), name
    others = [0, 2, 3]
    for a, b in zip(actual, sane, strict=True):
        assert torch.equal(a[others], b[others])


def test_a_target_outside_the_vocabulary_gives_nan_for_its_logprob_only(device: str) -> None:
    logits, _ = cases.random_rows(1000, torch.float32, device)
    targets = torch.tensor([-1, 1000, 2**40, 5], device=device)
    actual = backend.row_statistics(logits, targets, None, IDENTITY)
    assert actual.logprobs.isnan().tolist() == [True, True, True, False]
    cases.assert_statistics(actual, logits, targets, None, IDENTITY)


def test_masked_rows_are_0_and_not_read(device: str) -> None:
    logits, targets = cases.random_rows(1000, torch.float32, device)
    sane = backend.row_statistics(logits, targets, None, IDENTITY)
    mask = torch.tensor([True, False, True, False], device=device)
    logits.view(4, -1)[~mask] = torch.nan
    targets[~mask] = -100
    actual = backend.row_statistics(logits, targets, mask, IDENTITY)
    for a, b in zip(actual, sane, strict=True):
        assert torch.equal(a, b.where(mask, 0.0))


@pytest.mark.parametrize("vocab", [1000, 1001])
def test_strided_views(vocab: int, device: str) -> None:
    full = torch.randn(2, 3, vocab, device=device)
    targets = torch.randint(0, vocab, (4,), device=device)
    for view in (full[:, :-1], full[:, 1:], full.transpose(0, 1)[:2], full[:, ::2], full[:, :1].expand(2, 2, vocab)):
        actual = backend.row_statistics(view, targets, None, IDENTITY)
        packed = backend.row_statistics(view.contiguous(), targets, None, IDENTITY)
        assert all(torch.equal(a, b) for a, b in zip(actual, packed, strict=True))
        cases.assert_statistics(actual, view, targets, None, IDENTITY)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [24, 4104, 40000])  # aligned by nature; 1, 1 and several segments
def test_a_row_is_bitwise_the_same_anywhere(vocab: int, dtype: torch.dtype, device: str) -> None:
    row = (torch.randn(vocab) * 3).to(dtype).to(device)
    target = vocab // 3

    def statistics(logits: Tensor, at: int) -> Statistics:
        rows = logits.shape[0] * logits.shape[1]
        targets = torch.randint(0, vocab, (rows,), device=device)
        targets[at] = target
        found = backend.row_statistics(logits, targets, None, IDENTITY)
        return Statistics(*(x[at] for x in found))

    alone = statistics(row[None, None], 0)
    batch = torch.randn(1, 3, vocab, device=device).to(dtype)
    batch[0, 2] = row
    shifted = torch.empty(vocab + 1, dtype=dtype, device=device)[1:]  # at no 16-byte address
    shifted.copy_(row)
    gapped = torch.empty(2, 2, vocab + 3, dtype=dtype, device=device)[:, :, 1:-2]  # each row aligned otherwise
    gapped.copy_(row)
    for other in (statistics(batch, 2), statistics(shifted[None, None], 0), statistics(gapped, 3)):
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


@pytest.mark.parametrize("name", ["identity", "scaled", "softcap"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [40_000, 40_001, 70_000])  # two or four segments, aligned or not
def test_segments_apart_give_the_same_bits(
    vocab: int, dtype: torch.dtype, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, targets = cases.random_rows(vocab, dtype, device)
    mask = torch.tensor([True, True, False, True], device=device)
    logits[0, 1, 30_000] = torch.nan
    logits[1, 1, : vocab // 2] = -torch.inf
    transform = cases.transform(name, device)
    found, grids = [], []
    kernel = row_statistics.row_statistics_kernel

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(row_statistics, "row_statistics_kernel", Spy())
    for programs in (0, 1 << 20):
        monkeypatch.setattr(row_statistics, "_PROGRAMS", programs)
        found.append(backend.row_statistics(logits, targets, mask, transform))
    whole, apart = grids
    assert whole == (4, 1) and apart == (4, configuration(vocab, dtype.itemsize).segments) != whole
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.view(torch.int32)[[0, 2, 3]], b.view(torch.int32)[[0, 2, 3]])  # the bits, of zeros too
    assert found[1].logprobs[1].isnan()


def test_no_rows(device: str) -> None:
    found = backend.row_statistics(
        torch.empty(0, 3, 8, device=device), torch.empty(0, dtype=torch.int64, device=device), None, IDENTITY
    )
    assert all(x.shape == (0,) for x in found)
