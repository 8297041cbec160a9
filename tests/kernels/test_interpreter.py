"""What `interpreter.quicken` changes is the interpreter's speed alone."""

from __future__ import annotations

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("nothing is interpreted", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _squares(out, x, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(out + places, _square(tl.load(x + places)))


def test_a_kernel_and_its_device_function_run() -> None:
    x = torch.arange(8, dtype=torch.int32)
    out = torch.empty_like(x)
    for _ in range(2):  # what the first launch remembered
        _squares[(1,)](out, x, 8)
        assert torch.equal(out, x * x)


@pytest.mark.parametrize(("dtype", "value"), [(torch.int32, 46341), (torch.int32, -46341), (torch.uint8, 16)], ids=str)
def test_integers_that_overflow_are_found(dtype: torch.dtype, value: int) -> None:
    x = torch.zeros(8, dtype=dtype)
    x[3] = value
    with pytest.raises(Exception, match=r"int(32|8) overflow detected for operation mul"):
        _squares[(1,)](torch.empty_like(x), x, 8)
    x[3] = value - 1 if value > 0 else value + 1
    _squares[(1,)](torch.empty_like(x), x, 8)


def test_the_language_is_whole_again_after_a_launch() -> None:
    before = dict(vars(tl))
    x = torch.ones(8, dtype=torch.int32)
    _squares[(1,)](torch.empty_like(x), x, 8)
    assert {name for name, value in vars(tl).items() if before.get(name) is not value} == set()
    assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.__add__)
