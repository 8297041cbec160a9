"""`find_support` compiled for real GPUs: no spills, whole vectors, no atomics, no needless compilation."""

from __future__ import annotations

import sys
from typing import Any

import find_support_aot
import pytest
from find_support_aot import Case
from machine_code import VENDORS, run_program

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
FAST = [case for case in find_support_aot.cases() if case.gpu in VENDORS]
SLOW = [case for case in find_support_aot.cases() if case.gpu not in VENDORS]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return run_program(find_support_aot, *(case.name for case in FAST))


@pytest.fixture(scope="module")
def slow() -> dict[str, Any]:
    return run_program(find_support_aot, *(case.name for case in SLOW))


@pytest.mark.parametrize("case", FAST, ids=lambda c: c.name)
def test_compiles_without_spills(case: Case, compiled: dict[str, Any]) -> None:
    _assert_sound(case, compiled[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda c: c.name)
def test_all_variants(case: Case, slow: dict[str, Any]) -> None:
    _assert_sound(case, slow[case.name])


def _assert_sound(case: Case, found: dict[str, Any]) -> None:
    assert found["spills"] == 0
    assert found["registers"] <= 128  # two programs of 256 threads a multiprocessor
    assert found["atomics"] == 0  # the order of sums is fixed
    assert (found["wide"] > 0) == case.aligned
    # The quotient's last bit decides which entries are tied.
    assert (found["divisions"] > 0) == case.scaled


def test_lengths_numbers_and_strides_compile_nothing_new() -> None:
    keys = run_program(find_support_aot, "keys")
    assert sorted(keys) == ["choose_kernel", "write_kernel"]
    for same in keys.values():
        assert len(same) == 3 and len(set(same)) == 1, "\n".join(sorted(set(same)))
