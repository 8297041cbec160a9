"""The kernels compiled for real GPUs: spills, wide accesses, atomics, instructions, and no needless compilation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import aot
import find_support_aot
import pair_aot
import pytest
import support_aot
from machine_code import asked

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
Ask = Callable[[ModuleType, str], Any]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """A program's findings of a case, or its keys."""
    with asked() as ask:
        yield ask


def _assert_rows(case: aot.Case, found: dict[str, Any]) -> None:
    # Three programs of four warps; else four, and one of 16. AMD: 512 per lane for four waves per unit.
    light = case.aligned and not case.softcap
    assert found["registers"] <= (128 if light or case.kernel in ("forward-gradient", "beside") else 168)
    if case.gpu == "gfx942":
        assert found["wide"] > 0 or not case.aligned
        return
    assert len(found["loops"]) == (2 if case.kernel in ("forward-gradient", "beside") else 1)
    for loop in found["loops"]:
        assert loop["instructions"] < (50 if case.softcap else 30)
        assert all(".128" in name for name in loop["loads"]) or not case.aligned, loop["loads"]
        # Four entries, which are a vector of the logits, are half of one in 16 bits.
        assert all((".64" if case.out else ".128") in x for x in loop["stores"]) or not case.aligned, loop["stores"]


def _assert_support(case: support_aot.Case, found: dict[str, Any]) -> None:
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


def _assert_find_support(case: find_support_aot.Case, found: dict[str, Any]) -> None:
    assert found["registers"] <= 128  # two programs of 256 threads per multiprocessor
    assert (found["wide"] > 0) == case.aligned
    # The quotient's last bit decides which entries are tied.
    assert (found["divisions"] > 0) == case.scaled


def _assert_pair(case: pair_aot.Case, found: dict[str, Any]) -> None:
    assert found["registers"] <= 128  # a program of 16 warps per multiprocessor
    assert found["shared"] <= 64 << 10
    assert found["wide"] > 0 or not case.aligned


PROGRAMS = {
    aot: _assert_rows,
    support_aot: _assert_support,
    find_support_aot: _assert_find_support,
    pair_aot: _assert_pair,
}


def _cases(marks: Any, of: str) -> list[Any]:
    return [
        pytest.param(program, case, marks=marks, id=f"{program.__name__}/{case.name}")
        for program in PROGRAMS
        for case in getattr(program, of)()
    ]


@pytest.mark.parametrize(("program", "case"), [*_cases((), "fast_cases"), *_cases(pytest.mark.slow, "slow_cases")])
def test_compiles_without_spills_and_with_wide_accesses(program: ModuleType, case: Any, ask: Ask) -> None:
    found = ask(program, case.name)
    assert found["spills"] == 0
    assert found["atomics"] == 0  # the order of sums is fixed
    PROGRAMS[program](case, found)


@pytest.mark.parametrize(
    ("case", "limits"),
    [
        # A bfloat16 entry may cost 14.1 issue slots at an H200's read limit, 28.3 at read + write.
        (aot.Case("statistics", "sm_90"), [10.5]),
        pytest.param(aot.Case("gradient", "sm_90"), [7.5], marks=pytest.mark.slow),
        (aot.Case("gradient", "sm_90", entropy=True), [9.5]),
        (aot.Case("forward-gradient", "sm_90"), [10.5, 7.75]),
        (aot.Case("forward-gradient", "sm_90", entropy=True), [10.5, 9.75]),
        # Bound by 3.1 special-function operations, at 57 % of the read limit: 24.7 slots.
        (aot.Case("statistics", "sm_90", softcap=True), [24.7]),
        # An odd vocabulary: narrow loads, the same grouping.
        (aot.Case("statistics", "sm_90", aligned=False), [11.5]),
    ],
    ids=lambda x: x.name if isinstance(x, aot.Case) else "",
)
def test_instructions_per_entry(case: aot.Case, limits: list[float], ask: Ask) -> None:
    found = [loop["instructions"] for loop in ask(aot, case.name)["loops"]]
    assert all(n <= limit for n, limit in zip(found, limits, strict=True)), found


LIGHT = [
    case
    for case in aot.fast_cases()
    if case.gpu == "sm_90" and case.aligned and not case.softcap and not case.stages and case.kernel != "scale"
]


@pytest.mark.parametrize("case", LIGHT, ids=lambda case: case.name)
def test_loads_in_flight(case: aot.Case, ask: Ask) -> None:
    # At 4.3 TB/s 33 KB arrive at a multiprocessor in a microsecond, about a load's time: twice that, during the
    # computation too, by the pipeline's copies to shared memory. The smallest GPUs have 99 KiB of it.
    found = ask(aot, case.name)
    assert all("LDGSTS" in name for loop in found["loops"] for name in loop["loads"])
    assert found["in_flight"] >= 64 << 10, found
    assert found["shared"] <= 64 << 10
    if case.kernel in ("forward-gradient", "beside"):
        assert found["in_flight"] == found["shared"]  # one program per multiprocessor: the second sweep reads from L2


@pytest.mark.parametrize(
    ("case", "instructions", "shuffles", "barriers"),
    [
        # Of all warps together: what a multiprocessor issues while nothing is loaded. 3 barriers are the pipeline's.
        (aot.Case("forward-gradient", "sm_90"), 16 * 700, 16 * 40, 14),
        (aot.Case("forward-gradient", "sm_90", entropy=True), 16 * 750, 16 * 40, 14),
        # After each segment the fold, at the end that of the segments; the other programs of a multiprocessor load.
        (aot.Case("statistics", "sm_90"), 4 * 425, 4 * 42, 6),
    ],
    ids=lambda x: x.name if isinstance(x, aot.Case) else "",
)
def test_work_between_the_sweeps(case: aot.Case, instructions: int, shuffles: int, barriers: int, ask: Ask) -> None:
    found = ask(aot, case.name)["between"]
    assert found["instructions"] * found["warps"] <= instructions, found
    assert found["shuffles"] * found["warps"] <= shuffles, found
    assert found["barriers"] <= barriers, found


@pytest.mark.parametrize(
    "stages", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_every_number_of_stages_does_the_same_arithmetic(stages: int, ask: Ask) -> None:
    # So a row's bits do not depend on it: the compiler moves loads, and sums are added as they were.
    cases = (aot.Case("forward-gradient", "sm_90", stages=x) for x in (None, stages))
    first, other = ([x["arithmetic"] for x in ask(aot, case.name)["loops"]] for case in cases)
    assert len(first) == 2 and other == first, (first, other)


def test_special_functions_per_entry(ask: Ask) -> None:
    # One exponential per entry and one per vector of eight.
    (loop,) = ask(aot, aot.Case("statistics", "sm_90").name)["loops"]
    assert loop["special"] == 1.125


def test_aligned_plain_and_forward_gradient_do_the_same_arithmetic(ask: Ask) -> None:
    # What the bitwise equality of a row's statistics, at any address and in both kernels, rests on in the machine code.
    cases = (
        aot.Case("statistics", "sm_90"),
        aot.Case("statistics", "sm_90", aligned=False),
        aot.Case("forward-gradient", "sm_90"),
    )
    first, *others = (ask(aot, case.name)["loops"][0]["arithmetic"] for case in cases)
    assert all(other == first for other in others), (first, others)


def test_a_forward_gradient_reads_its_target_before_any_warp_may_overwrite_it(ask: Ask) -> None:
    # The one narrow load is the target's logit; the fold's barriers stand between it and the gradient's stores. (The
    # stores ahead of everything are a masked row's zeros, whose program ends there or are placed last.) With one stage,
    # the sweep before the fold, which short rows skip, has none of these barriers.
    for stages in (None, 1):
        order = ask(aot, aot.Case("forward-gradient", "sm_90", stages=stages).name)["order"].lstrip("s")
        assert order.startswith("lbb"), order
        assert order.count("l") == 1


# Calls, and variants of each kernel: a row's segments apart, in place or beside the logits; a gradient in order of its
# entries (support_hidden) or by tokens (support_weight); their rows alone, twice, or to be sorted by token; a pair's
# statistics, gradient, and both.
KERNELS = {
    aot: (5, {"combine_splits": 1, "row_forward_gradient": 2, "row_gradient": 1, "row_statistics": 2}),
    find_support_aot: (3, {"choose": 1, "write": 1}),
    pair_aot: (3, {"row_divergence": 3}),
    support_aot: (
        4,
        {
            **dict.fromkeys(("add_pieces", "support_products", "support_restrict"), 1),
            **dict.fromkeys(("gather_entries", "scatter_entries"), 1),
            **dict.fromkeys(("support_forward_gradient", "support_gradient", "support_statistics"), 1),
            **{"entry_rows": 3, "heads": 2, "segment_sums": 2},
        },
    ),
}


@pytest.mark.parametrize("program", KERNELS, ids=lambda program: program.__name__)
def test_lengths_numbers_and_strides_compile_nothing_new(program: ModuleType, ask: Ask) -> None:
    keys = ask(program, "keys")
    calls, kernels = KERNELS[program]
    assert set(keys) == {f"{name}_kernel" for name in kernels}
    for name, variants in kernels.items():
        found = keys[f"{name}_kernel"]
        assert found and len(found) % (calls * variants) == 0, name
        for same in (set(found[i::variants]) for i in range(variants)):
            assert len(same) == 1, "\n".join(sorted(same))
