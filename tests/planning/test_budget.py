"""A budget of bytes is kept: the high-water mark of a process that does nothing else, plan by plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import budget_child
import pytest
import torch
from gpu import needs_gpu
from places import SUPPORT
from python import python
from smallest_budget import smallest_budget

import fastrl
from fastrl.objectives.row_local import ANY
from fastrl.planning.plans import choose
from fastrl.planning.tiling import Call, Needs

MIB = 2**20
#: A call, and later what was measured of it.
Case = dict[str, Any]
SLOW = pytest.mark.slow
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads and resets a process' peak in /proc")

# N, H, V: a tile's rows and columns both cut (tokens above all; the vocabulary above all), and a wide hidden state.
SHAPES = [(4096, 256, 8192), (1024, 64, 65536), (512, 1024, 16384)]
#: In float16, whose products take a CPU a second for 2 GFLOP: narrow hidden states, and logits of 32 MiB still.
HALF_SHAPE = (2048, 64, 8192)
#: Tokens alone: what is held a row decides, and tiles are next to nothing.
MANY_ROWS = (100_000, 2, 16)
#: What of a measurement is not temporary tensors: a huge page at either end of the tile, and what malloc keeps.
GRANULARITY = 3 * MIB
TIMEOUT = 3600.0  # seconds, for the cases of one test
CASES = [
    # plan, objective, which inputs have a gradient
    ("forward-gradient", "GRPO", "hw"),
    ("recompute", "GRPO", "hw"),
    ("two-pass", "GRPO", "hw"),
    ("whole-response", "GSPO", "hw"),
    ("whole-response", "DPO", "hw"),
    ("recompute", "GSPO", "h"),
    ("frozen-head", "GSPO", "h"),
    ("recompute", "logprobs", "hw"),
    ("frozen-head", "logprobs", "h"),
    ("forward", "logprobs", ""),
    ("forward", "GSPO", ""),
    (None, "DeepSeekV32", "hwb"),
]
DIVERGENCES = [
    ("recompute", "jsd", "hwb"),
    ("forward-gradient", "jsd", "hw"),
    ("forward-gradient", "reverse_kl", "h"),
    ("two-pass", "forward_kl", "hw"),
    ("forward", "jsd", ""),
]


def a_case(plan: str | None, objective: str, needs: str, shape: tuple[int, int, int], budget: int | None) -> Case:
    """As tests/support/budget_child.py reads it; the budget in MiB."""
    budget = None if budget is None else budget * MIB
    named = {"plan": plan, "objective": objective, "needs": needs, "shape": shape, "budget": budget}
    return {**named, "masked": False}


def measure(
    dtype: str,
    backend: str,
    shapes: list[Any],
    budgets: list[int],
    masks: Sequence[bool] = (False, True),
    float32_logits: bool = False,
    divergences: int = 1,
) -> list[Case]:
    """Every plan's case of each shape, budget and mask; and the first so many of the divergences'."""
    cases = [
        {**a_case(*case, shape, budget), "masked": masked, "float32_logits": float32_logits}
        for shape, budget, case, masked in product(shapes, budgets, CASES + DIVERGENCES[:divergences], masks)
    ]
    return run(dtype, backend, cases)


def start(dtype: str, backend: str) -> subprocess.Popen[str]:
    """A process of tests/support/budget_child.py."""
    # Buffers come from the system and go back to it, so that a peak is not hidden by what an earlier one left.
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0", "MALLOC_ARENA_MAX": "1"}
    settings["OMP_NUM_THREADS"] = "2"  # some plans need memory per thread
    command = [sys.executable, str(SUPPORT / "budget_child.py"), dtype, backend]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env=os.environ | settings)


#: By dtype and backend, shared by all tests of this file: to import takes seconds.
CHILDREN: dict[tuple[str, str], subprocess.Popen[str]] = {}


@pytest.fixture(scope="module", autouse=True)
def _children_end() -> Iterator[None]:
    yield
    while CHILDREN:
        CHILDREN.popitem()[1].communicate(timeout=60)


def ask(process: subprocess.Popen[str], line: str) -> str:
    """The line that a child answers; "" if it has died, or has not answered in time."""
    assert process.stdin is not None and process.stdout is not None
    timer = threading.Timer(TIMEOUT, process.kill)
    timer.start()
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return ""
    finally:
        timer.cancel()


def run(dtype: str, backend: str, cases: list[Case]) -> list[Case]:
    """Runs of tests/support/budget_child.py in one process: bytes asked for, planned and used."""
    if (dtype, backend) not in CHILDREN:
        CHILDREN[dtype, backend] = start(dtype, backend)
    told = ask(CHILDREN[dtype, backend], json.dumps(cases))
    if not told:  # its traceback is on stderr
        CHILDREN.pop((dtype, backend)).kill()
        pytest.fail("the process died, or took too long")
    return [case | result for case, result in zip(cases, json.loads(told), strict=True)]


def check(found: list[Case]) -> None:
    wrong = []
    for case in found:
        name = f"{case['plan']} {case['objective']} {case['shape']} {'masked ' if case['masked'] else ''}"
        if "refused" in case:  # then the smallest possible budget is indeed above the given one
            if case["smallest"] <= case["budget"]:
                wrong.append(f"{name}: refused {case['budget']}, names {case['smallest']}")
            continue
        allowed = case["budget"] + case["workspace"] + GRANULARITY
        if case["used"] > allowed or case["planned"] > case["budget"]:
            mib = {k: round(case[k] / MIB, 1) for k in ("budget", "planned", "used", "workspace")}
            wrong.append(f"{name}: {mib}")
    assert not wrong, "\n".join(wrong)
    assert sum("refused" not in case for case in found) > len(found) // 2


@linux
def test_budgets_are_kept() -> None:
    check(measure("float32", "cpp", [(1024, 128, 8192)], [16], masks=[True]))


@linux
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
def test_budgets_are_kept_with_a_padded_vocabulary(dtype: str) -> None:
    """With half as many rows of padding as entries: budgets into which no copy of the head or its gradient fits.

    The vocabulary is odd, so that the rows of a tile are further apart than they are long.
    """
    chosen = [("forward-gradient", "GRPO", "hwb", 4 if dtype == "float32" else 22), ("recompute", "GRPO", "hw", 6)]
    chosen += [("two-pass", "jsd", "hw", 6), ("recompute", "gathered", "hw", 10), ("frozen-head", "logprobs", "h", 6)]
    cases = [a_case(plan, name, needs, (512, 512, 8191), budget) for plan, name, needs, budget in chosen]
    cases.append({**a_case(None, "logprobs", "hw", (512, 512, 8191), 6), "sets": "all"})
    cases = [{**case, "padding": 4097} for case in cases]
    check(run(dtype, "cpp", cases))


@linux
def test_budgets_are_kept_with_float32_logits() -> None:
    chosen = [("forward-gradient", "GRPO", "hw"), ("two-pass", "jsd", "hw"), ("frozen-head", "logprobs", "h")]
    cases = [{**a_case(*case, (512, 128, 8192), 12), "float32_logits": True} for case in chosen]
    check(run("bfloat16", "cpp", cases))


@linux
@pytest.mark.parametrize(
    ("dtype", "float32_logits"), [("float32", False), ("bfloat16", False), pytest.param("bfloat16", True, marks=SLOW)]
)
def test_budgets_are_kept_by_batch_invariant_calls(dtype: str, float32_logits: bool) -> None:
    chosen = [("forward-gradient", "GRPO", "hw", 24), ("forward-gradient", "jsd", "hw", 36)]
    chosen += [("recompute", "logprobs", "hw", 12), ("two-pass", "logprobs", "hw", 12), ("recompute", "jsd", "h", 24)]
    chosen += [
        ("frozen-head", "logprobs", "h", 20),
        ("forward", "logprobs", "", 12),
        ("recompute", "gathered", "hw", 12),
    ]
    cases = [a_case(*case[:3], (2048, 128, 8191), case[3] + 8 * float32_logits) for case in chosen]
    option = {"batch_invariant": True, "float32_logits": float32_logits}
    check(run(dtype, "cpp", [{**case, **option} for case in cases]))


@linux
@SLOW
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_budgets_are_kept_with_float32_logits_on_the_grid(dtype: str) -> None:
    shapes = SHAPES if dtype == "bfloat16" else [HALF_SHAPE]
    check(measure(dtype, "cpp", shapes, [20], masks=[True], float32_logits=True, divergences=5))
    check(measure(dtype, "cpp", shapes[:1], [80], float32_logits=True))


@linux
@SLOW
@pytest.mark.parametrize(
    ("dtype", "backend"), [("float32", "cpp"), ("bfloat16", "cpp"), ("float16", "cpp"), ("float32", "torch")]
)
def test_budgets_are_kept_on_the_grid(dtype: str, backend: str) -> None:
    if dtype == "float16":
        check(measure(dtype, backend, [HALF_SHAPE], [16], masks=[True]))
        return
    if backend == "torch":  # plain torch takes several times as long for the same plans: half the tokens, one budget
        for (tokens, hidden, vocab), budget in zip(SHAPES, (32, 128, 128), strict=True):
            check(measure(dtype, backend, [(tokens // 2, hidden, vocab)], [budget], masks=[True]))
        return
    check(measure(dtype, backend, SHAPES, [16], masks=[True], divergences=5))
    check(measure(dtype, backend, SHAPES[:1], [64]))
    check(measure(dtype, backend, SHAPES[1:2], [256], masks=[True]))


@linux
@pytest.mark.parametrize(
    ("dtype", "budgets"),
    [
        ("float32", [64]),
        pytest.param("float32", [16, 64, 80], marks=SLOW),
        pytest.param("bfloat16", [16, 64, 80], marks=SLOW),
    ],
)
def test_budgets_are_kept_with_sampling_masks(dtype: str, budgets: list[int]) -> None:
    """30,000 tokens x 32 ids: what an id costs decides; 3,000 tokens, 300 of which have sets of 4,096.

    The dense rows' products are small: V = 8192, H = 4.
    """
    cases = [
        {**a_case(None, "GRPO", "hw", (n, 4, 8192), budget), "sets": sets}
        for n, sets in ((30_000, "all"), (30_000, "most"), (3_000, "wide"))
        for budget in budgets
    ]
    check(run(dtype, "cpp", cases))


@linux
@pytest.mark.parametrize("budgets", [[30], pytest.param([20, 40], marks=SLOW)])
def test_budgets_are_kept_where_rows_decide(budgets: list[int]) -> None:
    """Each plan within 10 MiB of the least that it takes: 300 bytes per row are 29 MiB here."""
    check(measure("float32", "cpp", [MANY_ROWS], budgets, masks=[True]))


@linux
def test_budgets_are_kept_where_entries_decide() -> None:
    """Half a million ids beside 8192 rows of 512 logits: 56 bytes for each are 28 MiB."""
    plans = (("recompute", "hw"), ("two-pass", "hw"), ("frozen-head", "h"), ("forward", ""))
    check(run("float32", "cpp", [a_case(plan, "gathered", needs, (8192, 16, 512), 36) for plan, needs in plans]))


@linux
def test_a_pass_gives_its_tile_back_where_the_next_has_no_room_beside_it() -> None:
    """malloc keeps what lay beneath something that is held: 1024 x 64 x 32768 within 16 MiB took 18.9."""
    call = Call(
        rows=1024,
        hidden=64,
        vocab=32768,
        dtype=torch.float32,
        device="cpu",
        needs=Needs(True, True, False),
        all_rows=1024,
        backend="cpp",
        scope=ANY,
        slopes=1,
    )
    assert choose(call, 16 * MIB).mapped
    assert not choose(call, 1024 * MIB).mapped
    by_malloc, mapped = map(int, python("-c", _FREED).split())
    assert mapped < 2 * MIB < 15 * MIB < by_malloc


#: Prints how many bytes stay resident of 16 MiB that were freed, by malloc and as a plan's tile.
_FREED = """
import os, pathlib, torch
from fastrl.passes import head

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

for make in (torch.empty, lambda *size: head.scratch(size, torch.float32, torch.empty(0), "torch")):
    torch.empty(6 * 2**20).fill_(0.0)  # freed: from now on malloc takes so much from its heap
    before = resident()
    tile = make(4 * 2**20).fill_(0.0)
    above = [torch.zeros(1000) for _ in range(100)]
    assert resident() - before > 15 * 2**20
    del tile
    print(resident() - before)
    del above
"""


@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "float32_logits"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)],
    ids=str,
)
@pytest.mark.parametrize(("plan", "objective", "needs"), CASES, ids=str)
def test_budgets_are_kept_on_a_gpu(
    plan: str | None, objective: str, needs: str, dtype: torch.dtype, float32_logits: bool
) -> None:
    workspace = 32 * MIB  # cuBLAS' own, on Hopper, which torch's allocator counts
    for shape in [(8192, 1024, 32768), (2048, 512, 151936), (32768, 256, 16384)]:
        for budget in (16, 128, 1024, 8192):
            case = budget_child.Case(
                plan, objective, needs, shape, budget * MIB, True, dtype, "cuda", float32_logits=float32_logits
            )
            call = case.prepare()
            words = budget_child.refusal(call)
            if words is not None:
                assert "the smallest possible is" in words or "cannot be followed" in words
                continue
            case.clear()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = call()
            torch.cuda.synchronize()
            used = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            del held
            assert used <= budget * MIB + workspace + GRANULARITY, (shape, budget, used / MIB)


@linux
@SLOW
def test_a_step_of_32768_tokens_times_151936_entries_within_256_mib() -> None:
    """Whole logits would be 18.6 GiB in float32, several times over; H = 64 keeps it to minutes on two cores."""
    case = a_case(None, "GRPO", "hw", (32768, 64, 151936), 256)
    (found,) = run("float32", "cpp", [{**case}])
    assert found["used"] <= 256 * MIB + found["workspace"] + GRANULARITY, found
    assert found["planned"] <= 256 * MIB


# Row-local: gradients in the forward. GSPO off-policy: the logits are rebuilt in the backward.
@linux
@pytest.mark.parametrize("objective", ["GRPO", "GSPO"])
@pytest.mark.parametrize(
    ("shape", "most"),
    [  # one float32 tensor of tokens x vocabulary would be 297 MiB, and 9.3 GiB
        ((512, 4, 151936), 200),
        pytest.param((16384, 128, 151936), 512, marks=SLOW),
    ],
)
def test_no_tensor_of_tokens_by_vocabulary_without_a_budget(
    objective: str, shape: tuple[int, int, int], most: int
) -> None:
    (found,) = run("float32", "cpp", [a_case(None, objective, "hw", shape, None)])
    assert found["used"] < most * MIB, found


def test_copies_of_inputs_count() -> None:
    """Hidden states that are shifted by a slice, or cast by autocast, are copied first; the budget pays for that."""
    hidden = torch.zeros(4, 257, 64, requires_grad=True)
    weight = torch.zeros(4096, 64, requires_grad=True)
    targets = torch.zeros(4, 256, dtype=torch.int64)

    def least(hidden: torch.Tensor) -> int:
        return smallest_budget(fastrl.linear_token_logprobs, hidden, weight, targets, memory_budget=1000)[0]

    whole = least(hidden[:, :-1].contiguous())
    assert least(hidden[:, :-1]) == whole + hidden[:, :-1].numel() * 4
    with torch.autocast("cpu", torch.bfloat16):
        assert least(hidden[:, :-1].contiguous()) > 2 * 2 * weight.numel()
