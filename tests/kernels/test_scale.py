"""A gradient scaled in place or into another dtype, on every backend."""

from __future__ import annotations

import kernel_cases as cases
import pytest
import torch
from torch import Tensor

from fastrl.backend.choice import forced
from fastrl.passes.operator import scale

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def device(backend_device: str) -> str:
    """Each backend in turn, and where its tensors live."""
    return backend_device


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    scale(tensor, torch.tensor(factor, device=tensor.device), tensor, forced())
    return tensor


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("entries", [1, 4096, 70001])  # one entry; one block; two programs and a tail
@pytest.mark.parametrize("factor", [0.37, 0.0, 1.0, 65536.0])
def test_scale(factor: float, entries: int, dtype: torch.dtype, device: str) -> None:
    tensor = torch.randn(entries).to(dtype).to(device)
    expected = (tensor.float() * factor).to(dtype).float()
    rounding = cases.rounding(dtype, device == "cpu")
    torch.testing.assert_close(_scaled(tensor, factor).float(), expected, rtol=2 * rounding, atol=2**-24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (70001,), (3, 700, 1000)], ids=str)  # the last takes two pieces on a CPU
@pytest.mark.parametrize("factor", [0.37, 1.0])
def test_into_another_dtype_it_rounds_once(
    factor: float, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    tensor = torch.randn(shape).to(device)
    before, out = tensor.clone(), torch.empty_like(tensor, dtype=dtype)
    scale(tensor, torch.tensor(factor, device=device), out, forced())
    expected = (before * torch.tensor(factor, device=device)).to(dtype)
    assert cases.same_bits(tensor, before)
    rounding = cases.rounding(dtype, device == "cpu")
    torch.testing.assert_close(out.float(), expected.float(), rtol=2 * rounding, atol=2**-24)


def test_a_factor_of_1_changes_no_bit(backend: str, device: str) -> None:
    tensor = torch.randn(5000).to(device)
    tensor[3] = torch.nan
    before, version = tensor.clone(), tensor._version
    scaled = _scaled(tensor, 1.0)
    if backend == "torch" and device != "cpu":  # it multiplies: nothing is read on the host
        scaled, before = scaled.nan_to_num(7.0), before.nan_to_num(7.0)
    else:
        assert backend == "triton" or tensor._version == version  # not touched
    assert cases.same_bits(scaled, before)


def test_any_strides(device: str) -> None:
    base = torch.randn(4, 6, 10, device=device)
    for view in (base.transpose(0, 2), base[:, 1:4], base[:, :, ::3], base[0, 0, 0], base[:0]):
        expected, outside = view * 2.5, base.clone()
        assert torch.equal(_scaled(view, 2.5), expected)
        if view.numel() == 72:
            assert torch.equal(base[:, 4:], outside[:, 4:])


def test_nan_and_infinite_factors(device: str) -> None:
    assert _scaled(torch.ones(3, device=device), torch.nan).isnan().all()
    assert _scaled(torch.ones(3, device=device), torch.inf).isinf().all()
