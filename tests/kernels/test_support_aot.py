"""The support's kernels compiled for real GPUs: no spills, wide loads, no atomics, no needless compilation."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import support_aot
from machine_code import run_program
from support_aot import Case

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")


@pytest.fixture(scope="module")
def fast() -> dict[str, Any]:
    return run_program(support_aot, *(case.name for case in support_aot.fast_cases()))


@pytest.fixture(scope="module")
def slow() -> dict[str, Any]:
    return run_program(support_aot, *(case.name for case in support_aot.slow_cases()))


def _assert_sound(case: Case, found: dict[str, Any]) -> None:
    assert found["spills"] == 0
    assert found["atomics"] == 0
    assert found["shared"] <= 8 << 10
    if case.gpu != "gfx942":
        # Programs of 128 threads that fit a multiprocessor: 4, and 6 of products loaded 16 bytes at a time; in float32
        # 3 of the sums.
        products = case.kernel == "products" and case.wide and case.dtype != "fp32"
        sums = case.kernel in ("weight", "hidden") and case.dtype == "fp32"
        assert found["registers"] <= (80 if products else 168 if sums else 128)
    if case.wide:
        # What is read in a step: 8 rows (4 of the segment kernel on AMD), two matrices of 4 for the products.
        segments = case.kernel in ("weight", "hidden")
        rows = 4 if segments and case.gpu == "gfx942" else 8
        vectors = rows * (2 if case.dtype == "fp32" and case.kernel != "pieces" else 1)
        assert found["wide"] >= vectors
        if case.gpu != "gfx942":
            assert found["before_store"] >= vectors  # all of it is on its way before the first result is stored
    elif case.kernel in ("products", "weight", "hidden") and case.gpu != "gfx942":
        assert found["wide"] == 0


@pytest.mark.parametrize("case", support_aot.fast_cases(), ids=lambda c: c.name)
def test_compiles_without_spills_and_with_wide_loads(case: Case, fast: dict[str, Any]) -> None:
    _assert_sound(case, fast[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", support_aot.slow_cases(), ids=lambda c: c.name)
def test_all_variants(case: Case, slow: dict[str, Any]) -> None:
    _assert_sound(case, slow[case.name])


def test_lengths_temperatures_and_strides_compile_nothing_new() -> None:
    keys = run_program(support_aot, "keys")
    kernels = (
        "add_pieces",
        "entry_rows",
        "heads",
        "support_gradient",
        "support_products",
        "support_restrict",
        "support_statistics",
        "segment_sums",
    )
    assert set(keys) == {f"{name}_kernel" for name in kernels}
    for name, found in keys.items():
        # support_hidden and support_weight share a kernel, in two variants: a gradient in order, or by entries.
        assert len(set(found)) == (2 if name == "segment_sums_kernel" else 1), "\n".join(sorted(set(found)))
