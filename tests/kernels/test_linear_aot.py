"""The linear kernels compiled for real GPUs: no spills, tensor cores, asynchronous loads, no needless compilation."""

from __future__ import annotations

import sys
from typing import Any

import linear_aot
import pytest
from linear_aot import Case
from machine_code import run_program

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")


@pytest.fixture(scope="module")
def fast() -> dict[str, Any]:
    return run_program(linear_aot, *(case.name for case in linear_aot.fast_cases()))


@pytest.fixture(scope="module")
def slow() -> dict[str, Any]:
    return run_program(linear_aot, *(case.name for case in linear_aot.slow_cases()))


def _assert_sound(case: Case, found: dict[str, Any]) -> None:
    assert found["spills"] == 0
    # What a program may have: 99 KiB on sm_86, sm_89 and sm_120, which take sm_80's sizes.
    assert found["shared"] <= {"sm_80": 99 << 10, "gfx942": 64 << 10}.get(case.gpu, 227 << 10)
    if case.kernel == "combine":
        return
    products = found["products"]
    if case.gpu == "gfx942":
        assert products and all(name.startswith("v_mfma_f32_32x32x") for name in products)
    elif case.dtype == "fp32":
        assert not products  # they would round the operands
    else:
        assert list(products) == [{"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}[case.gpu]]
    assert (found["tma"] > 0) == (case.loads == "tma")
    # The AMD compiler joins float32 loads in twos.
    assert (found["wide"] > 0) == (case.loads == "wide" and not (case.gpu == "gfx942" and case.dtype == "fp32"))
    if case.gpu == "sm_90" and case.loads != "narrow" and case.dtype != "fp32":
        # One step's products run while the next begins; all have ended before the tile is folded.
        assert found["waits"] == [1, 0]


@pytest.mark.parametrize("case", linear_aot.fast_cases(), ids=lambda c: c.name)
def test_compiles_without_spills_and_with_tensor_cores(case: Case, fast: dict[str, Any]) -> None:
    _assert_sound(case, fast[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", linear_aot.slow_cases(), ids=lambda c: c.name)
def test_all_variants(case: Case, slow: dict[str, Any]) -> None:
    _assert_sound(case, slow[case.name])


def test_folding_a_tile_is_a_small_part_of_it(fast: dict[str, Any]) -> None:
    # A tile of 128 x 256 x 4096 takes an H200's tensor cores 65,536 cycles; 1,347 instructions of 8 warps take a
    # multiprocessor's four schedulers 2,694: 4 %. All that is not products counts, the next tile's first loads too.
    assert 1000 < fast[Case("statistics", "sm_90", "bf16", "tma").name]["epilogue"] <= 1400
    # Twice the rows a thread of 128 x 128, none of its products' operands.
    assert 800 < fast[Case("statistics", "sm_80", "bf16", "wide").name]["epilogue"] <= 1150


def test_lengths_temperatures_and_strides_compile_nothing_new() -> None:
    keys = run_program(linear_aot, "keys")
    assert sorted(keys) == ["combine_splits_kernel", "linear_statistics_kernel"]
    found = keys["linear_statistics_kernel"]
    assert len(found) == 8
    for same in (found[:4], found[4:], keys["combine_splits_kernel"]):  # with descriptors, by address
        assert len(set(same)) == 1, "\n".join(sorted(set(same)))
