"""The kernels compiled for real GPUs: no spills, wide accesses, the number of instructions, no needless compilation."""

from __future__ import annotations

import sys
from typing import Any

import aot
import pytest
from machine_code import run_program

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")


@pytest.fixture(scope="module")
def fast() -> dict[str, Any]:
    return run_program(aot, *(case.name for case in aot.fast_cases()))


@pytest.fixture(scope="module")
def slow() -> dict[str, Any]:
    return run_program(aot, *(case.name for case in aot.slow_cases()))


def _assert_sound(case: aot.Case, found: dict[str, Any]) -> None:
    assert found["spills"] == 0
    if case.gpu == "gfx942":
        assert found["registers"] <= 128  # 512 a lane for four waves a unit
        assert found["wide"] > 0 or not case.aligned
        return
    assert found["registers"] <= 128
    assert len(found["loops"]) == (2 if case.kernel in ("forward-gradient", "beside") else 1)
    for loop in found["loops"]:
        assert loop["instructions"] < (50 if case.softcap else 30)
        assert all(".128" in name for name in loop["loads"]) or not case.aligned, loop["loads"]
        assert all(".128" in name for name in loop["stores"]) or not case.aligned, loop["stores"]


@pytest.mark.parametrize("case", aot.fast_cases(), ids=lambda c: c.name)
def test_compiles_without_spills_and_with_wide_accesses(case: aot.Case, fast: dict[str, Any]) -> None:
    _assert_sound(case, fast[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", aot.slow_cases(), ids=lambda c: c.name)
def test_all_variants(case: aot.Case, slow: dict[str, Any]) -> None:
    _assert_sound(case, slow[case.name])


@pytest.mark.parametrize(
    ("case", "limits"),
    [
        # A bfloat16 entry may cost 14.1 issue slots at an H200's read limit, 28.3 at read + write.
        (aot.Case("statistics", "sm_90"), [10.5]),
        (aot.Case("gradient", "sm_90"), [8.0]),
        (aot.Case("gradient", "sm_90", entropy=True), [10.0]),
        (aot.Case("forward-gradient", "sm_90"), [10.5, 8.5]),
        (aot.Case("forward-gradient", "sm_90", entropy=True), [10.5, 10.5]),
        # Bound by 3.1 special-function operations, at 57 % of the read limit: 24.7 slots.
        (aot.Case("statistics", "sm_90", softcap=True), [24.7]),
        # An odd vocabulary: narrow loads, the same grouping.
        (aot.Case("statistics", "sm_90", aligned=False), [11.5]),
    ],
    ids=lambda x: x.name if isinstance(x, aot.Case) else "",
)
def test_instructions_an_entry(case: aot.Case, limits: list[float], fast: dict[str, Any]) -> None:
    found = [loop["instructions"] for loop in fast[case.name]["loops"]]
    assert all(n <= limit for n, limit in zip(found, limits, strict=True)), found


def test_special_functions_an_entry(fast: dict[str, Any]) -> None:
    # One exponential an entry and one a vector of eight.
    (loop,) = fast[aot.Case("statistics", "sm_90").name]["loops"]
    assert loop["special"] == 1.125


def test_aligned_plain_and_forward_gradient_do_the_same_arithmetic(fast: dict[str, Any]) -> None:
    # What the bitwise equality of a row's statistics, at any address and in both kernels, rests on in the machine code.
    cases = (
        aot.Case("statistics", "sm_90"),
        aot.Case("statistics", "sm_90", aligned=False),
        aot.Case("forward-gradient", "sm_90"),
    )
    first, *others = (fast[case.name]["loops"][0]["arithmetic"] for case in cases)
    assert all(other == first for other in others), (first, others)


def test_a_forward_gradient_reads_its_target_before_any_warp_may_overwrite_it(fast: dict[str, Any]) -> None:
    # The one narrow load is the target's logit; the fold's barriers stand between it and the gradient's stores. (The
    # stores ahead of everything are a masked row's zeros, whose program ends there or are placed last.)
    order = fast[aot.Case("forward-gradient", "sm_90").name]["order"].lstrip("s")
    assert order.startswith("lbb"), order
    assert order.count("l") == 1


def test_lengths_temperatures_and_coefficients_compile_nothing_new() -> None:
    keys = run_program(aot, "keys")
    assert sorted(keys) == [
        "combine_splits_kernel",
        "row_forward_gradient_kernel",
        "row_gradient_kernel",
        "row_statistics_kernel",
    ]
    # Two variants each: rows whole and their segments apart, in place and beside the logits.
    twice = [keys.pop(name) for name in ("row_statistics_kernel", "row_forward_gradient_kernel")]
    for found in (*(found[i::2] for found in twice for i in (0, 1)), *keys.values()):
        assert len(found) == 5
        assert len(set(found)) == 1, "\n".join(sorted(set(found)))
