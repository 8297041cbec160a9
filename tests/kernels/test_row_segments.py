"""What only Triton's row functions do: segments of a row by programs of their own, gradients in another type."""

from __future__ import annotations

import kernel_cases as cases
import pytest
import torch

pytest.importorskip("triton")

from fastrl.kernels import row_gradient, row_statistics
from fastrl.kernels.configuration import configuration

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.parametrize("backend", ["triton"], indirect=True),
]


@pytest.mark.parametrize("name", ["identity", "scaled", "softcap"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [40_000, 40_001, 70_000])  # two or four segments, aligned or not
@pytest.mark.usefixtures("backend")
def test_segments_apart_give_the_same_bits(
    vocab: int, dtype: torch.dtype, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, targets, *_ = cases.random_rows(vocab, dtype, device)
    mask = torch.tensor([True, True, False, True], device=device)
    logits[0, 1, 30_000] = torch.nan
    logits[1, 1, : vocab // 2] = -torch.inf
    found, grids = [], []
    kernel = row_statistics.row_statistics_kernel

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(row_statistics, "row_statistics_kernel", Spy())
    for programs in (0, 1 << 20):
        monkeypatch.setattr(row_statistics, "_PROGRAMS", programs)
        found.append(cases.row_statistics(logits, targets, mask, cases.transform(name, device)))
    whole, apart = grids
    assert whole == (4, 1) and apart == (4, configuration(vocab, dtype.itemsize).segments) != whole
    for a, b in zip(*found, strict=True):
        assert cases.same_bits(a[[0, 2, 3]], b[[0, 2, 3]])  # of zeros too
    assert found[1].logprobs[1].isnan()


@pytest.mark.parametrize("vocab", [1000, 9000])  # less than a step; two and a tail
@pytest.mark.usefixtures("backend")
def test_every_number_of_stages_gives_the_same_bits(vocab: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets, c, h = cases.random_rows(vocab, torch.bfloat16, device)
    transform, found = cases.transform("identity", device), []
    for stages in (1, 2, 3, 4):
        for module in (row_statistics, row_gradient):
            monkeypatch.setattr(module, "configuration", lambda *x, n=stages: configuration(*x)._replace(stages=n))
        statistics, out = cases.row_statistics(logits, targets, None, transform), torch.empty_like(logits)
        cases.row_gradient(logits, targets, None, transform, statistics, c, h, out=out)
        found.append([*statistics, out])
    for other in found[1:]:
        assert all(cases.same_bits(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("out_dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1000, 4097])
@pytest.mark.usefixtures("backend")
def test_a_gradient_of_another_type(vocab: int, dtype: torch.dtype, out_dtype: torch.dtype, device: str) -> None:
    logits, targets, c, h = cases.random_rows(vocab, dtype, device)
    cases.check(logits, targets, c, h, out=torch.empty_like(logits, dtype=out_dtype))
