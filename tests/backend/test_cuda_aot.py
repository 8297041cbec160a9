"""The CUDA C++ kernel compiled by NVRTC for GPUs that are not here: resources, spills, wide accesses, instructions."""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import Any

import aot
import pytest
import torch
from machine_code import Code, disassemble, run_program

from fastrl.backend.cuda import nvrtc
from fastrl.backend.cuda import row_forward_gradient as kernel
from fastrl.backend.cuda.row_forward_gradient import Variant
from fastrl.kernels.configuration import configuration
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS

pytest.importorskip("triton")  # its wheel has the disassembler
pytestmark = pytest.mark.skipif(nvrtc.why_unavailable() is not None, reason=f"no NVRTC: {nvrtc.why_unavailable()}")
TARGETS = ("sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow))
MULTIPROCESSOR, BLOCK, RESERVED = 228 << 10, 227 << 10, 1 << 10  # bytes of shared memory of these GPUs
BF16, CLIP = torch.bfloat16, ("clip", "k3")

VARIANTS = [
    Variant(BF16, 4, 256, False, False, *CLIP),
    Variant(BF16, 4, 256, False, True, *CLIP),
    Variant(BF16, 4, 512, False, True, "soft", "k3-unbiased"),
    Variant(torch.float16, 1, 256, False, True, *CLIP),
    Variant(BF16, 4, 256, True, False, *CLIP),
]
MORE = [
    *itertools.starmap(
        Variant, itertools.product(kernel._ELEMENTS, (2,), (256,), (False, True), (False, True), *zip(CLIP))
    ),
    *(
        Variant(BF16, segments, threads, softcap, True, gate, kl)
        for (segments, threads), softcap in itertools.product(((4, 256), (4, 512), (1, 256)), (False, True))
        for gate, kl in zip(GATE_FORMULAS, KL_FORMULAS, strict=False)
    ),
]


@cache
def compiled(variant: Variant, target: str) -> tuple[int, int, str]:
    """Registers per thread, bytes of stack and local memory, machine code."""
    return disassemble(nvrtc.compile_source(kernel.source(variant), kernel.headers(), target))


def loops(variant: Variant, target: str) -> list[list[str]]:
    """The instructions of the loops that read pieces of a row: statistics, gradient."""
    code = Code(compiled(variant, target)[2])
    reading = [s for s in code.loops if any(text.startswith("LDS.128") for _, text in code.body(*s))]
    inner = [s for s in reading if not any(t != s and s[0] <= t[0] and t[1] <= s[1] for t in reading)]
    return [[text for _, text in code.body(*span)] for span in inner]


def count(body: list[str], pattern: str) -> dict[str, int]:
    names = [m[0] for text in body if (m := re.match(pattern, text))]
    return {name: names.count(name) for name in sorted(set(names))}


def name(x: Any) -> str:
    return "-".join(map(str, x)) if isinstance(x, Variant) else str(x)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", [*VARIANTS, *(pytest.param(v, marks=pytest.mark.slow) for v in MORE)], ids=name)
def test_resources_and_wide_accesses(variant: Variant, target: str) -> None:
    registers, spills, code = compiled(variant, target)
    # The objective is double arithmetic, once a row: DPPO's KL takes more than three blocks leave, outside the loops.
    assert spills <= (64 if variant.gate == "divergence-kl" else 0)
    # Three blocks of 256 threads to a multiprocessor, two with a softcap, or one of 512.
    assert registers <= (128 if variant.softcap or variant.threads == 512 else 80)
    assert not re.search(r"\b(ATOM[GS]?|REDG?)\.", code)
    assert "UBLKCP" in code  # bulk copies
    vectors = 512 // variant.threads
    first, second = loops(variant, target)
    assert not any(re.search(r"\b(LDL|STL)\b", text) for text in (*first, *second))
    assert count(first, r"LDS\S*|STG\S*") == {"LDS.128": vectors}
    assert count(second, r"LDS\S*") == {"LDS.128": vectors}
    assert sum(count(second, r"STG\S*\.128").values()) == sum(count(second, r"STG").values()) == vectors


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("number", "limits"), [(0, (10.0, 7.0)), (1, (10.0, 9.0)), (2, (11.0, 9.0))])
def test_instructions_per_entry(number: int, limits: tuple[float, float], target: str) -> None:
    # A bfloat16 entry may cost 28.3 issue slots at an H200's read + write limit.
    variant = VARIANTS[number]
    entries = kernel._PIECE // variant.threads
    found = [len(body) / entries for body in loops(variant, target)]
    assert all(n <= limit for n, limit in zip(found, limits, strict=True)), found


def test_the_arithmetic_is_that_of_tritons_kernel() -> None:
    # What the bitwise equality of statistics with `row_statistics` rests on, as far as machine code tells. (A softcap's
    # reciprocals have fewer instructions here.)
    names = {entropy: aot.Case("forward-gradient", "sm_90", entropy=entropy).name for entropy in (False, True)}
    triton = run_program(aot, *names.values())
    for entropy, name in names.items():
        variant = Variant(BF16, 4, 256, False, entropy, *aot.Case.objective)
        entries = kernel._PIECE // variant.threads
        for body, loop in zip(loops(variant, "sm_90a"), triton[name]["loops"], strict=True):
            theirs = 8 * sum(loop["loads"].values())  # each is a vector
            ours = count(body, "FADD|FMUL|FFMA|MUFU")
            assert {k: n * theirs for k, n in ours.items()} == {k: n * entries for k, n in loop["arithmetic"].items()}


@pytest.mark.parametrize(
    ("vocab", "segments", "size", "blocks"),
    [
        (32768, 1, 256, 3),
        (65536, 2, 256, 3),
        (128256, 4, 256, 3),
        (131072, 4, 256, 3),
        (151936, 4, 256, 3),
        (201088, 4, 256, 2),
        (262144, 4, 512, 1),
    ],
)
def test_blocks_of_a_multiprocessor(vocab: int, segments: int, size: int, blocks: int) -> None:
    """By their shared memory; the registers allow as many."""
    shared = kernel.shared_bytes(vocab, segments)
    assert configuration(vocab, 2).segments == segments
    assert kernel.threads(shared, MULTIPROCESSOR) == size
    assert shared <= BLOCK and MULTIPROCESSOR // (shared + RESERVED) == blocks


def test_a_source_that_does_not_compile_gives_the_compilers_messages() -> None:
    with pytest.raises(RuntimeError, match="undefined"):
        nvrtc.compile_source("int f() { return missing; }", {}, "sm_90a")
