from __future__ import annotations

import kernel_cases as cases
import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
backend = pytest.importorskip("fastrl.backends.triton.backend")


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("entries", [1, 4096, 70001])  # one entry; one block; two programs and a tail
@pytest.mark.parametrize("factor", [0.37, 0.0, 1.0, 65536.0])
def test_scale(factor: float, entries: int, dtype: torch.dtype, device: str) -> None:
    tensor = torch.randn(entries).to(dtype).to(device)
    expected = tensor.float() * factor
    result = backend.scale_(tensor, torch.tensor(factor, device=device))
    assert result is tensor
    rounding = cases.rounding(dtype, device == "cpu")
    torch.testing.assert_close(tensor.float(), expected.to(dtype).float(), rtol=2 * rounding, atol=2**-24)


def test_a_factor_of_1_changes_no_bit(device: str) -> None:
    tensor = torch.randn(5000).to(device)
    tensor[3] = torch.nan
    before = tensor.clone()
    backend.scale_(tensor, torch.tensor(1.0, device=device))
    assert torch.equal(tensor.view(torch.int32), before.view(torch.int32))


def test_any_strides(device: str) -> None:
    base = torch.randn(4, 6, 10, device=device)
    for view in (base.transpose(0, 2), base[:, 1:4], base[:, :, ::3], base[0, 0, 0], base[:0]):
        expected, outside = view * 2.5, base.clone()
        backend.scale_(view, torch.tensor(2.5, device=device))
        assert torch.equal(view, expected)
        if view.numel() == 72:
            assert torch.equal(base[:, 4:], outside[:, 4:])


def test_nan_and_infinite_factors(device: str) -> None:
    tensor = torch.ones(3, device=device)
    assert backend.scale_(tensor.clone(), torch.tensor(torch.nan, device=device)).isnan().all()
    assert backend.scale_(tensor.clone(), torch.tensor(torch.inf, device=device)).isinf().all()
