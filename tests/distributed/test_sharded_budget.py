"""Each rank of a vocabulary's group keeps the budget of bytes: the high-water mark of its process, plan by plan."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import budget_child
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from smallest_budget import SMALLEST

import fastrl
from fastrl.planning import plans

MIB = 2**20
#: What of a measurement is not temporary tensors: a huge page at either end of the tile, and what malloc keeps.
GRANULARITY = 3 * MIB
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads and resets a process' peak in /proc")


@dataclass(frozen=True)
class Call:
    """A call of `linear_policy_loss`, or of `linear_token_logprobs` for no objective, over all ranks."""

    plan: str | None
    objective: str
    needs: str  # the inputs with gradients, "hwb"
    shape: tuple[int, int, int]  # N, H, V
    dtype: torch.dtype = torch.float32
    padding: int = 0  # of the last rank's rows
    sets: int = 0  # ids of each token's support; 0: none is recorded


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two processes that do nothing else."""
    processes = Ranks(2)
    yield processes
    processes.stop()


def measured(call: Call, budget: int) -> dict[str, Any]:
    """Bytes that the call and its backward took and were planned to take on this rank, and those of matrix products."""
    # Buffers come from the system and go back to it, so that a peak is not hidden by what an earlier one left.
    for parameter, value in ((-3, 65536), (-2, 0), (-8, 1)):  # M_MMAP_THRESHOLD, M_TOP_PAD, M_ARENA_MAX
        ctypes.CDLL(None).mallopt(parameter, value)
    n, width, vocab = call.shape
    rank, g = dist.get_rank(), torch.Generator().manual_seed(0)
    sizes = (vocab * 3 // 4, vocab - vocab * 3 // 4)
    head = {"hidden": torch.randn(n, width, generator=g), "weight": torch.randn(sizes[rank], width) / width**0.5}
    head |= {"bias": torch.zeros(sizes[rank])} if "b" in call.needs else {}
    head = {k: x.to(call.dtype).requires_grad_(k[0] in call.needs) for k, x in head.items()}
    targets = torch.randint(vocab - call.padding, (n,), generator=g)
    given: dict[str, Any] = {"mask": torch.rand(n, generator=g) > 0.3, "memory_budget": budget}
    given |= {"tp_group": dist.group.WORLD} | ({"vocab_size": vocab - call.padding} if call.padding else {})
    if call.sets:
        ids = torch.randint(vocab, (n * call.sets,), generator=g)
        sets = fastrl.SamplingMask(ids, torch.arange(0, len(ids) + 1, call.sets)).with_targets(targets)
        given["sampling_mask"] = sets
    batch = {"advantages": torch.randn(8, generator=g), "old_logprobs": 0.1 * torch.randn(n, generator=g) - 9}
    batch |= {"ref_logprobs": batch["old_logprobs"], "cu_seqlens": torch.arange(0, n + 1, n // 8, dtype=torch.int32)}
    chosen: list[plans.Plan] = []
    choose = plans.choose

    def spy(*arguments: Any) -> plans.Plan:
        chosen.append(choose(*arguments))
        return chosen[-1]

    def run() -> Any:
        for x in head.values():
            x.grad = None
        with plans.use_plan(call.plan) if call.plan else nullcontext():
            if call.objective:
                objective = budget_child.OBJECTIVES[call.objective]
                out: Any = fastrl.linear_policy_loss(**head, targets=targets, objective=objective, **batch, **given)
                loss = out.loss
            else:
                out = fastrl.linear_token_logprobs(**head, targets=targets, entropy="w" in call.needs, **given)
                loss = out.logprobs.sum() + (0 if out.entropy is None else out.entropy.sum())
        if call.needs:
            loss.backward()
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "choose", spy)
        words = budget_child.refusal(run)
        if words is not None:
            least = re.search(SMALLEST, words)
            return {"refused": words, "smallest": int(least[1]) if least else 2**62}
        for x in head.values():
            x.grad = None
        used = budget_child.peak(run)
    assert all(x.grad is None or bool(x.grad.isfinite().all()) for x in head.values())
    beside = budget_child.workspace(chosen[-1], width, call.dtype)
    return {"used": used, "planned": chosen[-1].temporary_bytes, "workspace": beside, "plan": chosen[-1].name}


SHAPE, ROWS, NARROW = (1024, 64, 16384), (100_000, 2, 16), torch.bfloat16
FAST = [
    Call("forward-gradient", "GRPO", "hw", SHAPE),
    Call("recompute", "", "hw", (512, 256, 8192), padding=500),
    Call("two-pass", "", "hw", SHAPE, NARROW),
    Call("sparse", "", "hw", (8192, 256, 2048), NARROW, sets=4),
    Call("forward", "", "", ROWS),  # what is held for a row decides
]
OTHERS = [
    Call("recompute", "GRPO", "hw", SHAPE),
    Call("two-pass", "GRPO", "hw", SHAPE),
    Call("whole-response", "GSPO", "hwb", SHAPE),
    Call("frozen-head", "", "h", SHAPE),
    Call("recompute", "GSPO", "h", SHAPE),
    Call("sparse", "", "hw", (4096, 64, 4096), sets=8),
    Call("recompute", "", "hwb", ROWS),
    Call("forward-gradient", "GRPO", "hw", ROWS),
    Call("recompute", "GRPO", "hw", ROWS),
    Call("forward-gradient", "GRPO", "hw", SHAPE, NARROW),
    Call("recompute", "", "hw", SHAPE, NARROW),
    Call("frozen-head", "", "h", SHAPE, NARROW),
]
CALLS = [*FAST, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)]


def named(call: Call) -> str:
    return f"{call.plan} {call.objective or 'logprobs'} {call.needs} {call.shape} {call.dtype}"


@pytest.mark.parametrize("call", CALLS, ids=named)
def test_budgets_are_kept(pair: Ranks, call: Call) -> None:
    """With 1 MiB more than the least that the plan takes, which would be a collective for each row."""
    budget = pair.run(measured, call, 1000)[0]["smallest"] + MIB
    for rank, x in enumerate(pair.run(measured, call, budget)):
        mib = {k: v if isinstance(v, str) else round(v / MIB, 1) for k, v in {**x, "budget": budget}.items()}
        assert "used" in x and x["planned"] <= budget, (rank, mib)
        assert x["used"] <= budget + x["workspace"] + GRANULARITY, (rank, mib)
