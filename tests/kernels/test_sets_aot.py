"""The kernels of `kept_sets` compiled for real GPUs: no spills, whole vectors, no atomics, no needless compilation."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import sets_aot
from machine_code import run_program
from sets_aot import Case

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return run_program(sets_aot, *(case.name for case in sets_aot.cases()))


@pytest.mark.parametrize("case", sets_aot.cases(), ids=lambda c: c.name)
def test_compiles_without_spills(case: Case, compiled: dict[str, Any]) -> None:
    found = compiled[case.name]
    assert found["spills"] == 0
    assert found["registers"] <= 128  # two programs of 256 threads a multiprocessor
    assert found["atomics"] == 0  # the order of sums is fixed
    assert (found["wide"] > 0) == case.aligned
    # The quotient's last bit decides which entries are tied.
    assert (found["divisions"] > 0) == case.scaled


def test_lengths_numbers_and_strides_compile_nothing_new() -> None:
    keys = run_program(sets_aot, "keys")
    assert sorted(keys) == ["choose_kernel", "write_kernel"]
    for same in keys.values():
        assert len(same) == 3 and len(set(same)) == 1, "\n".join(sorted(set(same)))
