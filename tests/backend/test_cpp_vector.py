"""The vector functions of `csrc/vector.h` by themselves, in a library of their own."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from fastrl.backend.cpp import backend as cpp_backend
from fastrl.backend.cpp import build

pytestmark = pytest.mark.skipif(
    cpp_backend.why_unavailable() is not None, reason=f"no C++ backend: {cpp_backend.why_unavailable()}"
)
_SOURCE = """
#include "vector.h"
extern "C" void log_positive(const float* x, long count, float* out) {
  for (long i = 0; i < count; i += fastrl::W) fastrl::store(out + i, fastrl::log_positive(fastrl::load(x + i)));
}
"""


def test_the_logarithm_is_within_2_units_in_the_last_place() -> None:
    header = Path(__file__).parents[2] / "csrc" / "vector.h"
    library = ctypes.CDLL(str(build.build("vector-test", {"vector.h": header.read_text(), "test.cpp": _SOURCE})))
    first, last = torch.tensor([2.0**-126, torch.finfo(torch.float32).max]).view(torch.int32).tolist()
    # All binades sparsely, those around 1 densely.
    bits = torch.cat([torch.arange(first, last, 1999), torch.arange(0x3F000000, 0x40000000, 11)]).to(torch.int32)
    x = bits[: bits.numel() // 16 * 16].view(torch.float32)
    x[0] = 1.0
    out = torch.empty_like(x)
    library.log_positive(ctypes.c_void_p(x.data_ptr()), ctypes.c_long(x.numel()), ctypes.c_void_p(out.data_ptr()))
    exact = x.double().log()
    unit = torch.exp2(exact.abs().clamp_min(2.0**-126).log2().floor() - 23)
    assert out[0] == 0
    assert ((out.double() - exact).abs() / unit).max() <= 2
